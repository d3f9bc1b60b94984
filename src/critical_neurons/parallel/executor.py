"""Executor: runs independent tasks, as many at once as it has slots; in this process, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from critical_neurons.errors import CriticalNeuronsError, MissingExtraError, WorkersError
from critical_neurons.parallel.threads import on_threads

SendMessage: TypeAlias = Callable[[Any], None]
"""Called by a task with a message for the process that submitted it."""

OnMessage: TypeAlias = Callable[[str, Any], None]
"""Called with the name of a task and its message."""

Task: TypeAlias = Callable[[SendMessage], Any]
"""A call that can be pickled, with a result that can be pickled."""


@dataclass(frozen=True)
class Done:
    """A finished task: its result, or its error."""

    name: str
    result: Any = None
    error: CriticalNeuronsError | None = None


class Executor(Protocol):
    @property
    def slots(self) -> int:
        """How many tasks can run at once now."""

    def run(self, tasks: Iterable[tuple[str, Task]]) -> Iterator[Done]:
        """Yield the finished tasks, in any order. A task is taken from the iterable when a slot is free.

        Errors other than the package's own are bugs and end the run.
        """


@dataclass(frozen=True)
class SerialExecutor:
    """Runs tasks in this process, one at a time, on `threads` threads; None keeps the present number."""

    threads: int | None
    on_message: OnMessage
    slots: int = 1

    def run(self, tasks: Iterable[tuple[str, Task]]) -> Iterator[Done]:
        for name, task in tasks:
            with nullcontext() if self.threads is None else holding_threads(self.threads):
                done = attempt(name, task, partial(self.on_message, name))
            yield done


def run_in_order(executor: Executor, calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """The results of independent calls, in the order of the calls: sums of them do not depend on the executor."""
    early: dict[int, Any] = {}
    following = 0
    for done in executor.run(_number(calls, torch.get_num_threads())):
        if done.error is not None:
            raise done.error
        early[int(done.name)] = done.result
        while following in early:
            yield early.pop(following)
            following += 1


def _number(calls: Iterable[Callable[[], Any]], threads: int) -> Iterator[tuple[str, Task]]:
    """The calls as numbered tasks. An executor may iterate in its own thread, for which torch has another setting."""
    drawn = enumerate(calls)
    while True:
        torch.set_num_threads(threads)
        if (each := next(drawn, None)) is None:
            return
        yield str(each[0]), partial(_call, each[1])


def _call(call: Callable[[], Any], send: SendMessage) -> Any:
    return call()


def attempt(name: str, task: Task, send: SendMessage) -> Done:
    try:
        return Done(name, task(send))
    except CriticalNeuronsError as error:
        return Done(name, error=error)


def explain_unpicklable(error: Exception) -> WorkersError:
    why = str(error.__cause__ or error).strip(' \n"').splitlines()[-1]
    return WorkersError(
        f"workers: the model, or a function given with it, cannot be pickled and sent to another process ({why}). "
        "Take open files, locks and handles off it, or leave workers= out."
    )


_allowed: ContextVar[int | None] = ContextVar("threads of the task", default=None)


def find_allowed_threads() -> int | None:
    """The number of threads of the running task, which solvers use too; None outside of tasks."""
    return _allowed.get()


def settle_threads(count: int) -> None:
    """Use `count` threads in torch, BLAS and solvers from now on, in a process that only runs tasks."""
    _limit_blas(count)
    torch.set_num_threads(count)
    _allowed.set(count)


def _limit_blas(count: int) -> AbstractContextManager[Any]:
    """Takes effect at once; used as a context it is undone at the end."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError("threadpoolctl", "jobs") from error
    limits: AbstractContextManager[Any] = threadpool_limits(count)
    return limits


@contextmanager
def holding_threads(count: int) -> Iterator[None]:
    """The same within a context. Without threadpoolctl BLAS is not limited."""
    token = _allowed.set(count)
    try:
        limits = _limit_blas(count)
    except MissingExtraError:
        limits = nullcontext()
    try:
        with limits, on_threads(count):
            yield
    finally:
        _allowed.reset(token)

"""What a crew is: it runs independent pieces, as many at once as it has slots, and gives each as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from critical_neurons.errors import CriticalNeuronsError, MissingExtraError
from critical_neurons.parallel.threads import on_threads

Tell: TypeAlias = Callable[[Any], None]
"""What a piece calls with a message for the process that sent it."""

OnMessage: TypeAlias = Callable[[str, Any], None]
"""Called with the name of a piece and its message."""

Piece: TypeAlias = Callable[[Tell], Any]
"""It can be pickled, and so can its result."""


@dataclass(frozen=True)
class Done:
    """A piece that has ended: its result, or what went wrong with it."""

    name: str
    result: Any = None
    error: CriticalNeuronsError | None = None


class Crew(Protocol):
    @property
    def slots(self) -> int:
        """Pieces that are run at once, at present."""

    def run(self, pieces: Iterable[tuple[str, Piece]]) -> Iterator[Done]:
        """The pieces as they are done, in any order. Each is drawn from the iterable when there is a slot for it.

        Errors other than the package's own are bugs, and end the run.
        """


@dataclass(frozen=True)
class Alone:
    """This process, one piece after the other."""

    threads: int
    on_message: OnMessage
    slots: int = 1

    def run(self, pieces: Iterable[tuple[str, Piece]]) -> Iterator[Done]:
        for name, piece in pieces:
            with _holding_threads(self.threads):
                done = attempt(name, piece, partial(self.on_message, name))
            yield done


def attempt(name: str, piece: Piece, tell: Tell) -> Done:
    try:
        return Done(name, piece(tell))
    except CriticalNeuronsError as error:
        return Done(name, error=error)


_allowed: ContextVar[int | None] = ContextVar("threads of the piece", default=None)


def find_allowed_threads() -> int | None:
    """Threads of the piece that is being run, which hold for solvers as well; None outside of pieces."""
    return _allowed.get()


def settle_threads(count: int) -> None:
    """torch, BLAS and solvers compute on `count` threads from here on, in a process that runs nothing but pieces."""
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
def _holding_threads(count: int) -> Iterator[None]:
    """The same within a context. Without threadpoolctl BLAS is left as it is."""
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

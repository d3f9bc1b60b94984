"""Processes: tasks on processes of this machine. The only file that imports joblib."""

from __future__ import annotations

import pickle
import signal
import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import Manager
from typing import Any

from critical_neurons.errors import MissingExtraError, WorkersError
from critical_neurons.parallel.executor import Done, OnMessage, Task, attempt, explain_unpicklable, settle_threads

try:
    import joblib
except ImportError as missing:
    raise MissingExtraError("joblib", "jobs") from missing


def count_slots(jobs: int, threads: int) -> int:
    """As many tasks at once as fit on the cores of this process, at most `jobs`."""
    cores: int = joblib.cpu_count()
    return max(1, min(jobs, cores // threads))


class Processes:
    """`messages` is a queue for the messages of tasks."""

    def __init__(self, slots: int, threads: int, messages: Any) -> None:
        self.slots, self._threads, self._messages = slots, threads, messages
        self._under_way: Generator[Done, None, None] | None = None

    def run(self, tasks: Iterable[tuple[str, Task]]) -> Iterator[Done]:
        work = joblib.Parallel(
            n_jobs=self.slots,
            return_as="generator_unordered",
            batch_size=1,
            pre_dispatch="n_jobs",
            max_nbytes=None,  # arrays as they are: those of mapped files are read-only
        )
        dones: Generator[Done, None, None] = work(
            joblib.delayed(_run_there)(name, task, self._threads, self._messages) for name, task in tasks
        )
        self._under_way = dones
        try:
            for done in dones:  # noqa: UP028  "yield from" would close it by itself, and joblib warn
                yield done
        except BrokenProcessPool as error:
            raise WorkersError(
                "jobs: a process ended in the middle of its task: killed, or out of memory. What was stored is "
                "kept; take fewer jobs if memory was short."
            ) from error
        except pickle.PicklingError as error:
            raise explain_unpicklable(error) from error
        finally:
            self.give_up()

    def give_up(self) -> None:
        if self._under_way is not None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that tasks were not finished
                self._under_way.close()


@contextmanager
def start_processes(slots: int, threads: int, on_message: OnMessage) -> Iterator[Processes]:
    with Manager() as manager:
        messages = manager.Queue()
        listener = threading.Thread(target=_forward, args=(messages, on_message), daemon=True)
        listener.start()
        processes = Processes(slots, threads, messages)
        try:
            yield processes
        finally:
            processes.give_up()
            messages.put(None)
            listener.join()


def _run_there(name: str, task: Task, threads: int, messages: Any) -> Done:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends the others
    settle_threads(threads)
    return attempt(name, task, partial(_put, messages, name))


def _put(messages: Any, name: str, message: Any) -> None:
    messages.put((name, message))


def _forward(messages: Any, on_message: OnMessage) -> None:
    while (received := messages.get()) is not None:
        on_message(*received)

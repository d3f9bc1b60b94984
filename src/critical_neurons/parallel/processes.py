"""Processes: pieces on processes of this machine. The only file that imports joblib."""

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
from critical_neurons.parallel.crew import Done, OnMessage, Piece, attempt, explain_unpicklable, settle_threads

try:
    import joblib
except ImportError as missing:
    raise MissingExtraError("joblib", "jobs") from missing


def count_slots(jobs: int, threads: int) -> int:
    """As many pieces at once as fit on the cores of this process, at most `jobs`."""
    cores: int = joblib.cpu_count()
    return max(1, min(jobs, cores // threads))


class Processes:
    """`news` is a queue for the messages of pieces."""

    def __init__(self, slots: int, threads: int, news: Any) -> None:
        self.slots, self._threads, self._news = slots, threads, news
        self._under_way: Generator[Done, None, None] | None = None

    def run(self, pieces: Iterable[tuple[str, Piece]]) -> Iterator[Done]:
        work = joblib.Parallel(
            n_jobs=self.slots,
            return_as="generator_unordered",
            batch_size=1,
            pre_dispatch="n_jobs",
            max_nbytes=None,  # arrays as they are: those of mapped files are read-only
        )
        dones: Generator[Done, None, None] = work(
            joblib.delayed(_run_there)(name, piece, self._threads, self._news) for name, piece in pieces
        )
        self._under_way = dones
        try:
            for done in dones:  # noqa: UP028  "yield from" would close it by itself, and joblib warn
                yield done
        except BrokenProcessPool as error:
            raise WorkersError(
                "jobs: a process ended in the middle of its piece: killed, or out of memory. What was stored is "
                "kept; take fewer jobs if memory was short."
            ) from error
        except pickle.PicklingError as error:
            raise explain_unpicklable(error) from error
        finally:
            self.give_up()

    def give_up(self) -> None:
        if self._under_way is not None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that pieces were not finished
                self._under_way.close()


@contextmanager
def start_processes(slots: int, threads: int, on_message: OnMessage) -> Iterator[Processes]:
    with Manager() as manager:
        news = manager.Queue()
        listener = threading.Thread(target=_pass_on, args=(news, on_message), daemon=True)
        listener.start()
        processes = Processes(slots, threads, news)
        try:
            yield processes
        finally:
            processes.give_up()
            news.put(None)
            listener.join()


def _run_there(name: str, piece: Piece, threads: int, news: Any) -> Done:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends the others
    settle_threads(threads)
    return attempt(name, piece, partial(_put, news, name))


def _put(news: Any, name: str, what: Any) -> None:
    news.put((name, what))


def _pass_on(news: Any, on_message: OnMessage) -> None:
    while (heard := news.get()) is not None:
        on_message(*heard)

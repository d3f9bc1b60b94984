"""Node processes: batches of a tree's nodes, bounded by other processes of this machine.

They are fresh interpreters that import what the bounds need and nothing of the user's program, and read batches from
their standard input: when that closes, for whatever reason, they end.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any

from critical_neurons.core.branching import BoundedNodes, NodeBounds
from critical_neurons.core.structure import Floats

WAIT = 0.05
"""Seconds between two looks at the time limit."""

SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class NodeBatch:
    """Nodes to bound, see `NodeBounds.raise_bounds`."""

    lower: Floats
    upper: Floats
    multipliers: Floats
    cutoff: float
    steps: int

    def run(self, bounds: NodeBounds, check: Callable[[], object]) -> BoundedNodes:
        return bounds.raise_bounds(
            self.lower, self.upper, self.multipliers, cutoff=self.cutoff, steps=self.steps, check=check
        )


def count_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class NodeProcesses:
    def __init__(self, bounds: NodeBounds, count: int) -> None:
        """Raises `OSError` if a process cannot be started."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        self._first = bounds
        self._begun: set[int] = set()
        try:
            for _ in range(count):
                self._processes.append(_start())
                self._idle.put(self._processes[-1])
        except BaseException:
            self.close()
            raise

    def run(self, batches: Sequence[NodeBatch], check: Callable[[], object]) -> list[BoundedNodes | None]:
        """The batches in their order, None for those whose process ended. `check` is called while waiting."""
        futures: list[Future[BoundedNodes | None]] = [self._threads.submit(self._ask, batch) for batch in batches]
        while wait(futures, timeout=WAIT).not_done:
            check()
        return [future.result() for future in futures]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)  # their processes are gone, so they end
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not sent is lost
                    _open(pipe).close()

    def _ask(self, batch: NodeBatch) -> BoundedNodes | None:
        process = self._idle.get()
        try:
            if process.pid not in self._begun:
                self._begun.add(process.pid)
                pickle.dump(self._first, _open(process.stdin))
            pickle.dump(batch, _open(process.stdin))
            _open(process.stdin).flush()
            answer: BoundedNodes = pickle.load(_open(process.stdout))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            return None
        else:
            return answer
        finally:
            self._idle.put(process)


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _start() -> subprocess.Popen[bytes]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("there is no interpreter to start")
    paths = [str(path) for path in sys.path]
    code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **SINGLE_THREAD},
        start_new_session=True,  # Ctrl-C is for the main process, which ends the others
    )


def serve() -> None:
    """Answer batches until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    with suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        bounds: Any = pickle.load(sys.stdin.buffer)
        while True:
            batch: NodeBatch = pickle.load(sys.stdin.buffer)
            pickle.dump(batch.run(bounds, lambda: None), answers)
            answers.flush()

"""Timing: wall-clock and processor seconds, by part of the package, and peak memory."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

OTHER = "other"

Seam = tuple[Any, str]
"""A module or class, and the name of one of its functions."""


class Parts:
    """A profile: processor seconds by part of the package, measured at the functions where parts call each other.
    Times are exclusive of other parts called; the remainder is `OTHER`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._now = OTHER
        self._since = time.process_time()

    @property
    def seconds(self) -> dict[str, float]:
        self._enter(self._now)
        return {part: round(seconds, 3) for part, seconds in self._seconds.items()}

    def _enter(self, part: str) -> str:
        """Switch to a part; returns the previous one."""
        before, now = self._now, time.process_time()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._now, self._since = part, now
        return before

    def follow(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def followed(*arguments: Any, **named: Any) -> Any:
            before = self._enter(part)
            try:
                return call(*arguments, **named)
            finally:
                self._enter(before)

        return followed


@contextmanager
def follow_parts() -> Iterator[Parts]:
    """Profile the body of the `with` statement by part."""
    parts = Parts()
    replaced = [(owner, name, getattr(owner, name)) for seams in list_seams().values() for owner, name in seams]
    for part, seams in list_seams().items():
        for owner, name in seams:
            setattr(owner, name, parts.follow(part, getattr(owner, name)))
    try:
        yield parts
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def list_seams() -> dict[str, list[Seam]]:
    """The profiled functions by part. Solvers call those of rows and tangents, which are counted apart."""
    from critical_neurons.api import score, score_task
    from critical_neurons.formulations.lazy_rows import ReluRows
    from critical_neurons.formulations.loss_term import LossTerm
    from critical_neurons.formulations.pool_rows import PoolRows
    from critical_neurons.solvers.auto import AutoSolver
    from critical_neurons.solvers.cvxpy_conic import ConicSolver
    from critical_neurons.solvers.highs import HighsSolver
    from critical_neurons.solvers.interior_point import BarrierSolver

    return {
        "reading": [(score, "read_network"), (score, "run_model")],
        "bounding": [(score_task, "bound_network")],
        "encoding": [(score_task, "encode_unchecked"), (score_task, "encode_literal")],
        "judging rows": [(ReluRows, "violations"), (ReluRows, "find_violated"), (PoolRows, "violations")],
        "building rows": [(ReluRows, "build"), (PoolRows, "build")],
        "loss and tangents": [(LossTerm, "values"), (LossTerm, "cuts"), (LossTerm, "affine_forms")],
        "solver": [(solver, "solve") for solver in (AutoSolver, BarrierSolver, ConicSolver, HighsSolver)],
    }


def measure(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result; its wall-clock and processor seconds, and the peak memory in MB: the increase, and the total of the
    process. `load` is the load average at the start."""
    load, before = os.getloadavg()[0], read_peak()
    started, used = time.perf_counter(), time.process_time()
    with follow_parts() as parts:
        made = work()
    return made, {
        "seconds": round(time.perf_counter() - started, 3),
        "processor_seconds": round(time.process_time() - used, 3),
        "parts": parts.seconds,
        "added_megabytes": round(read_peak() - before),
        "peak_megabytes": round(read_peak()),
        "load": round(load, 1),
    }


def read_peak() -> float:
    """Peak memory of this process alone, if the system reports it; getrusage includes the parent's at the fork."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    kilobytes = float(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 1024

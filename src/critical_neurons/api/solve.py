"""The public `solve`: a program to its solution, by a solver's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from critical_neurons.core.program import Program
from critical_neurons.core.solution import Solution, Step
from critical_neurons.solvers import Limits, find_solver, ignore_progress


def solve(
    program: Program,
    *,
    solver: str = "auto",
    time_limit: float = 300.0,
    gap: float = 1e-4,
    threads: int | None = None,
    seed: int = 0,
    solver_options: Mapping[str, Any] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Solution:
    """Solve a program of `encode`."""
    found, options = find_solver(solver), dict(solver_options or {})
    found.check_options(options)
    return found.solve(program, Limits(time_limit, gap, threads, seed, options), progress or ignore_progress)

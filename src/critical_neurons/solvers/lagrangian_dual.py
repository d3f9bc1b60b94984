"""The loss weight that maximises the Lagrangian dual (equation 7b), by cutting planes.

Every feasible point x gives a line above the dual function, sparsity(x) + λ (softmax(x) - level), and the bound of
the program at λ is a lower bound of the dual there. The next λ is where the lines of the best points above and within
the level cross.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from critical_neurons.core.program import Program
from critical_neurons.core.solution import Dual, DualStep, DualTrial, Solution, Status, Step, relative_gap
from critical_neurons.core.structure import Floats
from critical_neurons.errors import SolverError
from critical_neurons.solvers.base import Backend, Limits, Report

MOST_TRIALS = 25
"""Limit on the programs solved; by measurement 4 to 15 are enough."""

TIME_SHARE = 0.25
"""Share of the time left that a single program may take."""

GAP_SHARE = 0.5
"""Share of the gap tolerance to which each program is solved; the rest is for the loss weight."""

SAME_WEIGHT = 1e-3
"""Loss weights with a smaller relative difference count as equal."""

LEVEL_TOLERANCE = 1e-7
"""Share of the level by which the softmax term may exceed it."""


def maximise_dual(
    solver: Backend, program_at: Callable[[float], Program], level: float, limits: Limits, report: Report
) -> tuple[Solution, Dual]:
    """The best point found within the level, as a solution of the program at the best loss weight; and the dual.

    `program_at` gives the program at any loss weight; nothing but its cost depends on that.
    """
    return _MultiplierSearch(solver, program_at, level, limits, report).run()


@dataclass(frozen=True, eq=False)
class _Found:
    """A point of the program, and the loss weight it was found at; infinite for that of the unpruned network."""

    point: Floats
    loss_weight: float
    sparsity: float
    softmax: float


class _MultiplierSearch:
    def __init__(
        self, solver: Backend, program_at: Callable[[float], Program], level: float, limits: Limits, report: Report
    ) -> None:
        self._solver, self._program_at, self._level = solver, program_at, level
        self._limits, self._report = limits, report
        self._started = time.monotonic()
        self._unit = program_at(1.0)
        assert self._unit.unpruned is not None
        self._trials: list[DualTrial] = []
        self._solutions: list[Solution] = []
        self._above: _Found | None = None
        self._within = self._judge(self._unit.unpruned, np.inf)

    def run(self) -> tuple[Solution, Dual]:
        loss_weight: float | None = 0.0
        while loss_weight is not None:
            solution = self._solve(loss_weight)
            if solution.point is None:
                break
            self._note(loss_weight, solution, solution.point)
            loss_weight = None if solution.interrupted else self._choose_next()
        if not self._trials:
            raise SolverError(f"{self._solver.name}: {solution.status.sentence}")
        return self._conclude(interrupted=solution.interrupted)

    def _solve(self, loss_weight: float) -> Solution:
        """Warm-started from the best point within the level. Rows and tangents of earlier programs are not reused: by
        measurement they make the linear programs larger and save no time."""
        program = self._program_at(loss_weight)
        if np.isfinite(self._within.loss_weight):
            program = replace(program, given=self._within.point)
        limits = replace(
            self._limits,
            time_limit=TIME_SHARE * max(self._seconds_left(), 0.0),
            gap=GAP_SHARE * self._limits.gap / max(1.0, loss_weight * self._level),
        )

        def report(step: Step) -> None:
            self._report(DualStep(**vars(step), loss_weight=loss_weight, number=len(self._trials) + 1))

        return self._solver.solve(program, limits, report)

    def _note(self, loss_weight: float, solution: Solution, point: Floats) -> None:
        found = self._judge(point, loss_weight)
        bound = -np.inf if solution.bound is None else solution.bound
        self._trials.append(DualTrial(loss_weight, bound - loss_weight * self._level, found.sparsity, found.softmax))
        self._solutions.append(solution)
        if found.softmax > self._level * (1.0 + LEVEL_TOLERANCE):
            self._above = found
        elif found.sparsity <= self._within.sparsity:
            self._within = found

    def _judge(self, point: Floats, loss_weight: float) -> _Found:
        terms = self._unit.cost * point
        softmax = float(terms[self._unit.term.columns].sum())
        return _Found(point, loss_weight, float(terms.sum()) - softmax, softmax)

    def _choose_next(self) -> float | None:
        """Where the two lines cross, unless the search is over."""
        above, within = self._above, self._within
        gap = relative_gap(self._find_best().sparsity, max(trial.value for trial in self._trials))
        if above is None or (gap is not None and gap <= self._limits.gap):
            return None
        if len(self._trials) == MOST_TRIALS or self._seconds_left() <= 0:
            return None
        crossing = (within.sparsity - above.sparsity) / (above.softmax - within.softmax)
        known = any(math.isclose(crossing, trial.loss_weight, rel_tol=SAME_WEIGHT) for trial in self._trials)
        return crossing if above.loss_weight < crossing < within.loss_weight and not known else None

    def _find_best(self) -> _Found:
        """The point within the level with the least sparsity.

        If the integer columns of a point above the level and one within it agree, their mixture at the level is
        feasible too, and its sparsity is at most the height at which their lines cross.
        """
        above, within, whole = self._above, self._within, self._unit.integer
        if above is None or not np.array_equal(np.round(above.point[whole]), np.round(within.point[whole])):
            return within
        share = max((self._level - within.softmax) / (above.softmax - within.softmax), 0.0)
        mixed = share * above.point + (1.0 - share) * within.point
        return self._judge(self._unit.raise_term(mixed), within.loss_weight)

    def _conclude(self, *, interrupted: bool) -> tuple[Solution, Dual]:
        best = int(np.argmax([trial.value for trial in self._trials]))
        trial, solution, found = self._trials[best], self._solutions[best], self._find_best()
        objective = found.sparsity + trial.loss_weight * found.softmax
        gap = relative_gap(objective, solution.bound)
        return (
            replace(
                solution,
                status=Status.OPTIMAL if gap is not None and gap <= self._limits.gap else Status.FEASIBLE,
                point=found.point,
                objective=objective,
                seconds=time.monotonic() - self._started,
                interrupted=interrupted,
            ),
            Dual(trial.loss_weight, self._level, found.sparsity, found.softmax, trial.value, tuple(self._trials)),
        )

    def _seconds_left(self) -> float:
        return self._limits.time_limit - (time.monotonic() - self._started)

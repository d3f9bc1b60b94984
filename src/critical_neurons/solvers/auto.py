"""The automatic choice: the interior point method for many data points or wide networks, the first-order method for
very many relaxed gates or a steep loss, otherwise HiGHS."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from critical_neurons.core.program import SHARED, Program
from critical_neurons.core.solution import Solution, Status
from critical_neurons.solvers.base import Backend, Capability, Limits, Report
from critical_neurons.solvers.first_order import FirstOrderSolver
from critical_neurons.solvers.highs import HighsSolver
from critical_neurons.solvers.implied_bounds import imply_bounds
from critical_neurons.solvers.interior_point import BarrierSolver, find_obstacle

MANY = 50
"""From this many data points on the interior point method comes first: it needs no tangents, of which HiGHS would
need ever more."""

LEAST_SHARED, LEAST_COLUMNS, MOST_TOGETHER = 220, 3000, 8000
"""From this many shared columns, or columns in all, on the interior point method comes first for any number of data
points: FC-3 with ten images takes 0.2 s where HiGHS takes 0.8 s. Below, both take a tenth of a second. If there are
lazy constraints, which make Newton's equations dense, only up to the last number of columns that are shared, or that
belong to one data point: the whole VGG-16, with 4 737, is solved in minutes of processor time, and HiGHS leaves a gap
of 18 %."""

MOST_COLUMNS = 100_000
"""Limit on all columns, so that Newton's equations fit into memory and a step takes less than a minute."""

MANY_GATES = 25_000
"""From this many relaxed gates on the first-order method comes first. On parts of a VGG-16, ten images, one minute:
with 24 118 gates the interior point method ends and the first-order method does not; with 25 600 it is the reverse.
Measured before the first-order method projected onto sums, since when it needs fewer iterations.
"""

SOME_GATES, MOST_LOSS = 1000, 50.0
"""From this many relaxed gates on the first-order method also comes first if the loss of a data point in the middle
of the bounds is more than this: almost everywhere the loss is then linear and very steep, and Newton's steps are as
good as zero. On parts of a narrow VGG-16, whose bounds grow with depth, ten images, one minute: with losses of up to
5 the interior point method or HiGHS ends, with those of 90 and more only the first-order method does, from 6 400
gates to 42 880."""

SETTLED = (Status.OPTIMAL, Status.INFEASIBLE, Status.UNBOUNDED)


class AutoSolver:
    name = "auto"
    capabilities = frozenset({Capability.INTEGER, Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        HighsSolver().check_options(options)

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        """If the first solver does not finish, the other one gets the rest of the time."""
        first, *others = self._order(program, limits)
        deadline = time.monotonic() + limits.time_limit
        found = first.solve(program, limits, report)
        for other in others:
            left = deadline - time.monotonic()
            if found.status in SETTLED or found.interrupted or left <= 0:
                break
            found = min(found, other.solve(program, replace(limits, time_limit=left), report), key=_judge)
        return found

    def _order(self, program: Program, limits: Limits) -> list[Backend]:
        if limits.options or program.integer.any() or find_obstacle(program) is not None:
            return [HighsSolver()]
        if program.saddle is not None and program.start is not None:
            gates = program.gate_count
            if gates >= MANY_GATES or (gates >= SOME_GATES and _find_loss_in_the_middle(program) > MOST_LOSS):
                return [FirstOrderSolver(), BarrierSolver()]
        points = program.term.columns.stop - program.term.columns.start
        shared, of_one_point = _count_together(program)
        small = not program.sources or (
            program.column_count <= MOST_COLUMNS and max(shared, of_one_point) <= MOST_TOGETHER
        )
        wide = small and (shared >= LEAST_SHARED or program.column_count >= LEAST_COLUMNS)
        return [BarrierSolver(), HighsSolver()] if points >= MANY or wide else [HighsSolver(), BarrierSolver()]


def _find_loss_in_the_middle(program: Program) -> float:
    """The mean loss of a data point halfway between the bounds."""
    lower, upper = imply_bounds(program)
    point = np.zeros(program.column_count)
    point[: len(lower)] = (lower + upper) / 2
    return float(program.term.values(point).mean())


def _count_together(program: Program) -> tuple[int, int]:
    """The number of shared columns, and the largest number that belongs to one data point."""
    if program.origins is None:
        of_the_loss = program.term.columns
        return program.column_count - (of_the_loss.stop - of_the_loss.start), 0
    points = program.origins.points
    return int(np.sum(points == SHARED)), int(np.bincount(points[points != SHARED]).max(initial=0))


def _judge(solution: Solution) -> tuple[bool, float]:
    return solution.status not in SETTLED, np.inf if solution.gap is None else solution.gap

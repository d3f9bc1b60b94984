"""Search record: incumbent, dual bound, learnt rows and elapsed time of a search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from critical_neurons.core.deadline import TimeIsUp
from critical_neurons.core.program import Program, Rows, stack_rows
from critical_neurons.core.solution import Solution, Status, Step, relative_gap
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.base import Limits, Report

FEASIBILITY_TOLERANCE = 1e-6
"""Largest violation, relative to the scale of its ReLU, at which a row counts as satisfied."""

TIE_BREAK_SHARE = 0.1
"""Share of the gap tolerance left to the tie-break."""


class StopSearch(Exception):
    """Ends a search before its time."""

    def __init__(self, status: Status) -> None:
        self.status = status


class SearchRecord:
    def __init__(self, program: Program, limits: Limits, report: Report) -> None:
        self.program, self.limits = program, limits
        self.incumbent: Floats | None = None
        self.objective: float | None = None
        self.bound: float | None = None
        self.known = [np.zeros(source.count, dtype=bool) for source in program.sources]
        """By source: which of its rows are among the learnt."""
        self.learnt: list[Rows] = []
        self.row_count = self.cut_count = 0
        self._started = time.monotonic()
        self._history: list[Step] = []
        self._report = report

    def offer(self, point: Floats) -> None:
        value = self.program.value(point)
        if self.objective is None or value < self.objective:
            self.incumbent, self.objective = point, value

    def offer_if_feasible(self, point: Floats) -> bool:
        """Offer the point with its convex term set to the true value. Returns whether it is feasible."""
        raised = self.program.raise_term(point)
        feasible = self.is_feasible(raised)
        if feasible:
            self.offer(raised)
        return feasible

    def is_feasible(self, point: Floats) -> bool:
        """Whether the point violates no bound and no row, those of sources included; the convex term is not checked.
        Data points are searched block by block, which needs less memory than all violations at once."""
        program, slack = self.program, FEASIBILITY_TOLERANCE
        values = program.rows.matrix @ point
        return (
            bool(np.all((point >= program.lower - slack) & (point <= program.upper + slack)))
            and bool(np.all((values >= program.rows.lower - slack) & (values <= program.rows.upper + slack)))
            and not any(
                len(source.find_violated(point, block, slack)[0])
                for source in program.sources
                for block in range(source.block_count)
            )
        )

    def learn_from(self, place: int, numbers: Ints) -> Rows:
        """Build rows of a source, given its place among the sources, and record them."""
        rows = self.program.sources[place].build(numbers)
        self.known[place][numbers] = True
        self.learnt.append(rows)
        self.row_count += len(rows)
        return rows

    def raise_bound(self, bound: float) -> None:
        if np.isfinite(bound) and (self.bound is None or bound > self.bound):
            self.bound = bound

    @property
    def gap(self) -> float:
        gap = relative_gap(self.objective, self.bound)
        return np.inf if gap is None else gap

    @property
    def target(self) -> float:
        """The gap at which only the tie-break is left."""
        return (1.0 - TIE_BREAK_SHARE) * self.limits.gap

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def remaining(self) -> float:
        """Remaining seconds; raises `StopSearch` if there are none."""
        remaining = self.limits.time_limit - self.elapsed
        if remaining <= 0:
            raise StopSearch(Status.TIMED_OUT)
        return remaining

    def tilt(self, columns: slice | Ints, lower: Floats, upper: Floats) -> Floats:
        """A small extra cost of these columns, with their bounds, that breaks ties, within the share of the gap
        tolerance left for that."""
        if self.program.tie_break is None:
            return np.zeros(len(lower))
        wanted = self.program.tie_break[columns]
        spread = float(np.abs(wanted) @ (upper - lower))
        return TIE_BREAK_SHARE * self.limits.gap / max(spread, 1.0) * wanted

    def run_stoppable(self, search: Callable[[], None]) -> bool:
        """Run a search until it ends, or its time does, or it is interrupted; returns whether it was interrupted."""
        try:
            search()
        except (StopSearch, TimeIsUp):
            return False
        except KeyboardInterrupt:
            return True
        return False

    def record_step(self) -> None:
        step = Step(self.elapsed, self.objective, self.bound, self.row_count, self.cut_count)
        self._history.append(step)
        limit = self.limits.time_limit
        self._report(replace(step, time_limit=limit) if np.isfinite(limit) else step)

    def finish(self, status: Status, *, interrupted: bool, **sizes: int) -> Solution:
        """`status` is that of a search without an incumbent; `sizes` are added to those that all searches have."""
        if self.incumbent is not None:
            status = Status.FEASIBLE
        if self.gap <= self.limits.gap:
            status = Status.OPTIMAL
        program = self.program
        return Solution(
            status=status,
            point=self.incumbent,
            objective=self.objective,
            bound=self.bound,
            seconds=self.elapsed,
            history=tuple(self._history),
            sizes={
                **count_sizes(program, len(program.rows) + self.row_count),
                "cuts": self.cut_count,
                **sizes,
            },
            interrupted=interrupted,
            learnt=stack_rows(self.learnt, program.column_count),
        )


def count_sizes(program: Program, rows_used: int) -> dict[str, int]:
    return {
        "columns": program.column_count,
        "rows": program.row_count,
        "rows_used": rows_used,
        "gates": program.gate_count,
    }

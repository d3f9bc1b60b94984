"""Cutting planes: lazy constraints and tangents of the convex term, around any engine for linear programs.

Every point of the engine is checked by one forward pass. The most violated rows of the sources and tangents of the
convex term are added, and the engine continues from its last basis. Each linear optimum is a lower bound; each point
that violates no row is an incumbent once its convex term is set to the true value.

With integer columns the relaxation is solved first, to collect rows and tangents; `integer_rounds` and
`branch_and_bound` continue from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Program, Rows
from critical_neurons.core.solution import Solution, Status, relative_gap
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.implied_bounds import find_least_cost
from critical_neurons.solvers.lp_engine import LinearEngine, LinearResult, Outcome
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE, TIE_BREAK_SHARE, SearchRecord, StopSearch

ROWS_PER_ROUND = 200
"""Rows added per round, those of early layers first: a compromise between large linear programs and many rounds."""

LEAST_VIOLATION = 0.3
"""Rows below this share of the worst violation wait for a later round."""

CUT_SHARE = 1e-3
"""A column may underestimate its convex function by this share of the gap tolerance without a new tangent."""

LEAST_CUT = 1e-8
"""Lower limit of that difference: below the engine's tolerance the same tangent would be added again."""

LEAST_GAIN = 1e-6
"""Ties are broken only if the sum of scores could fall by at least this much."""

IMPROVING_TIME_SHARE = 0.1
"""Share of the remaining time for improving incumbents by local search."""


@dataclass(frozen=True)
class _Turn:
    """An optimum of the engine with its convex term set to the true value, and the engine's bound."""

    point: Floats
    value: float
    bound: float
    feasible: bool

    @property
    def gap(self) -> float:
        return find_gap(self.value, self.bound)


class CutLoop(SearchRecord):
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        """`build` loads the linear part of the program into an engine; called in `run`, as it can take long."""
        super().__init__(program, limits, report)
        self._build = build
        self._trials = 0
        self._integers = np.flatnonzero(program.integer)

    def run(self) -> Solution:
        interrupted = False
        try:
            status = self._search()
        except StopSearch as stop:
            status = stop.status
        except KeyboardInterrupt:
            status, interrupted = Status.TIMED_OUT, True
        if status is not Status.OPTIMAL:
            self._take_reserve()
        return self.finish(status, interrupted=interrupted)

    def _search(self) -> Status:
        for point in self.program.known:
            self.offer(point)
        if self.program.given is not None:
            self._improve(self.program.given, self.program.unpruned)
        self.raise_bound(find_least_cost(self.program))
        self.remaining()
        self._propose(self.program.lower)
        self._engine = self._build(self.program, self.limits)
        for point in self.program.known:
            self._add_cuts(self._below(point))
        relaxed = self._solve_relaxation()
        if self.gap > self.target and len(self._integers):
            self._solve_integers(relaxed)
        self._break_ties()
        return Status.OPTIMAL

    def _solve_relaxation(self) -> Floats:
        """Solve the relaxation, whose linear programs bound the whole program."""
        for turn in self._turns():
            self.raise_bound(turn.bound)
            if turn.feasible and self._is_integral(turn.point):
                self.offer(turn.point)
            self._complete(turn.point)
            self._propose(turn.point)
            self.record_step()
            if self.gap <= self.target or (turn.feasible and turn.gap <= self.target):
                break
        return turn.point

    def _solve_integers(self, relaxed: Floats) -> None:
        """Continue where the solved relaxation did not close the gap."""
        raise NotImplementedError

    def _take_reserve(self) -> None:
        """Offer a point that is used only if the search is stopped."""

    def _complete(self, point: Floats) -> bool:
        """Offer the formulation's completion of these scores. Returns whether there is one and it is feasible."""
        if self.program.complete is None:
            return False
        return self.offer_if_feasible(self.program.complete(point))

    def _propose(self, point: Floats) -> None:
        """Offer the points that the formulation proposes for these scores, as long as they are feasible."""
        if self.program.propose is not None:
            for proposed in self.program.propose(point):
                if not self.offer_if_feasible(proposed):
                    return
                self.remaining()

    def _improve(self, *points: Floats | None) -> None:
        """Offer the points that the formulation's local search finds from these."""
        if self.program.improve is None:
            return
        starts = [point for point in points if point is not None]
        for start in starts:
            seconds = IMPROVING_TIME_SHARE * self.remaining() / len(starts)
            better = self.program.improve(start, seconds=seconds, seed=self.limits.seed + self._trials)
            self._trials += 1
            self.offer_if_feasible(better)
            self.record_step()

    def _break_ties(self) -> None:
        """Replace the incumbent by an equally good point with the smallest tie_break · x.

        Integer columns keep their values. If no such point is found in time, the incumbent stays.
        """
        program, best, objective = self.program, self.incumbent, self.objective
        if program.tie_break is None or best is None or objective is None:
            return
        counted = np.flatnonzero(program.tie_break)
        ends = np.where(program.tie_break > 0, program.lower, program.upper)
        if program.tie_break @ best <= program.tie_break[counted] @ ends[counted] + LEAST_GAIN:
            return
        slack = TIE_BREAK_SHARE * self.limits.gap * max(1.0, abs(objective))
        self._fix_integers(best)
        limit = np.array([objective + slack / 2])
        as_good = Rows(sparse.csr_array(program.cost[None]), np.array([-np.inf]), limit)
        self._engine.add_rows(as_good)
        self._engine.change_cost(program.tie_break)
        for turn in self._turns():
            if turn.feasible and turn.value <= objective + slack:
                if program.tie_break @ turn.point < program.tie_break @ best:
                    self.incumbent, self.objective = turn.point, turn.value
                    self.record_step()
                return

    def _turns(self) -> Iterator[_Turn]:
        """Solve, check, add what is violated, and repeat until nothing is."""
        while True:
            result = self._engine.solve(self.remaining())
            point = accept(result)
            feasible = not self._add_violated_rows(point)
            raised = self.program.raise_term(point)
            yield _Turn(raised, self.program.value(raised), result.bound, feasible)
            if not self._add_cuts(point) and feasible:
                return

    def _fix_integers(self, point: Floats) -> None:
        values = np.round(point[self._integers])
        self._engine.change_bounds(self._integers, values, values)

    def _add_violated_rows(self, point: Floats) -> bool:
        """Add the most violated rows, those of early layers first. Returns whether any was violated."""
        found = False
        for place, source in enumerate(self.program.sources):
            violations = source.violations(point)
            violations[self.known[place]] = 0.0
            worst = np.flatnonzero(violations > FEASIBILITY_TOLERANCE)
            if len(worst) == 0:
                continue
            found = True
            if len(worst) > ROWS_PER_ROUND:
                worst = _choose_front(worst, violations[worst], source.ends)
            for at in range(0, len(worst), source.rows_at_once):
                self.remaining()
                self._engine.add_rows(self.learn_from(place, worst[at : at + source.rows_at_once]))
        return found

    def _add_cuts(self, point: Floats) -> bool:
        """Add tangents of the convex functions that their columns underestimate at the point."""
        columns = self.program.term.columns
        values = self.program.term.values(point)
        tolerance = max(CUT_SHARE * self.limits.gap, LEAST_CUT) * np.maximum(1.0, values)
        low = np.flatnonzero((values > point[columns] + tolerance) & (self.program.cost[columns] > 0))
        if len(low):
            self._learn(self.program.term.cuts(point, low))
            self.cut_count += len(low)
        return len(low) > 0

    def _learn(self, rows: Rows) -> None:
        self._engine.add_rows(rows)
        self.learnt.append(rows)

    def _below(self, point: Floats) -> Floats:
        """The point with its epigraph columns at minus infinity, so that every convex function gets a tangent."""
        lowered = point.copy()
        lowered[self.program.term.columns] = -np.inf
        return lowered

    def _is_integral(self, point: Floats) -> bool:
        values = point[self._integers]
        return bool(np.all(np.abs(values - np.round(values)) <= FEASIBILITY_TOLERANCE))


def _choose_front(numbers: Ints, violations: Floats, ends: Ints) -> Ints:
    """The rows of a round, those of early layers first: later layers are mostly violated because earlier ones are,
    and their rows take longer backward passes."""
    serious = np.flatnonzero(violations > LEAST_VIOLATION * violations.max())
    parts = np.searchsorted(ends, numbers[serious], side="right")
    order = np.lexsort((-violations[serious], parts))
    return np.sort(numbers[serious[order[:ROWS_PER_ROUND]]])


_STOPS = {
    Outcome.STOPPED: Status.TIMED_OUT,
    Outcome.INFEASIBLE: Status.INFEASIBLE,
    Outcome.UNBOUNDED: Status.UNBOUNDED,
    Outcome.FAILED: Status.FAILED,
}


def accept(result: LinearResult) -> Floats:
    """The point found; without one, stop the search."""
    if result.point is None:
        raise StopSearch(_STOPS.get(result.outcome, Status.FAILED))
    return result.point


def find_gap(value: float, bound: float) -> float:
    gap = relative_gap(value, bound)
    return np.inf if gap is None else gap

"""Solving with rows and cuts added when violated, around any engine for linear programs.

Every point the engine finds is judged by one forward pass: the most violated rows of the sources and the tangents
of the convex term join the program, and the engine goes on from where it was. Each linear optimum is a lower bound;
each point that violates nothing is an incumbent once its convex term is raised to the true value.

With integer columns the relaxation is solved first, to collect rows and cuts; `integer_rounds` and `branch_and_bound`
go on from there.
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
"""Rows added per round, those of early layers first. With more the linear programs grow, with fewer there are more
rounds."""

LEAST_VIOLATION = 0.3
"""Share of the worst violation below which a row waits for a later round."""

CUT_SHARE = 1e-3
"""Share of the gap tolerance by which a column may underestimate its convex function without a new tangent."""

LEAST_CUT = 1e-8
"""The least such difference: an engine does not see smaller ones, and the same tangent would be added again."""

LEAST_GAIN = 1e-6
"""The least sum by which scores must be able to fall for a tie-break to be tried."""

IMPROVING_TIME_SHARE = 0.1
"""Share of the remaining time that trying for better points may take."""


@dataclass(frozen=True)
class _Turn:
    """An optimum of the engine with its convex term raised to the true value, and the bound that the engine gave."""

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
        """`build` puts the linear part of the program into an engine. That takes time too, and can be interrupted."""
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
        """The program with its integer columns relaxed. Its linear programs bound the whole."""
        for turn in self._turns():
            self.raise_bound(turn.bound)
            if turn.feasible and self._is_integral(turn.point):
                self.offer(turn.point)
            self._complete(turn.point)
            self._propose(turn.point)
            self.tell()
            if self.gap <= self.target or (turn.feasible and turn.gap <= self.target):
                break
        return turn.point

    def _solve_integers(self, relaxed: Floats) -> None:
        """What is left when the relaxation has been solved and does not close the gap."""
        raise NotImplementedError

    def _take_reserve(self) -> None:
        """Offer what was kept for a search that is stopped."""

    def _complete(self, point: Floats) -> bool:
        """Offer the point that the formulation makes of these scores; whether there is one and it is feasible."""
        if self.program.complete is None:
            return False
        return self.offer_if_feasible(self.program.complete(point))

    def _propose(self, point: Floats) -> None:
        """Offer the points that the formulation makes of these scores, as long as they are feasible."""
        if self.program.propose is not None:
            for proposed in self.program.propose(point):
                if not self.offer_if_feasible(proposed):
                    return
                self.remaining()

    def _improve(self, *points: Floats | None) -> None:
        """Offer the best points that the formulation finds from the scores of these, as far as they are known."""
        if self.program.improve is None:
            return
        starts = [point for point in points if point is not None]
        for start in starts:
            seconds = IMPROVING_TIME_SHARE * self.remaining() / len(starts)
            better = self.program.improve(start, seconds=seconds, seed=self.limits.seed + self._trials)
            self._trials += 1
            self.offer_if_feasible(better)
            self.tell()

    def _break_ties(self) -> None:
        """Among the points as good as the incumbent, the one with the smallest tie_break · x.

        Integer columns keep the values they have. Without such a point in time the incumbent stays.
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
                    self.tell()
                return

    def _turns(self) -> Iterator[_Turn]:
        """Solve, judge, add what is violated, and again, until there is nothing to add."""
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
        """Whether any row was violated; the worst, of early layers first, are now in the program."""
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
            for at in range(0, len(worst), source.piece):
                self._engine.add_rows(self.learn_from(place, worst[at : at + source.piece]))
                self.remaining()
        return found

    def _add_cuts(self, point: Floats) -> bool:
        """Tangents at the point for every convex function that its column underestimates there."""
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
        """The point with its epigraph columns as low as they go: every convex function is underestimated there."""
        lowered = point.copy()
        lowered[self.program.term.columns] = -np.inf
        return lowered

    def _is_integral(self, point: Floats) -> bool:
        values = point[self._integers]
        return bool(np.all(np.abs(values - np.round(values)) <= FEASIBILITY_TOLERANCE))


def _choose_front(numbers: Ints, violations: Floats, ends: Ints) -> Ints:
    """The rows of a round, those of early layers first: rows of later layers are mostly violated because those are,
    and their backward passes are longer."""
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
    """The point found, or the end of the search."""
    if result.point is None:
        raise StopSearch(_STOPS.get(result.outcome, Status.FAILED))
    return result.point


def find_gap(value: float, bound: float) -> float:
    gap = relative_gap(value, bound)
    return np.inf if gap is None else gap

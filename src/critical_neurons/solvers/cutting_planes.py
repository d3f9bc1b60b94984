"""Solving with rows and cuts added when violated, around any engine for linear programs.

Every point the engine finds is judged by one forward pass: the most violated rows of the sources and the tangents
of the convex term join the program, and the engine goes on from where it was. Each linear optimum is a lower bound;
each point that violates nothing is an incumbent once its convex term is raised to the true value.

With integer columns the relaxation is solved first, to collect rows and cuts. Then in rounds: the engine solves the
integer program as far as it is written, and as far as its share of the time goes; the integer columns of its best
point are fixed and the continuous rest is solved to the end, which gives an incumbent and more rows and cuts, valid
for the whole program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Program, Rows, stack_rows
from critical_neurons.core.solution import Solution, Status, Step, relative_gap
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.implied_bounds import find_least_cost
from critical_neurons.solvers.lp_engine import LinearEngine, LinearResult, Outcome

FEASIBILITY_TOLERANCE = 1e-6
"""Largest violation of a row, relative to the scale of its ReLU, that still counts as satisfied."""

ROWS_PER_ROUND = 200
"""Rows added per round, those of the network's front first. More make the linear programs larger, fewer the rounds
more."""

LEAST_VIOLATION = 0.3
"""Share of the worst violation below which a row waits for a later round."""

CUT_SHARE = 1e-3
"""Share of the gap tolerance by which a column may underestimate its convex function without a new tangent."""

LEAST_CUT = 1e-8
"""The least such difference: an engine cannot tell smaller ones from none, and the same tangent would come again."""

INNER_SHARE = 0.1
"""Share of the gap tolerance to which the parts of a round with integer columns are solved."""

TIE_BREAK_SHARE = 0.1
"""Share of the gap tolerance left to the tie-break."""

LEAST_GAIN = 1e-6
"""By which scores in all must be able to fall for a tie-break to be worth its while."""

IMPROVING_TIME_SHARE = 0.1
"""Share of the remaining time that trying for better points may take."""

INTEGER_TIME_SHARES = (0.1, 0.3, 0.8)
"""Shares of the remaining time that integer programs may take, one after the other as they are stopped. The first
miss rows and cuts, which their best points tell; what is left is for what the last point is worth."""


@dataclass(frozen=True)
class _Turn:
    """An optimum of the engine with its convex term raised to the true value, and what the engine thought of it."""

    point: Floats
    value: float
    bound: float
    feasible: bool

    @property
    def gap(self) -> float:
        return _gap(self.value, self.bound)


class _Stop(Exception):
    """Ends the search before its time."""

    def __init__(self, status: Status) -> None:
        self.status = status


class CutLoop:
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        """`build` puts the linear part of the program into an engine. That takes time too, and can be interrupted."""
        self._build = build
        self._program = program
        self._limits = limits
        self._report = report
        self._started = time.monotonic()
        self._incumbent: Floats | None = None
        self._objective: float | None = None
        self._bound: float | None = None
        self._reserve: Floats | None = None
        self._history: list[Step] = []
        self._known = [np.zeros(source.count, dtype=bool) for source in program.sources]
        self._learnt: list[Rows] = []
        self._row_count = 0
        self._stops = 0
        self._trials = 0
        self._cut_count = 0
        self._integers = np.flatnonzero(program.integer)

    def run(self) -> Solution:
        interrupted = False
        try:
            status = self._search()
        except _Stop as stop:
            status = stop.status
        except KeyboardInterrupt:
            status, interrupted = Status.TIMED_OUT, True
        if self._reserve is not None and status is not Status.OPTIMAL:
            self._offer(self._reserve)
        if self._incumbent is not None:
            status = Status.FEASIBLE
        if self._solved(self._limits.gap):
            status = Status.OPTIMAL
        return Solution(
            status=status,
            point=self._incumbent,
            objective=self._objective,
            bound=self._bound,
            seconds=self._elapsed(),
            history=tuple(self._history),
            sizes={
                "columns": self._program.column_count,
                "rows": self._program.row_count,
                "rows_used": len(self._program.rows) + self._row_count,
                "gates": self._program.gate_count,
                "cuts": self._cut_count,
            },
            interrupted=interrupted,
            learnt=stack_rows(self._learnt, self._program.column_count),
        )

    def _search(self) -> Status:
        target = (1.0 - TIE_BREAK_SHARE) * self._limits.gap
        for point in self._program.known:
            self._offer(point)
        if self._program.given is not None:
            self._improve(self._program.given, self._program.unpruned)
        self._raise_bound(find_least_cost(self._program))
        self._remaining()
        self._propose(self._program.lower)
        self._engine = self._build(self._program, self._limits)
        for point in self._program.known:
            self._add_cuts(self._below(point))
        relaxed = self._solve_relaxation(target)
        if not self._solved(target) and len(self._integers):
            self._solve_integers(relaxed, target)
        self._break_ties()
        return Status.OPTIMAL

    def _solve_relaxation(self, target: float) -> Floats:
        """The program with its integer columns relaxed. Its linear programs bound the whole."""
        for turn in self._turns():
            self._raise_bound(turn.bound)
            if turn.feasible and self._is_integral(turn.point):
                self._offer(turn.point)
            self._complete(turn.point)
            self._propose(turn.point)
            self._tell()
            if self._solved(target) or (turn.feasible and turn.gap <= target):
                break
        return turn.point

    def _solve_integers(self, relaxed: Floats, target: float) -> None:
        """What is left when the relaxation has been solved and does not close the gap."""
        self._improve(self._incumbent, relaxed)
        self._solve_fixed(relaxed, target)
        while not self._solved(target):
            self._solve_integer_round(target)

    def _solve_integer_round(self, target: float) -> None:
        learnt = self._row_count + self._cut_count
        seconds = INTEGER_TIME_SHARES[self._stops] * self._remaining()
        result = self._engine.solve_integer(seconds, INNER_SHARE * target, self._incumbent, self._watch)
        stopped = result.outcome is Outcome.STOPPED
        if result.outcome is Outcome.OPTIMAL or stopped:
            self._raise_bound(result.bound)
        if result.point is not None:
            self._complete(result.point)
        self._tell()
        if self._solved(target):
            return
        last = not stopped or self._stops == len(INTEGER_TIME_SHARES) - 1
        if result.point is not None or last:
            self._solve_fixed(_accept(result), target)
        if last and self._row_count + self._cut_count == learnt and not self._solved(target):
            raise _Stop(Status.TIMED_OUT if stopped else Status.FAILED)  # the next round would be the same
        self._stops += stopped and not last

    def _watch(self, bound: float, point: Floats | None) -> None:
        """A running integer program has come this far. Its point, integers made whole, is kept in reserve if
        feasible: when it comes depends on the clock, so it counts only where a search that was stopped needs it."""
        before = self._bound
        self._raise_bound(bound)
        if point is not None:
            whole = self._program.raise_term(np.where(self._program.integer, np.round(point), point))
            better = self._reserve is None or self._program.value(whole) < self._program.value(self._reserve)
            if better and self._is_feasible(whole):
                self._reserve = whole
        if self._bound != before:
            self._tell()

    def _complete(self, point: Floats) -> bool:
        """Offer the point that the formulation makes of these scores; whether there is one and it is feasible."""
        if self._program.complete is None:
            return False
        return self._offer_if_feasible(self._program.complete(point))

    def _propose(self, point: Floats) -> None:
        """Offer the points that the formulation makes of these scores, as long as they are feasible."""
        if self._program.propose is not None:
            for proposed in self._program.propose(point):
                if not self._offer_if_feasible(proposed):
                    return
                self._remaining()

    def _offer_if_feasible(self, point: Floats) -> bool:
        raised = self._program.raise_term(point)
        feasible = self._is_feasible(raised)
        if feasible:
            self._offer(raised)
        return feasible

    def _improve(self, *points: Floats | None) -> None:
        """Offer the best points that the formulation finds from the scores of these, as far as they are known."""
        if self._program.improve is None:
            return
        starts = [point for point in points if point is not None]
        for start in starts:
            seconds = IMPROVING_TIME_SHARE * self._remaining() / len(starts)
            better = self._program.improve(start, seconds=seconds, seed=self._limits.seed + self._trials)
            self._trials += 1
            self._offer_if_feasible(better)
            self._tell()

    def _solve_fixed(self, point: Floats, target: float) -> None:
        """What is left when the integer columns take their rounded values: an incumbent, if feasible."""
        self._fix_integers(point)
        best = np.inf
        try:
            for turn in self._turns():
                if turn.feasible:
                    self._offer(turn.point)
                    best = min(best, turn.value)
                self._tell()
                if self._solved(target) or _gap(best, turn.bound) <= INNER_SHARE * target:
                    break
        except _Stop as stop:
            if stop.status is not Status.INFEASIBLE:
                raise
        columns = self._integers
        self._engine.change_bounds(columns, self._program.lower[columns], self._program.upper[columns])

    def _break_ties(self) -> None:
        """Among the points as good as the incumbent, the one with the smallest tie_break · x.

        Integer columns keep the values they have. Without such a point in time the incumbent stays.
        """
        program, best, objective = self._program, self._incumbent, self._objective
        if program.tie_break is None or best is None or objective is None:
            return
        counted = np.flatnonzero(program.tie_break)
        ends = np.where(program.tie_break > 0, program.lower, program.upper)
        if program.tie_break @ best <= program.tie_break[counted] @ ends[counted] + LEAST_GAIN:
            return
        slack = TIE_BREAK_SHARE * self._limits.gap * max(1.0, abs(objective))
        self._fix_integers(best)
        limit = np.array([objective + slack / 2])
        as_good = Rows(sparse.csr_array(program.cost[None]), np.array([-np.inf]), limit)
        self._engine.add_rows(as_good)
        self._engine.change_cost(program.tie_break)
        for turn in self._turns():
            if turn.feasible and turn.value <= objective + slack:
                if program.tie_break @ turn.point < program.tie_break @ best:
                    self._incumbent, self._objective = turn.point, turn.value
                    self._tell()
                return

    def _turns(self) -> Iterator[_Turn]:
        """Solve, judge, add what is violated, and again, until there is nothing to add."""
        while True:
            result = self._engine.solve(self._remaining())
            point = _accept(result)
            feasible = not self._add_violated_rows(point)
            raised = self._program.raise_term(point)
            yield _Turn(raised, self._program.value(raised), result.bound, feasible)
            if not self._add_cuts(point) and feasible:
                return

    def _fix_integers(self, point: Floats) -> None:
        values = np.round(point[self._integers])
        self._engine.change_bounds(self._integers, values, values)

    def _add_violated_rows(self, point: Floats) -> bool:
        """Whether any row was violated; the worst of the front are now in the program."""
        found = False
        for source, known in zip(self._program.sources, self._known, strict=True):
            violations = source.violations(point)
            violations[known] = 0.0
            worst = np.flatnonzero(violations > FEASIBILITY_TOLERANCE)
            if len(worst) == 0:
                continue
            found = True
            if len(worst) > ROWS_PER_ROUND:
                worst = _choose_front(worst, violations[worst], source.ends)
            for at in range(0, len(worst), source.piece):
                piece = worst[at : at + source.piece]
                rows = source.build(piece)
                self._learn(rows)
                known[piece] = True
                self._row_count += len(rows)
                self._remaining()
        return found

    def _add_cuts(self, point: Floats) -> bool:
        """Tangents at the point for every convex function that its column underestimates there."""
        columns = self._program.term.columns
        values = self._program.term.values(point)
        tolerance = max(CUT_SHARE * self._limits.gap, LEAST_CUT) * np.maximum(1.0, values)
        low = np.flatnonzero((values > point[columns] + tolerance) & (self._program.cost[columns] > 0))
        if len(low):
            self._learn(self._program.term.cuts(point, low))
            self._cut_count += len(low)
        return len(low) > 0

    def _learn(self, rows: Rows) -> None:
        self._engine.add_rows(rows)
        self._learnt.append(rows)

    def _offer(self, point: Floats) -> None:
        value = self._program.value(point)
        if self._objective is None or value < self._objective:
            self._incumbent, self._objective = point, value

    def _below(self, point: Floats) -> Floats:
        """The point with its epigraph columns as low as they go: every convex function is underestimated there."""
        lowered = point.copy()
        lowered[self._program.term.columns] = -np.inf
        return lowered

    def _raise_bound(self, bound: float) -> None:
        if np.isfinite(bound) and (self._bound is None or bound > self._bound):
            self._bound = bound

    def _is_feasible(self, point: Floats) -> bool:
        """Whether the point keeps all rows, those of the sources among them. The convex term can be raised."""
        rows = self._program.rows
        values = rows.matrix @ point
        kept = np.all((rows.lower - values <= FEASIBILITY_TOLERANCE) & (values - rows.upper <= FEASIBILITY_TOLERANCE))
        return bool(kept) and all(
            np.all(source.violations(point) <= FEASIBILITY_TOLERANCE) for source in self._program.sources
        )

    def _is_integral(self, point: Floats) -> bool:
        values = point[self._integers]
        return bool(np.all(np.abs(values - np.round(values)) <= FEASIBILITY_TOLERANCE))

    def _solved(self, target: float) -> bool:
        gap = relative_gap(self._objective, self._bound)
        return gap is not None and gap <= target

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _remaining(self) -> float:
        remaining = self._limits.time_limit - self._elapsed()
        if remaining <= 0:
            raise _Stop(Status.TIMED_OUT)
        return remaining

    def _tell(self) -> None:
        step = Step(self._elapsed(), self._objective, self._bound, self._row_count, self._cut_count)
        self._history.append(step)
        self._report(step)


def _choose_front(numbers: Ints, violations: Floats, ends: Ints) -> Ints:
    """A round's share of rows, those of the front of the network before those behind: the latter are mostly violated
    because the former are, and take a longer backward pass each."""
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


def _accept(result: LinearResult) -> Floats:
    """The point found, or the end of the search."""
    if result.point is None:
        raise _Stop(_STOPS.get(result.outcome, Status.FAILED))
    return result.point


def _gap(value: float, bound: float) -> float:
    gap = relative_gap(value, bound)
    return np.inf if gap is None else gap

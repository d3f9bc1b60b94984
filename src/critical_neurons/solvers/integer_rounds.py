"""Integer programs in rounds, by the engine's own branch and bound.

In each round the engine solves the integer program with the rows and cuts known so far, within a share of the time.
Then the integer columns of its best point are fixed and the continuous rest is solved to optimality, which gives an
incumbent and further rows and cuts, valid for the whole program.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from critical_neurons.core.program import Program
from critical_neurons.core.solution import Status
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.cutting_planes import CutLoop, accept, find_gap
from critical_neurons.solvers.lp_engine import LinearEngine, Outcome
from critical_neurons.solvers.search_record import StopSearch

INNER_SHARE = 0.1
"""Share of the gap tolerance to which the parts of a round with integer columns are solved."""

INTEGER_TIME_SHARES = (0.1, 0.3, 0.8)
"""Shares of the remaining time for successive integer programs that hit their limit. The first ones lack rows and
cuts, so they get less; the time after the last one is for solving the continuous rest."""


class RoundLoop(CutLoop):
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        super().__init__(build, program, limits, report)
        self._reserve: Floats | None = None
        self._stops = 0

    def _take_reserve(self) -> None:
        if self._reserve is not None:
            self.offer(self._reserve)

    def _solve_integers(self, relaxed: Floats) -> None:
        self._improve(self.incumbent, relaxed)
        self._solve_fixed(relaxed)
        while self.gap > self.target:
            self._solve_integer_round()

    def _solve_integer_round(self) -> None:
        learnt = self.row_count + self.cut_count
        seconds = INTEGER_TIME_SHARES[self._stops] * self.remaining()
        result = self._engine.solve_integer(seconds, INNER_SHARE * self.target, self.incumbent, self._watch)
        stopped = result.outcome is Outcome.STOPPED
        if result.outcome is Outcome.OPTIMAL or stopped:
            self.raise_bound(result.bound)
        if result.point is not None:
            self._complete(result.point)
        self.record_step()
        if self.gap <= self.target:
            return
        last = not stopped or self._stops == len(INTEGER_TIME_SHARES) - 1
        if result.point is not None or last:
            self._solve_fixed(accept(result))
        if last and self.row_count + self.cut_count == learnt and self.gap > self.target:
            raise StopSearch(Status.TIMED_OUT if stopped else Status.FAILED)  # the next round would be the same
        self._stops += stopped and not last

    def _watch(self, bound: float, point: Floats | None) -> None:
        """Called while an integer program runs. Its rounded point is kept in reserve if feasible. Since the time of
        its arrival is not deterministic, it is used only if the search is stopped."""
        before = self.bound
        self.raise_bound(bound)
        if point is not None:
            whole = self.program.raise_term(np.where(self.program.integer, np.round(point), point))
            better = self._reserve is None or self.program.value(whole) < self.program.value(self._reserve)
            if better and self.is_feasible(whole):
                self._reserve = whole
        if self.bound != before:
            self.record_step()

    def _solve_fixed(self, point: Floats) -> None:
        """Solve with the integer columns fixed to their rounded values, for an incumbent."""
        self._fix_integers(point)
        best = np.inf
        try:
            for turn in self._turns():
                if turn.feasible:
                    self.offer(turn.point)
                    best = min(best, turn.value)
                self.record_step()
                if self.gap <= self.target or find_gap(best, turn.bound) <= INNER_SHARE * self.target:
                    break
        except StopSearch as stop:
            if stop.status is not Status.INFEASIBLE:
                raise
        columns = self._integers
        self._engine.change_bounds(columns, self.program.lower[columns], self.program.upper[columns])

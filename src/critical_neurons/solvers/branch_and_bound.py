"""Branch and bound on a few 0/1 columns that determine all others: the scores of the exact program.

A node fixes some of the scores. Its linear program, with lazy constraints, tangents and hull cuts, gives a lower
bound; the forward pass with its rounded scores gives an incumbent, or the optimum if all scores are fixed. Gates are
never branched on. Scores nearest to the output are fixed first, since they bound the loss whatever the earlier layers
do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from critical_neurons.core.program import Program, Rows, stack_rows
from critical_neurons.core.solution import Status
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.cutting_planes import CutLoop
from critical_neurons.solvers.dual_tree import DualLoop
from critical_neurons.solvers.integer_rounds import RoundLoop
from critical_neurons.solvers.lp_engine import LinearEngine, Outcome
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE, StopSearch

ROOT_ROUNDS = 40
"""Rounds of cutting planes at the root; other nodes have one."""

ROOT_GAIN = 1e-3
"""Least increase of the bound for another round."""

PIVOT = 0.7
"""Branch on the score whose relaxed value is nearest to this. Measured to be better than 0.5."""

MOST_LEARNT = 1500
"""With more learnt rows, those that are not tight at any recent point are dropped."""

RECENT = 20
"""How many points count as recent."""


@dataclass(order=True)
class _Node:
    bound: float
    number: int
    lower: Floats = field(compare=False)
    upper: Floats = field(compare=False)
    point: Floats = field(compare=False)


class BranchLoop(CutLoop):
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        super().__init__(build, program, limits, report)
        assert program.branching is not None
        self._branching = program.branching
        self._columns = np.arange(program.branching.columns.start, program.branching.columns.stop)
        self._recent: list[Floats] = []
        self._numbers = 0
        self._open: list[_Node] = []
        self._closed_at = np.inf

    def _solve_integers(self, relaxed: Floats) -> None:
        self._improve(self.incumbent, relaxed)
        lower, upper = self.program.lower[self._columns], self.program.upper[self._columns]
        self._push(lower, upper, -np.inf, rounds=ROOT_ROUNDS)
        while self._open:
            self.raise_bound(min(self._open[0].bound, self._closed_at, self._value()))
            self.tell()
            if self.gap <= self.target:
                return
            node = heapq.heappop(self._open)
            if self._is_hopeless(node.bound):
                self._closed_at = min(self._closed_at, node.bound)
                continue
            column = self._choose(node)
            for value in (0.0, 1.0):
                low, high = node.lower.copy(), node.upper.copy()
                low[column] = high[column] = value
                self._push(low, high, node.bound, rounds=1)
        if self.objective is None:
            raise StopSearch(Status.INFEASIBLE if np.isinf(self._closed_at) else Status.FAILED)
        self.raise_bound(min(self._closed_at, self.objective))

    def _push(self, lower: Floats, upper: Floats, bound: float, *, rounds: int) -> None:
        """Solve a node and add it to the open ones, unless it is pruned or infeasible."""
        if self._recent and sum(map(len, self.learnt)) > MOST_LEARNT:
            self._forget()
        leaf = np.array_equal(lower, upper)
        if leaf and self._complete(self._place(lower)):
            return
        self._engine.change_bounds(self._columns, lower, upper)
        point = None
        for _ in range(rounds):
            result = self._engine.solve(self.remaining())
            if result.outcome is Outcome.INFEASIBLE:
                return
            if result.point is None:
                break
            point, gain = result.point, result.bound - bound
            bound = max(bound, result.bound)
            if self._is_hopeless(bound):
                self._closed_at = min(self._closed_at, bound)
                return
            self._complete(point)
            if not self._tighten(point) or gain < ROOT_GAIN:
                break
        self.remaining()
        if leaf:
            self._closed_at = min(self._closed_at, bound)
            return
        self._numbers += 1
        where = self._place((lower + upper) / 2) if point is None else point
        self._recent = [*self._recent[1 - RECENT :], where]
        heapq.heappush(self._open, _Node(bound, self._numbers, lower, upper, where[self._columns]))

    def _place(self, scores: Floats) -> Floats:
        point = np.zeros(self.program.column_count)
        point[self._columns] = scores
        return point

    def _tighten(self, point: Floats) -> bool:
        found = self._add_violated_rows(point)
        found |= self._add_cuts(point)
        if self._branching.hulls is not None:
            rows = self._branching.hulls.separate(point)
            if len(rows):
                self._learn(rows)
                self.row_count += len(rows)
                found = True
        return found

    def _choose(self, node: _Node) -> int:
        """The fractional score of the highest priority nearest to the pivot; if none is fractional, a free one."""
        free = node.lower < node.upper
        split = free & (np.minimum(node.point, 1.0 - node.point) > FEASIBILITY_TOLERANCE)
        rank = self._branching.priority - np.abs(node.point - PIVOT)
        return int(np.where(split if split.any() else free, rank, -np.inf).argmax())

    def _forget(self) -> None:
        """Restart the engine with the rows that are tight at recent points. Rows of sources may be added again."""
        rows = stack_rows(self.learnt, self.program.column_count)
        values = rows.matrix @ np.array(self._recent).T
        slack = np.minimum(values - rows.lower[:, None], rows.upper[:, None] - values).min(axis=1)
        touched = np.flatnonzero(slack <= FEASIBILITY_TOLERANCE)
        kept = Rows(rows.matrix[touched], rows.lower[touched], rows.upper[touched])
        self.learnt = [kept]
        for known in self.known:
            known[:] = False
        self._engine = self._build(self.program, self.limits)
        self._engine.add_rows(kept)

    def _is_hopeless(self, bound: float) -> bool:
        return bound >= self._value() - self.target * max(1.0, abs(self._value()))

    def _value(self) -> float:
        return np.inf if self.objective is None else self.objective


def choose_loop(program: Program) -> type[CutLoop]:
    if program.branching is None:
        return RoundLoop
    return BranchLoop if program.branching.nodes is None else DualLoop

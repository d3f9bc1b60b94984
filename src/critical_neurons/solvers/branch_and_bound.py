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
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.cutting_planes import CutLoop
from critical_neurons.solvers.dual_tree import DualLoop
from critical_neurons.solvers.integer_rounds import RoundLoop
from critical_neurons.solvers.lp_engine import LinearEngine, Outcome
from critical_neurons.solvers.score_tree import ScoreNode, ScoreTree
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE

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
class _RelaxationNode(ScoreNode):
    point: Floats = field(compare=False)


class BranchLoop(ScoreTree[_RelaxationNode]):
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        super().__init__(build, program, limits, report)
        self._recent: list[Floats] = []

    def _open_root(self, lower: Floats, upper: Floats) -> None:
        self._push(lower, upper, -np.inf, rounds=ROOT_ROUNDS)

    def _branch(self) -> None:
        node = heapq.heappop(self._open)
        if node.bound >= self._cutoff():
            self._close(node.bound)
            return
        column = self._choose(node)
        for value in (0.0, 1.0):
            low, high = node.lower.copy(), node.upper.copy()
            low[column] = high[column] = value
            self._push(low, high, node.bound, rounds=1)

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
            if bound >= self._cutoff():
                self._close(bound)
                return
            self._complete(point)
            if not self._tighten(point) or gain < ROOT_GAIN:
                break
        self.remaining()
        if leaf:
            self._close(bound)
            return
        where = self._place((lower + upper) / 2) if point is None else point
        self._recent = [*self._recent[1 - RECENT :], where]
        heapq.heappush(self._open, _RelaxationNode(bound, self._next_number(), lower, upper, where[self._columns]))

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

    def _choose(self, node: _RelaxationNode) -> int:
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


def choose_loop(program: Program) -> type[CutLoop]:
    if program.branching is None:
        return RoundLoop
    return BranchLoop if program.branching.nodes is None else DualLoop

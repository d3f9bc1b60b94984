"""Branch and bound on the scores, many nodes at once, with bounds that need no linear program.

The formulation gives the bounds (`Branching.nodes`, see `NodeBounds`), in a small part of the time of a linear
program. The node of the least bound comes first, until there are too many open ones.
Nodes are bounded in independent batches, in long trees by as many processes as there are threads.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from critical_neurons.core.branching import BoundedNodes
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.lp_engine import LinearEngine
from critical_neurons.solvers.node_processes import NodeBatch, NodeProcesses, count_cores
from critical_neurons.solvers.score_tree import ScoreNode, ScoreTree

ROOT_STEPS, MOST_ROOT_STEPS = 10, 600
"""Steps of the root: so many for each column, up to a limit. Small trees are searched faster than roots converge."""

EARLY_STEPS, EARLY = 3, 200
"""Steps of the first nodes, for each column, and how many nodes are first: all others inherit their multipliers. Then
steps fall with the number of nodes."""

STEPS = 30
"""The fewest steps of a node."""

TOGETHER = 256
"""Nodes branched on together."""

BATCH_SIZE = 128
"""Nodes whose bounds are computed together: their numbers stay in the cache of a core."""

PROCESSES_AFTER = 4.0
"""Seconds of a tree after which processes are started, if it may use more than one: most trees end sooner."""

MOST_OPEN = 20_000
"""With more open nodes, those of the greatest bound come first: they end soonest."""


@dataclass(order=True)
class _DualNode(ScoreNode):
    multipliers: Floats = field(compare=False)
    column: int = field(compare=False)


class DualLoop(ScoreTree[_DualNode]):
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        super().__init__(build, program, limits, report)
        assert self._branching.nodes is not None
        self._bounds = self._branching.nodes
        self._most_processes = min(limits.threads or count_cores(), 2 * TOGETHER // BATCH_SIZE)
        self._processes: NodeProcesses | None = None
        self._start_after = np.inf

    def _solve_integers(self, relaxed: Floats) -> None:
        try:
            super()._solve_integers(relaxed)
        finally:
            self._end_processes()

    def _open_root(self, lower: Floats, upper: Floats) -> None:
        upper = np.where(self._bounds.useless, lower, upper)
        self._start_after = self.elapsed + PROCESSES_AFTER
        steps = min(MOST_ROOT_STEPS, ROOT_STEPS * len(self._columns))
        self._explore(lower[None], upper[None], self._bounds.start()[None], np.array([-np.inf]), steps)

    def _take(self) -> list[_DualNode]:
        if len(self._open) <= MOST_OPEN:
            return [heapq.heappop(self._open) for _ in range(min(TOGETHER, len(self._open)))]
        self._open.sort()  # a sorted list is a heap
        taken, self._open = self._open[-TOGETHER:], self._open[:-TOGETHER]
        return taken

    def _branch(self) -> None:
        nodes = self._take()
        lower = np.repeat(np.array([node.lower for node in nodes]), 2, 0)
        upper = np.repeat(np.array([node.upper for node in nodes]), 2, 0)
        columns = np.repeat([node.column for node in nodes], 2)
        rows = np.arange(len(columns))
        lower[rows, columns] = upper[rows, columns] = rows % 2
        multipliers = np.repeat(np.array([node.multipliers for node in nodes]), 2, 0)
        self._explore(lower, upper, multipliers, np.repeat([node.bound for node in nodes], 2), self._count_steps())

    def _count_steps(self) -> int:
        return max(STEPS, EARLY_STEPS * len(self._columns) * EARLY // max(self._numbers, EARLY))

    def _explore(self, lower: Floats, upper: Floats, multipliers: Floats, known: Floats, steps: int) -> None:
        """Bound nodes and add those to the open ones that are not pruned; `known`: the bounds of their parents."""
        found = self._bound(lower, upper, multipliers, steps)
        bounds = np.maximum(found.bounds, known)
        self._offer_masks(found.masks, found.values)
        limit = self._cutoff()
        self._close(bounds[bounds >= limit].min(initial=np.inf))
        left = np.flatnonzero(~(bounds >= limit))
        if not len(left):
            return
        bounds, multipliers = bounds[left], found.multipliers[left]
        if not (np.array_equal(lower, found.lower) and np.array_equal(upper, found.upper)):
            self._close(limit)
        lower, upper = found.lower[left], found.upper[left]
        gone, free = (lower > upper).any(axis=1), lower < upper
        zero, one = found.probes[0][left], found.probes[1][left]
        gains = [
            np.where(free, np.maximum(np.minimum(each, limit) - bounds[:, None], 1e-6), 0.0) for each in (zero, one)
        ]
        rank = self._branching.priority + gains[0] * gains[1] / (1.0 + (gains[0] * gains[1]).max())
        columns = np.where(lower < upper, rank, -np.inf).argmax(axis=1)
        for at in np.flatnonzero(~gone):
            if np.array_equal(lower[at], upper[at]):
                self._end(lower[at], bounds[at])
                continue
            parts = lower[at], upper[at], multipliers[at], int(columns[at])
            heapq.heappush(self._open, _DualNode(float(bounds[at]), self._next_number(), *parts))

    def _bound(self, lower: Floats, upper: Floats, multipliers: Floats, steps: int) -> BoundedNodes:
        """In batches of the same size, however many processes there are."""
        cutoff, parts = self._cutoff(), [slice(at, at + BATCH_SIZE) for at in range(0, len(lower), BATCH_SIZE)]
        batches = [NodeBatch(lower[part], upper[part], multipliers[part], cutoff, steps) for part in parts]
        found: list[BoundedNodes | None] = [None] * len(batches)
        if len(batches) > 1:
            self._start_processes()
        if self._processes is not None:
            found = self._processes.run(batches, self.remaining)
            if None in found:  # a process was killed, or is out of memory: this one goes on alone
                self._end_processes()
        return _join(
            [
                batch.run(self._bounds, self.remaining) if there is None else there
                for batch, there in zip(batches, found, strict=True)
            ]
        )

    def _start_processes(self) -> None:
        if self._most_processes == 1 or self._processes is not None or self.elapsed < self._start_after:
            return
        try:
            self._processes = NodeProcesses(self._bounds, self._most_processes)
        except OSError:
            self._most_processes = 1

    def _end_processes(self) -> None:
        self._most_processes = 1
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _end(self, scores: Floats, bound: float) -> None:
        """All scores are fixed: a forward pass decides. Scores fixed together may exceed a budget that each keeps."""
        if np.isfinite(self._bounds.find_values(scores[None])[0]) and not self._complete(self._place(scores)):
            self._close(bound)

    def _offer_masks(self, masks: Floats, values: Floats) -> None:
        """The best of the masks that attain the bounds, if it is better than the incumbent."""
        if values.min() < self._value():
            self._complete(self._place(masks[values.argmin()]))


def _join(parts: Sequence[BoundedNodes]) -> BoundedNodes:
    names = ("bounds", "multipliers", "masks", "values", "lower", "upper")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    zero, one = (np.concatenate([part.probes[value] for part in parts]) for value in (0, 1))
    return BoundedNodes(**joined, probes=(zero, one))

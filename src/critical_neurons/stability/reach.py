"""Reach: bounds of a pre-activation by linear programs and branch and bound on the ReLUs below it.

The question is whether sign · p <= 0 on the whole box. It is proved once an upper bound of sign · p is at most 0, and
refuted by a point of the box with sign · p > 0. Every bound is computed from the solver's multipliers by weak
duality, so that the solver's tolerances do not matter:

    max c·v  <=  y·b + sum_j max over [l_j, u_j] of (c - A'y)_j v_j     for any multipliers y of the right signs
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from critical_neurons.core.program import Rows
from critical_neurons.core.structure import Bools, Floats
from critical_neurons.solvers import Limits
from critical_neurons.solvers.highs import HighsEngine
from critical_neurons.solvers.lp_engine import LinearEngine, Outcome
from critical_neurons.stability.relaxation import Relaxation


@dataclass(frozen=True)
class Answer:
    """`bound` is an upper bound of sign · p on the box; `seen` is its largest value found, at the point `inputs`.

    `nodes` counts linear programs."""

    bound: float
    seen: float
    inputs: Floats
    nodes: int


@dataclass(frozen=True)
class _Part:
    """A linear program for an engine."""

    cost: Floats
    lower: Floats
    upper: Floats
    integer: Bools
    rows: Rows


@dataclass(order=True)
class _BoxNode:
    """A part of the box, by the pairs that are `on` and `off`. The node with the highest bound is split next."""

    priority: float
    number: int
    on: tuple[int, ...] = field(compare=False)
    off: tuple[int, ...] = field(compare=False)


class ReachSearch:
    """Searches one relaxation, with an engine that is warm-started from program to program."""

    def __init__(self, relaxation: Relaxation, threads: int = 1) -> None:
        self._relaxation = relaxation
        ends, rows = relaxation.ends, relaxation.rows
        part = _Part(np.zeros(len(ends.lower)), ends.lower, ends.upper, np.zeros(len(ends.lower), bool), rows)
        self._engine: LinearEngine = HighsEngine(part, Limits(threads=threads))
        self._columns = np.concatenate([relaxation.on_columns, relaxation.off_columns])

    def ask(self, row: int, sign: float, slack: float, deadline: float, most_nodes: int) -> Answer:
        """Whether sign · p <= slack for this element, by at most `most_nodes` linear programs."""
        relaxation = self._relaxation
        cost = sign * relaxation.wanted.matrix[[row]].toarray()[0]
        constant = sign * relaxation.wanted.constant[row]
        self._engine.change_cost(-cost)
        size, numbers = relaxation.box.lower.size, count()
        seen, best = -np.inf, relaxation.ends.lower[:size]
        waiting = [_BoxNode(-np.inf, next(numbers), (), ())]
        closed, nodes = -np.inf, 0
        while waiting and -waiting[0].priority > max(slack, closed) and nodes < most_nodes:
            node = heapq.heappop(waiting)
            found = self._solve(node, cost, deadline)
            if found is None:
                heapq.heappush(waiting, node)
                break
            nodes += 1
            bound, point, scores = found
            bound = min(bound + constant, -node.priority)
            if point is not None:
                inputs = np.clip(point[:size], relaxation.ends.lower[:size], relaxation.ends.upper[:size])
                value = float(cost @ relaxation.complete(inputs) + constant)
                if value > seen:
                    seen, best = value, inputs
                if seen > slack:
                    closed = max(closed, bound)
                    break
            if point is None or bound <= slack or not scores.any():
                closed = max(closed, bound)
                continue
            pair = int(scores.argmax())
            heapq.heappush(waiting, _BoxNode(-bound, next(numbers), (*node.on, pair), node.off))
            heapq.heappush(waiting, _BoxNode(-bound, next(numbers), node.on, (*node.off, pair)))
        return Answer(max([closed, *(-node.priority for node in waiting)]), seen, best, nodes)

    def _solve(self, node: _BoxNode, cost: Floats, deadline: float) -> tuple[float, Floats | None, Floats] | None:
        """An upper bound of cost · v, the point of the relaxation (None if infeasible), and the branching score of
        each pair. None if out of time."""
        relaxation = self._relaxation
        upper = relaxation.ends.upper.copy()
        upper[relaxation.off_columns[list(node.on)]] = 0.0
        upper[relaxation.on_columns[list(node.off)]] = 0.0
        self._engine.change_bounds(self._columns, np.zeros(len(self._columns)), upper[self._columns])
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return None
        result = self._engine.solve(seconds)
        if result.outcome is Outcome.INFEASIBLE:
            return -np.inf, None, np.zeros(0)
        if result.point is None or result.duals is None:
            return None
        bound = self._bound(-result.duals, cost, upper)
        h, d = result.point[relaxation.on_columns], result.point[relaxation.off_columns]
        rows = relaxation.rows
        triangles = -result.duals[len(rows) - len(h) :]
        violation = np.minimum(h, d)
        decided = np.zeros(len(h), dtype=bool)
        decided[[*node.on, *node.off]] = True
        scores = np.where(decided | (violation <= 0), 0.0, violation * (np.maximum(triangles, 0.0) + 1e-6))
        return bound, result.point, scores

    def _bound(self, multipliers: Floats, cost: Floats, upper: Floats) -> float:
        """Weak duality; multipliers of the wrong sign count as zero."""
        rows = self._relaxation.rows
        y = np.where(np.isinf(rows.lower), np.maximum(multipliers, 0.0), multipliers)
        left = cost - rows.matrix.T @ y
        lower = self._relaxation.ends.lower
        return float(y @ rows.upper + np.maximum(left * lower, left * upper).sum())

"""Counts: the part of the objective that depends on how many units of two layers are kept, solved by sorting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from critical_neurons.core.network import Network
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.formulations.objective import BudgetRows, Goal

SAME = 1e-12
"""Difference of costs that is rounding."""

EXCLUDED = 1e6
"""Cost of counts below the number of scores fixed at 1, which are infeasible. Finite, so that bounds stay valid."""


@dataclass(frozen=True)
class Box:
    """Bounds of 0 or 1 on the scores of a layer: (nodes, units)."""

    lower: Floats
    upper: Floats

    def take(self, nodes: Ints) -> Box:
        return Box(self.lower[nodes], self.upper[nodes])

    @property
    def free(self) -> Floats:
        return self.upper - self.lower


@dataclass(frozen=True, eq=False)
class UnitCounts:
    """Keeping at most `most[0]` and `most[1]` units of two layers costs `cost`; pairs that others make useless are
    left out. Methods take linear costs of the scores, (nodes, units), by layer."""

    cost: Floats
    most: tuple[Ints, Ints]

    def in_single(self) -> UnitCounts:
        return replace(self, cost=self.cost.astype(np.float32))

    def price(self, kept: tuple[Floats, Floats]) -> Floats:
        """The cost of masks, infinite if the goal excludes them."""
        enough = [most >= mask.sum(axis=1)[:, None] for most, mask in zip(self.most, kept, strict=True)]
        return np.asarray(np.where(enough[0] & enough[1], self.cost, np.inf).min(axis=1))

    def minimise(self, costs: tuple[Floats, Floats], boxes: tuple[Box, Box]) -> tuple[Floats, tuple[Floats, Floats]]:
        """The least total cost and the scores that attain it."""
        first, second = (_Layer(*parts) for parts in zip(costs, boxes, self.most, strict=True))
        totals = self.cost + first.least + second.least
        best = totals.argmin(axis=1)
        return totals[np.arange(len(best)), best], (first.choose(best), second.choose(best))

    def probe_first(
        self, costs: Floats, changed: tuple[Floats, Floats], boxes: tuple[Box, Box]
    ) -> tuple[Floats, Floats]:
        """The least total cost with each score of the first layer fixed at 0 and at 1, (nodes, units). `changed`:
        what the second layer's scores then cost, (nodes, units, units of the second)."""
        other = Box(boxes[1].lower[:, None], boxes[1].upper[:, None])
        fixed = _Layer(costs, boxes[0], self.most[0]).fix_each()
        zero, one = (
            (self.cost + each + _Layer(then, other, self.most[1]).least).min(axis=2)
            for each, then in zip(fixed, changed, strict=True)
        )
        return zero, one

    def probe_second(self, costs: tuple[Floats, Floats], boxes: tuple[Box, Box]) -> tuple[Floats, Floats]:
        """The least total cost with each score of the second layer fixed at 0 and at 1, (nodes, units)."""
        other = _Layer(costs[0], boxes[0], self.most[0]).least[:, None]
        zero, one = _Layer(costs[1], boxes[1], self.most[1]).fix_each()
        return (self.cost + other + zero).min(axis=2), (self.cost + other + one).min(axis=2)


class _Layer:
    """The least cost of a layer at each pair of counts: the most negative costs of free scores, in order."""

    def __init__(self, costs: Floats, box: Box, most: Ints) -> None:
        self._costs, self._box, self._most = costs, box, most
        self._gains = np.minimum(costs, 0.0) * box.free
        self._sums = np.zeros((*costs.shape[:-1], costs.shape[-1] + 1), dtype=costs.dtype)
        np.cumsum(np.sort(self._gains, axis=-1), axis=-1, out=self._sums[..., 1:])
        self._fixed = (box.lower * costs).sum(axis=-1)[..., None]
        self._taken = box.lower.sum(axis=-1)[..., None].astype(np.int64)
        room = np.arange(costs.shape[-1] + 1) - self._taken
        sums = np.take_along_axis(self._sums, np.broadcast_to(np.maximum(room, 0), self._sums.shape), -1)
        sums += self._fixed
        sums[np.broadcast_to(room < 0, sums.shape)] = EXCLUDED
        self.least = sums.take(most, axis=-1)

    def choose(self, pairs: Ints) -> Floats:
        chosen = (self._gains < 0) & (self._rank() < self._most[pairs][:, None] - self._taken)
        return np.where(chosen, self._costs.dtype.type(1.0), self._box.lower)

    def fix_each(self) -> tuple[Floats, Floats]:
        """(nodes, units, pairs): the least cost with each free score fixed at 0 and at 1."""
        nodes, units = self._costs.shape
        rank, gains, fixed = self._rank()[..., None], self._gains[..., None], self._fixed[:, None]
        sums = np.broadcast_to(self._sums[:, None], (nodes, units, units + 1))

        def without(room: Ints) -> Floats:
            """The sum of the `room` most negative gains, this score left out."""
            before = rank < room
            left = np.take_along_axis(sums, np.clip(room + before, 0, units), 2) - gains * before
            return np.asarray(np.where(room < 0, EXCLUDED, left))

        room = (self._most - self._taken)[:, None]
        return fixed + without(room), fixed + self._costs[..., None] + without(room - 1)

    def _rank(self) -> Ints:
        """The place of each score in the order of gains."""
        return np.argsort(np.argsort(self._gains, axis=1, kind="stable"), axis=1)


def count_units(goal: Goal, network: Network) -> UnitCounts | None:
    """The counts of a goal for two layers, if all units of a layer weigh the same in it."""
    if len(network.group_sizes) != 2:
        return None
    first, second = network.group_sizes
    kept = np.stack(np.meshgrid(np.arange(first + 1), np.arange(second + 1), indexing="ij"))
    if isinstance(goal, BudgetRows):
        layers = np.split(goal.weights, [first], axis=1)
        if any(np.ptp(layer, axis=1).max() > 1e-12 for layer in layers):
            return None
        weights = np.stack([layer[:, 0] for layer in layers], axis=1)
        used = np.einsum("rl,lab->rab", weights, kept)
        cost = np.where((used <= goal.limits[:, None, None] + 1e-9).all(axis=0), 0.0, np.inf)
    else:
        cost = np.array([[_cost(goal, network, a, b) for b in range(second + 1)] for a in range(first + 1)])
    beaten = np.zeros(cost.shape, dtype=bool)
    beaten[:-1] |= cost[1:] <= cost[:-1] + SAME
    beaten[:, :-1] |= cost[:, 1:] <= cost[:, :-1] + SAME
    useful = np.isfinite(cost) & ~beaten
    return UnitCounts(cost[useful], (kept[0][useful], kept[1][useful]))


def _cost(goal: Goal, network: Network, first: int, second: int) -> float:
    sizes = network.group_sizes
    mask = np.concatenate([np.arange(sizes[0]) < first, np.arange(sizes[1]) < second]).astype(np.float64)
    return goal.compute(network, mask, np.zeros(1))

"""Counts: the part of the objective that depends on how many units of two layers are kept, solved by sorting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

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

    @cached_property
    def free(self) -> Floats:
        return self.upper - self.lower


@dataclass(frozen=True, eq=False)
class UnitCounts:
    """Keeping at most `most[0]` and `most[1]` units of two layers costs `cost`; pairs that others make useless are
    left out."""

    cost: Floats
    most: tuple[Ints, Ints]

    def in_single(self) -> UnitCounts:
        return replace(self, cost=self.cost.astype(np.float32))

    def price(self, kept: tuple[Floats, Floats]) -> Floats:
        """The cost of masks, infinite if the goal excludes them."""
        enough = [most >= mask.sum(axis=1)[:, None] for most, mask in zip(self.most, kept, strict=True)]
        return np.asarray(np.where(enough[0] & enough[1], self.cost, np.inf).min(axis=1))

    def within(self, boxes: tuple[Box, Box]) -> CountsWithin:
        return CountsWithin(self, boxes)


class CountsWithin:
    """The counts of nodes with these boxes. Methods take linear costs of the scores, (nodes, units), by layer."""

    def __init__(self, counts: UnitCounts, boxes: tuple[Box, Box]) -> None:
        self._cost, self._most, self._boxes = counts.cost, counts.most, boxes
        self._layers = _Layer(boxes[0], counts.most[0]), _Layer(boxes[1], counts.most[1])

    def minimise(self, costs: tuple[Floats, Floats]) -> tuple[Floats, tuple[Floats, Floats], Ints]:
        """The least total cost, the scores that attain it, and their pair of counts; of equal costs at the limit all
        are chosen."""
        first, second = self._layers[0].sort(costs[0]), self._layers[1].sort(costs[1])
        totals = first.least
        totals += self._cost
        totals += second.least
        pairs = totals.argmin(axis=1)
        chosen = self._layers[0].choose(first, pairs), self._layers[1].choose(second, pairs)
        return totals[np.arange(len(pairs)), pairs], chosen, pairs

    def probe_first(
        self, costs: tuple[Floats, Floats], changed: tuple[Floats, Floats], limits: tuple[Floats, Floats]
    ) -> tuple[Floats, Floats]:
        """The least total cost with each free score of the first layer fixed at 0 and at 1, (nodes, units), where it
        reaches the limit; elsewhere a value between it and the limit. `changed`: what the second layer's scores then
        cost, (nodes, units, units of the second)."""
        _, (_, second), pairs = self.minimise(costs)
        layer, found = self._layers[0], self._layers[0].sort(costs[0])
        nodes, units = costs[0].shape
        every = np.repeat(np.arange(nodes), units), np.tile(np.arange(units), nodes)
        probed = []
        for value, (then, limit) in enumerate(zip(changed, limits, strict=True)):
            # With the second layer's scores as they are, and these counts, the cost is no less.
            kept = self._cost[pairs][:, None] + np.einsum("nus,ns->nu", then, second)
            kept += layer.fix(found, every, layer.room[every[0], pairs[every[0]]][:, None], value).reshape(nodes, -1)
            rows, columns = np.nonzero((kept >= limit) & (self._boxes[0].free > 0))
            if len(rows):
                least = _Layer(self._boxes[1].take(rows), self._most[1]).sort(then[rows, columns]).least
                least += layer.fix(found, (rows, columns), layer.room[rows], value)
                kept[rows, columns] = (least + self._cost).min(axis=1)
            probed.append(kept)
        return probed[0], probed[1]

    def probe_second(self, costs: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """The least total cost with each score of the second layer fixed at 0 and at 1, (nodes, units)."""
        nodes, units = costs[1].shape
        every = np.repeat(np.arange(nodes), units), np.tile(np.arange(units), nodes)
        other = (self._layers[0].sort(costs[0]).least + self._cost)[every[0]]
        layer, found = self._layers[1], self._layers[1].sort(costs[1])
        zero, one = ((other + layer.fix(found, every, layer.room[every[0]], value)).min(axis=1) for value in (0, 1))
        return zero.reshape(nodes, units), one.reshape(nodes, units)


@dataclass
class _Sorted:
    """Costs, the negative ones of free scores, as they are and in order, their sums from none to all, what the scores
    that are fixed at 1 cost, and the least cost at each pair of counts."""

    costs: Floats
    gains: Floats
    ordered: Floats
    sums: Floats
    fixed: Floats
    least: Floats

    @cached_property
    def rank(self) -> Ints:
        """The place of each score in the order of gains."""
        return np.argsort(np.argsort(self.gains, axis=1, kind="stable"), axis=1)


class _Layer:
    """A layer at each pair of counts: its most negative costs are chosen."""

    def __init__(self, box: Box, most: Ints) -> None:
        nodes, units = box.lower.shape
        self._box, self._rows, self._units = box, np.arange(nodes)[:, None], units
        self.room = most - box.lower.sum(axis=1, keepdims=True).astype(np.int64)
        """How many free scores may be 1, (nodes, pairs)."""
        self._places = np.maximum(self.room, 0) + self._rows * (units + 1)
        self._excluded = np.where(self.room < 0, EXCLUDED, 0.0).astype(box.lower.dtype)

    def sort(self, costs: Floats) -> _Sorted:
        gains = np.minimum(costs, 0.0)
        gains *= self._box.free
        ordered = np.sort(gains, axis=1)
        sums = np.zeros((len(costs), self._units + 1), dtype=costs.dtype)
        np.cumsum(ordered, axis=1, out=sums[:, 1:])
        fixed = np.einsum("nu,nu->n", self._box.lower, costs)[:, None]
        least = sums.take(self._places)
        least += fixed
        least += self._excluded
        return _Sorted(costs, gains, ordered, sums, fixed, least)

    def choose(self, found: _Sorted, pairs: Ints) -> Floats:
        room = self.room[self._rows[:, 0], pairs][:, None]
        last = found.ordered[self._rows, np.maximum(room - 1, 0)]
        last[room <= 0] = -np.inf
        chosen = found.gains <= last
        chosen &= found.gains < 0
        return np.asarray(chosen + self._box.lower)

    def fix(self, found: _Sorted, which: tuple[Ints, Ints], room: Ints, value: int) -> Floats:
        """The least costs with single free scores, given by node and unit, fixed at 0 or 1, for each `room`."""
        rows, units = which[0][:, None], which[1][:, None]
        room = room - value
        before = found.rank[rows, units] < room
        costs = found.sums.take(np.clip(room + before, 0, self._units) + rows * (self._units + 1))
        costs -= found.gains[rows, units] * before
        np.copyto(costs, EXCLUDED, where=room < 0)
        costs += found.fixed[rows[:, 0]] + value * found.costs[rows, units]
        return np.asarray(costs)


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

"""Lagrangian bounds of the exact program with two scored ReLUs, for many nodes of a tree at once.

The pre-activations of the first ReLU are constants, so h = s a, and those of the second are affine in the scores s of
the first: p_e = b_e + w_e · s, one for every data point (and position) e of a unit j with score t_j. The loss is
bounded by its tangent at some `outputs`, which leaves a sum of c_e t_j max(0, p_e). Each unit j gets its own copy of
s, and pays `prices` for every difference from s:

    constant + min over s of sum_j prices_j · s
             + sum_j min over s_j of (t_j sum_e c_e max(0, p_e(s_j)) - prices_j · s_j)

* c_e > 0: c_e max(0, p_e) >= c_e slope_e p_e, for any slope in [0, 1];
* c_e < 0: c_e max(0, p_e) = min(0, c_e p_e). For the few elements of a unit where it matters most, all combinations
  of the two cases are tried; the others are bounded by the chord from L to U, the node's own bounds of p;
* the sparsity term or budget depends only on how many scores are 1, and is minimised exactly (`unit_counts`).

The bound holds for all outputs, slopes in [0, 1] and prices: `score_dual_steps` looks for good ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from critical_neurons.core.program import Program
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.convex_hull import Forms
from critical_neurons.formulations.unit_counts import Box, UnitCounts

CASES = 2
"""Elements of every unit for which both cases are tried."""


NO_LIMIT = 1e30
"""A cost that no score has."""


@dataclass
class Multipliers:
    """Of many nodes: outputs (nodes, outputs of all data points), slopes (units, nodes, elements) and prices (units,
    nodes, scores of the first ReLU)."""

    outputs: Floats
    slopes: Floats
    prices: Floats

    def take(self, nodes: Ints) -> Multipliers:
        return Multipliers(self.outputs[nodes], self.slopes[:, nodes], self.prices[:, nodes])

    def join(self) -> Floats:
        """(nodes, numbers)."""
        parts = (self.slopes, self.prices)
        return np.concatenate(
            [self.outputs, *(part.swapaxes(0, 1).reshape(len(self.outputs), -1) for part in parts)], axis=1
        )


@dataclass
class DualValue:
    """Bounds, supergradients and what attains the bounds: the scores of both ReLUs, and outputs.

    `copies` are the costs of the copied scores, (units, nodes, scores), and `further` what they cost more where an
    element is in its second case, by element; `totals` (combinations of cases, units, nodes) the least costs of a
    unit that is kept, `costs` those of the scores of both ReLUs, and `constant` what depends on no score.
    """

    bound: Floats
    scores: tuple[Floats, Floats]
    outputs: Floats
    slopes: Floats
    prices: Floats
    copies: Floats
    further: list[Floats]
    totals: Floats
    constant: Floats
    costs: tuple[Floats, Floats]


@dataclass(frozen=True)
class Chords:
    """L and U of all pre-activations, (units, nodes, elements): where both signs occur, and the chord there."""

    mixed: Bools
    slope: Floats
    shift: Floats
    """What the chord adds to slope times p."""

    def take(self, nodes: Ints) -> Chords:
        return Chords(self.mixed[:, nodes], self.slope[:, nodes], self.shift[:, nodes])


class ScoreDual:
    def __init__(self, forms: Forms, columns: tuple[Ints, Ints], program: Program, counts: UnitCounts) -> None:
        """`columns`: those of the scores of the first and of the second ReLU, layer by layer."""
        self.columns, self.counts = columns, counts
        numbers = [np.flatnonzero(forms.units == unit) for unit in columns[1]]
        elements = np.full((len(numbers), max(1, *map(len, numbers))), -1)
        for row, found in zip(elements, numbers, strict=True):
            row[: len(found)] = found
        there = elements >= 0
        self._weights = np.where(there[..., None], forms.weights[:, columns[0]][elements], 0.0)
        self._offsets = np.where(there, forms.offsets[elements], 0.0)
        matrix, self._output_offset, self._loss = program.term.affine_forms()
        dense = matrix.toarray()
        read = np.where(there, (dense[:, forms.values] / forms.tops)[:, elements], 0.0)
        self._readout = read.reshape(len(dense), -1)
        self._score_readout = dense[:, np.concatenate(columns)]
        self._loss_weight = program.cost[program.term.columns]
        self.cases = min(CASES, elements.shape[1])

    def in_single(self) -> ScoreDual:
        """The same in single precision, for steps: twice as fast, and its bounds are rounded."""
        found = copy(self)
        found.counts = self.counts.in_single()
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray) and values.dtype == np.float64:
                setattr(found, name, values.astype(np.float32))
        return found

    @property
    def _flat(self) -> Floats:
        return self._weights.reshape(-1, self._weights.shape[2])

    @property
    def useless(self) -> Bools:
        """The scores of both ReLUs that no output depends on."""
        parts = self._weights.any(axis=(0, 1)), self._weights.any(axis=(1, 2)) | self._offsets.any(axis=1)
        return np.asarray(~np.concatenate(parts) & ~self._score_readout.any(axis=0))

    def start(self) -> Multipliers:
        """For one node, at the outputs of the unpruned network."""
        outputs = self._find_outputs(*(np.ones((1, len(columns))) for columns in self.columns))
        units, elements, scores = self._weights.shape
        return Multipliers(outputs, np.full((units, 1, elements), 0.5), np.zeros((units, 1, scores)))

    def split(self, joined: Floats) -> Multipliers:
        """Multipliers from one row for each node."""
        units, elements, _ = self._weights.shape
        ends = np.cumsum([len(self._readout), units * elements])
        outputs, *others = np.split(joined.astype(self._weights.dtype), ends, axis=1)
        slopes, prices = (np.ascontiguousarray(part.reshape(len(part), units, -1).swapaxes(0, 1)) for part in others)
        return Multipliers(outputs, slopes, prices)

    def find_values(self, first: Floats, second: Floats) -> Floats:
        """The objective of masks, by their forward passes."""
        return np.asarray(self.counts.price((first, second)) + self._lose(self._find_outputs(first, second))[0])

    def _find_outputs(self, first: Floats, second: Floats) -> Floats:
        p = (first @ self._flat.T).reshape(len(first), *self._offsets.shape) + self._offsets
        return self._read(np.maximum(p, 0.0) * second[..., None], first, second)

    def _read(self, activations: Floats, first: Floats, second: Floats) -> Floats:
        scores = np.concatenate([first, second], axis=1)
        flat = activations.reshape(len(first), -1)
        return np.asarray(flat @ self._readout.T + scores @ self._score_readout.T + self._output_offset)

    def _lose(self, outputs: Floats) -> tuple[Floats, Floats]:
        """The weighted loss of all data points together and its gradient."""
        nodes, batch = len(outputs), len(self._loss_weight)
        flat = outputs.reshape(nodes * batch, -1)
        loss = self._loss.choose(np.tile(np.arange(batch), nodes))
        values, gradients = (each.astype(outputs.dtype) for each in (loss.values(flat), loss.gradients(flat)))
        weights = np.tile(self._loss_weight, nodes)[:, None]
        return values.reshape(nodes, batch) @ self._loss_weight, (weights * gradients).reshape(nodes, -1)

    def bound_elements(self, box: Box) -> Chords:
        units, elements, _ = self._weights.shape

        def reach(scores: Floats, weights: Floats) -> Floats:
            return np.ascontiguousarray((weights @ scores.T).reshape(units, elements, -1).swapaxes(1, 2))

        centre = reach((box.lower + box.upper) / 2, self._flat) + self._offsets[:, None]
        radius = reach(box.free / 2, np.abs(self._flat))
        low, high = centre - radius, centre + radius
        mixed = (low < 0) & (high > 0)
        slope = np.where(mixed, high / np.where(mixed, high - low, 1.0), low >= 0).astype(low.dtype)
        return Chords(mixed, slope, np.where(mixed, -slope * low, 0.0).astype(low.dtype))

    def evaluate(self, multipliers: Multipliers, boxes: tuple[Box, Box], chords: Chords) -> DualValue:
        prices, box = multipliers.prices, boxes[0]
        units, nodes, scores = prices.shape
        value, gradient = self._lose(multipliers.outputs)
        constant = value - ((multipliers.outputs - self._output_offset) * gradient).sum(axis=1)
        c = np.ascontiguousarray((self._readout.T @ gradient.T).reshape(units, -1, nodes).swapaxes(1, 2))
        score_costs = gradient @ self._score_readout
        concave = chords.mixed & (c < 0)
        convex = chords.mixed ^ concave
        chosen = np.argpartition(np.where(concave, c * chords.shift, 0.0), self.cases - 1, axis=2)[..., : self.cases]
        split = np.zeros(c.shape, dtype=bool)
        np.put_along_axis(split, chosen, True, 2)
        split &= concave
        slope = np.where(convex, multipliers.slopes, chords.slope)
        slope[split] = 0.0
        shift = chords.shift * (concave ^ split)
        q = c * slope
        constants = [(q * self._offsets[:, None] + c * shift).sum(axis=2)]
        copies = np.matmul(q, self._weights)
        copies -= prices
        copies *= box.upper
        factor = np.take_along_axis(c * split, chosen, 2)
        elements = chosen + (c.shape[2] * np.arange(units))[:, None, None]
        further = []
        for at in range(self.cases):
            more = self._flat.take(elements[..., at], axis=0)
            more *= factor[..., at, None]
            more *= box.upper
            further.append(more)
            moved = factor[..., at] * self._offsets.take(elements[..., at])
            constants += [known + moved for known in constants]
        cap = box.lower * NO_LIMIT
        sums = [_sum(np.minimum(cost, cap)) for cost in _combine(copies, further)]
        totals = np.stack([*map(np.add, sums, constants)])
        best = totals.argmin(axis=0)
        removed_scores = (prices > 0) * box.free
        removed_scores += box.lower
        removed = -_sum(prices * removed_scores)
        first_costs = prices.sum(axis=0) + score_costs[:, :scores]
        second_costs = (totals.min(axis=0) - removed).T + score_costs[:, scores:]
        total, (first, second) = self.counts.minimise((first_costs, second_costs), boxes)
        in_second = (best[..., None] >> np.arange(self.cases)) & 1
        attained = copies.copy()
        for at, more in enumerate(further):
            attained += more * in_second[..., at, None].astype(more.dtype)
        kept_scores = (attained < 0) * box.free
        kept_scores += box.lower
        p = np.matmul(kept_scores, self._weights.swapaxes(1, 2)) + self._offsets[:, None]
        cased = np.take_along_axis(split, chosen, 2)
        np.put_along_axis(slope, chosen, np.where(cased, in_second, np.take_along_axis(slope, chosen, 2)), 2)
        is_kept = second.T[..., None]
        activations = (slope * p + shift) * is_kept
        kept_scores -= removed_scores
        kept_scores *= is_kept
        kept_scores += removed_scores
        return DualValue(
            bound=constant + removed.sum(axis=0) + total,
            scores=(first, second),
            outputs=self._read(activations.swapaxes(0, 1), first, second),
            slopes=c * p * convex * is_kept,
            prices=first - kept_scores,
            copies=copies,
            further=further,
            totals=totals,
            constant=constant,
            costs=(first_costs, second_costs),
        )

    def probe(
        self, found: DualValue, multipliers: Multipliers, boxes: tuple[Box, Box]
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """The bounds with each single score fixed at 0 and at 1, for both ReLUs; of use for free scores only."""
        prices, (box, _) = multipliers.prices, boxes
        own = -prices * np.where(prices > 0, box.upper, box.lower)
        alone = found.costs[1].T - found.totals.min(axis=0) + own.sum(axis=2)
        kept = [np.full_like(prices, np.inf), np.full_like(prices, np.inf)]
        for total, cost in zip(found.totals, _combine(found.copies, found.further), strict=True):
            others = total[..., None] - np.minimum(cost, box.lower * NO_LIMIT)
            np.minimum(kept[0], others, out=kept[0])
            others += cost
            np.minimum(kept[1], others, out=kept[1])
        sums, changed = [], []
        for value, on in enumerate(kept):
            off = own.sum(axis=2, keepdims=True) - own - value * prices
            sums.append(off.sum(axis=0) + found.constant[:, None])
            changed.append((on - off + alone[..., None]).transpose(1, 2, 0))
        first = self.counts.probe_first(found.costs[0], (changed[0], changed[1]), boxes)
        second = self.counts.probe_second(found.costs, boxes)
        rest = (own.sum(axis=(0, 2)) + found.constant)[:, None]
        return (first[0] + sums[0], first[1] + sums[1]), (second[0] + rest, second[1] + rest)


def _combine(costs: Floats, further: Sequence[Floats]) -> Iterator[Floats]:
    """The costs in every combination of cases, the first element's case changing fastest."""
    if not further:
        yield costs
        return
    *others, last = further
    yield from _combine(costs, others)
    yield from _combine(costs + last, others)


def _sum(values: Floats) -> Floats:
    """Over the last axis; of many short rows a product with ones is the fastest sum."""
    return np.asarray(values @ np.ones(values.shape[-1], dtype=values.dtype))

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

from dataclasses import dataclass

import numpy as np

from critical_neurons.core.program import Program
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.convex_hull import Forms
from critical_neurons.formulations.unit_counts import Box, UnitCounts

CASES = 2
"""Elements of every unit for which both cases are tried."""


@dataclass
class Multipliers:
    """Of many nodes: outputs (nodes, outputs of all data points), slopes (nodes, units, elements) and prices (nodes,
    units, scores of the first ReLU)."""

    outputs: Floats
    slopes: Floats
    prices: Floats

    def join(self) -> Floats:
        """(nodes, numbers)."""
        parts = (self.outputs, self.slopes, self.prices)
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


@dataclass
class DualValue:
    """Bounds, supergradients and what attains the bounds: the scores of both ReLUs, and outputs.

    `cases` (nodes, units, combinations, scores) are the costs of the copied scores in each combination of cases,
    `least` the least of them over the node's box, `totals` their sums over the scores with what else a combination
    costs, `costs` those of the scores of both ReLUs, and `constant` what depends on no score.
    """

    bound: Floats
    scores: tuple[Floats, Floats]
    outputs: Floats
    slopes: Floats
    prices: Floats
    cases: Floats
    least: Floats
    totals: Floats
    constant: Floats
    costs: tuple[Floats, Floats]


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
        self._flat = self._weights.reshape(-1, self._weights.shape[2])
        self.cases = min(CASES, elements.shape[1])

    @property
    def useless(self) -> Bools:
        """The scores of both ReLUs that no output depends on."""
        parts = self._weights.any(axis=(0, 1)), self._weights.any(axis=(1, 2)) | self._offsets.any(axis=1)
        return np.asarray(~np.concatenate(parts) & ~self._score_readout.any(axis=0))

    def start(self) -> Multipliers:
        """For one node, at the outputs of the unpruned network."""
        outputs = self._find_outputs(*(np.ones((1, len(columns))) for columns in self.columns))
        units, elements, scores = self._weights.shape
        return Multipliers(outputs, np.full((1, units, elements), 0.5), np.zeros((1, units, scores)))

    def split(self, joined: Floats) -> Multipliers:
        """Multipliers from one row for each node; views of them."""
        units, elements, scores = self._weights.shape
        ends = np.cumsum([len(self._readout), units * elements])
        outputs, slopes, prices = np.split(joined, ends, axis=1)
        return Multipliers(outputs, slopes.reshape(-1, units, elements), prices.reshape(-1, units, scores))

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
        values = loss.values(flat).reshape(nodes, batch) @ self._loss_weight
        weights = np.tile(self._loss_weight, nodes)[:, None]
        return values, (weights * loss.gradients(flat)).reshape(nodes, -1)

    def bound_elements(self, box: Box) -> tuple[Floats, Floats]:
        """L and U of all pre-activations, (nodes, units, elements)."""
        shape = (len(box.lower), *self._offsets.shape)
        centre = ((box.lower + box.upper) / 2 @ self._flat.T).reshape(shape) + self._offsets
        radius = (box.free / 2 @ np.abs(self._flat).T).reshape(shape)
        return centre - radius, centre + radius

    def evaluate(self, multipliers: Multipliers, boxes: tuple[Box, Box], limits: tuple[Floats, Floats]) -> DualValue:
        """`limits`: L and U from `bound_elements`."""
        prices, (box, _) = multipliers.prices, boxes
        nodes, units, scores = prices.shape
        value, gradient = self._lose(multipliers.outputs)
        constant = value - (gradient * (multipliers.outputs - self._output_offset)).sum(axis=1)
        c = (gradient @ self._readout).reshape(nodes, units, -1)
        score_costs = gradient @ self._score_readout
        low, high = limits
        mixed = (low < 0) & (high > 0)
        width = np.where(mixed, high - low, 1.0)
        chord = np.where(mixed, high / width, low >= 0)
        concave = mixed & (c < 0)
        area = np.where(concave, c * high * low / width, 0.0)
        chosen = np.argpartition(-area, self.cases - 1, axis=2)[..., : self.cases]
        split = np.zeros(c.shape, dtype=bool)
        np.put_along_axis(split, chosen, True, 2)
        split &= concave
        slope = np.where(split, 0.0, np.where(mixed & ~concave, multipliers.slopes, chord))
        shift = np.where(concave & ~split, -chord * low, 0.0)
        q = c * slope
        constants = (q * self._offsets + c * shift).sum(axis=2)[..., None]
        cases = np.matmul(q.transpose(1, 0, 2), self._weights).transpose(1, 0, 2)[:, :, None] - prices[:, :, None]
        factor = np.take_along_axis(np.where(split, c, 0.0), chosen, 2)
        each = np.arange(units)[None, :]
        for at in range(self.cases):
            which = chosen[..., at]
            more = factor[..., at, None] * self._weights[each, which]
            cases = np.concatenate([cases, cases + more[:, :, None]], axis=2)
            further = factor[..., at] * self._offsets[each, which]
            constants = np.concatenate([constants, constants + further[..., None]], axis=2)
        least = np.minimum(cases, np.where(box.lower > 0, np.inf, 0.0)[:, None, None])
        least *= box.upper[:, None, None]
        totals = least.sum(axis=3) + constants
        best = totals.argmin(axis=2)[..., None]
        kept = np.take_along_axis(totals, best, 2)[..., 0]
        removed_scores = np.where(prices > 0, box.upper[:, None], box.lower[:, None])
        removed = -(prices * removed_scores).sum(axis=2)
        first_costs = prices.sum(axis=1) + score_costs[:, :scores]
        second_costs = kept - removed + score_costs[:, scores:]
        total, (first, second) = self.counts.minimise((first_costs, second_costs), boxes)
        attained = np.take_along_axis(cases, best[..., None], 2)[:, :, 0]
        kept_scores = np.where(attained < 0, box.upper[:, None], box.lower[:, None])
        p = np.matmul(kept_scores.transpose(1, 0, 2), self._weights.transpose(0, 2, 1)).transpose(1, 0, 2)
        p += self._offsets
        on = np.zeros(c.shape)
        np.put_along_axis(on, chosen, (best >> np.arange(self.cases)) & 1, 2)
        activations = np.where(split, on * p, slope * p + shift) * second[..., None]
        copies = np.where(second[..., None] > 0, kept_scores, removed_scores)
        return DualValue(
            bound=constant + removed.sum(axis=1) + total,
            scores=(first, second),
            outputs=self._read(activations, first, second),
            slopes=np.where(mixed & ~concave, c * p, 0.0) * second[..., None],
            prices=first[:, None] - copies,
            cases=cases,
            least=least,
            totals=totals,
            constant=constant,
            costs=(first_costs, second_costs),
        )

    def probe(
        self, found: DualValue, multipliers: Multipliers, boxes: tuple[Box, Box]
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """The bounds with each single score fixed at 0 and at 1, for both ReLUs; of use for free scores only."""
        prices, (box, _) = multipliers.prices, boxes
        own = -prices * np.where(prices > 0, box.upper[:, None], box.lower[:, None])
        removed, kept = own.sum(axis=2, keepdims=True) - own, found.totals[..., None] - found.least
        alone = found.costs[1] - found.totals.min(axis=2) + own.sum(axis=2)
        sums, changed = [], []
        for value in (0.0, 1.0):
            off = removed - value * prices
            on = (kept + value * found.cases).min(axis=2)
            sums.append(off.sum(axis=1) + found.constant[:, None])
            changed.append((on - off + alone[..., None]).transpose(0, 2, 1))
        first = self.counts.probe_first(found.costs[0], (changed[0], changed[1]), boxes)
        second = self.counts.probe_second(found.costs, boxes)
        rest = (own.sum(axis=(1, 2)) + found.constant)[:, None]
        return (first[0] + sums[0], first[1] + sums[1]), (second[0] + rest, second[1] + rest)

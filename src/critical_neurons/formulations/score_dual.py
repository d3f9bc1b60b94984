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

Scores of the first ReLU that a node fixes are part of its offsets b; their prices are so low that no copy is 1. Units
that it removes have prices of 0, which are the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import numpy as np

from critical_neurons.core.program import Program
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.convex_hull import Forms
from critical_neurons.formulations.score_dual_data import Cases, DualValue, Elements, Multipliers, Nodes
from critical_neurons.formulations.unit_counts import Box, UnitCounts

CASES = 2
"""Elements of every unit for which both cases are tried."""

FIXED = -1e30
"""The price of a score that is fixed."""


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
        matrix, offset, self._loss = program.term.affine_forms()
        by_class = np.arange(len(offset)).reshape(len(self._loss), -1).T.ravel()
        dense = matrix.toarray()[by_class]
        read = np.where(there, (dense[:, forms.values] / forms.tops)[:, elements], 0.0)
        self._output_offset = np.asarray(offset)[by_class][:, None]
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
    def useless(self) -> Bools:
        """The scores of both ReLUs that no output depends on."""
        parts = self._weights.any(axis=(0, 1)), self._weights.any(axis=(1, 2)) | self._offsets.any(axis=1)
        return np.asarray(~np.concatenate(parts) & ~self._score_readout.any(axis=0))

    def start(self) -> Multipliers:
        """For one node, at the outputs of the unpruned network."""
        outputs = self._find_outputs(*(np.ones((1, len(columns))) for columns in self.columns))
        units, elements, scores = self._weights.shape
        return Multipliers(outputs, np.full((units, elements, 1), 0.5), np.zeros((units, scores, 1)))

    def split(self, joined: Floats) -> Multipliers:
        """Multipliers from one row for each node."""
        units, elements, _ = self._weights.shape
        ends = np.cumsum([len(self._readout), units * elements])
        by_node = np.ascontiguousarray(joined.T, dtype=self._weights.dtype)
        outputs, slopes, prices = (part.copy() for part in np.split(by_node, ends))
        return Multipliers(outputs, slopes.reshape(units, elements, -1), prices.reshape(units, -1, len(joined)))

    def restrict(self, multipliers: Multipliers, nodes: Nodes) -> None:
        """Set what the nodes decide: prices of fixed scores and removed units, and slopes of elements of one sign."""
        np.copyto(multipliers.prices, 0.0, where=nodes.kept == 0)
        np.copyto(multipliers.prices, FIXED, where=nodes.free == 0)
        np.copyto(multipliers.slopes, nodes.elements.slope, where=~nodes.elements.mixed)

    def find_values(self, first: Floats, second: Floats) -> Floats:
        """The objective of masks, (nodes, units), by their forward passes."""
        return np.asarray(self.counts.price((first, second)) + self._lose(self._find_outputs(first, second))[0])

    def _find_outputs(self, first: Floats, second: Floats) -> Floats:
        p = self._weights @ first.T + self._offsets[..., None]
        return self._read(np.maximum(p, 0.0) * second.T[:, None], first, second)

    def _read(self, activations: Floats, first: Floats, second: Floats) -> Floats:
        outputs = self._readout @ activations.reshape(-1, len(first))
        outputs += self._score_readout @ np.concatenate([first, second], axis=1).T
        outputs += self._output_offset
        return np.asarray(outputs)

    def _lose(self, outputs: Floats) -> tuple[Floats, Floats]:
        """The weighted loss of all data points together and its gradient."""
        batch, nodes = len(self._loss_weight), outputs.shape[1]
        by_point = outputs.reshape(-1, batch * nodes).T
        loss = self._loss.choose(np.repeat(np.arange(batch), nodes))
        values, gradients = loss.values(by_point), loss.gradients(by_point)
        gradients *= np.repeat(self._loss_weight, nodes)[:, None]
        total = self._loss_weight @ values.reshape(batch, nodes)
        return total.astype(outputs.dtype), gradients.T.reshape(outputs.shape).astype(outputs.dtype, copy=False)

    def bound_elements(self, box: Box) -> Elements:
        offsets = self._weights @ box.lower.T + self._offsets[..., None]
        centre = offsets + self._weights @ (box.free.T / 2)
        radius = np.abs(self._weights) @ (box.free.T / 2)
        low, high = centre - radius, centre + radius
        mixed = (low < 0) & (high > 0)
        slope = np.where(mixed, high / np.where(mixed, high - low, 1.0), low >= 0).astype(low.dtype)
        return Elements(offsets, mixed, slope, np.where(mixed, -slope * low, 0.0).astype(low.dtype))

    def evaluate(self, at: Multipliers, nodes: Nodes, cases: Cases | None = None) -> DualValue:
        """Unless cases are given, both are tried where the chord loses most."""
        loss, gradient = self._lose(at.outputs)
        constant = loss - np.einsum("on,on->n", at.outputs - self._output_offset, gradient)
        c = (self._readout.T @ gradient).reshape(*self._offsets.shape, -1)
        falling = np.minimum(c, np.zeros_like(c))
        rising = c - falling
        cases = cases or self._choose_cases(falling, nodes.elements)
        factors = np.empty((2**self.cases, *c.shape), dtype=c.dtype)
        np.multiply(rising, at.slopes, out=factors[0])
        factors[0] += falling * cases.slope
        for case, tried in enumerate(cases.tried):
            np.add(factors[: 2**case], falling * tried, out=factors[2**case : 2 ** (case + 1)])
        totals = np.einsum("kuen,uen->kun", factors, nodes.elements.offsets)
        totals += np.einsum("uen,uen->un", falling, cases.shift)
        nothing = np.zeros_like(at.prices)  # numpy is slower with the number 0
        for total, copies in zip(totals, self.price_copies(factors, at.prices), strict=True):
            total += _sum(np.minimum(copies, nothing, out=copies))
        owed = _sum(np.maximum(at.prices, nothing, out=nothing))
        own, scores = self._score_readout.T @ gradient, at.prices.shape[1]
        first = at.prices.sum(axis=0) * nodes.free + own[:scores]
        second = totals.min(axis=0) + owed + own[scores:]
        costs = np.ascontiguousarray(first.T), np.ascontiguousarray(second.T)
        least, chosen, _ = nodes.counts.minimise(costs)
        return DualValue(
            bound=constant - owed.sum(axis=0) + least,
            scores=chosen,
            cases=cases,
            rising=rising,
            falling=falling,
            factors=factors,
            totals=totals,
            owed=owed,
            costs=costs,
            own=own[scores:],
            constant=constant,
        )

    def _choose_cases(self, falling: Floats, elements: Elements) -> Cases:
        tried = _choose_least(falling * elements.shift, self.cases)
        others = 1.0 - tried.sum(axis=0)
        return Cases(tried, elements.slope * others, elements.shift * others)

    def price_copies(self, factors: Floats, prices: Floats) -> Iterator[Floats]:
        """The costs of the copied scores, (units, scores, nodes), in one combination of cases after the other; all in
        the same memory, which stays in the cache of a core."""
        costs = np.empty_like(prices)
        for each in factors:
            np.matmul(self._weights.swapaxes(1, 2), each, out=costs)
            costs -= prices
            yield costs

    def differentiate(self, found: DualValue, at: Multipliers, nodes: Nodes) -> Multipliers:
        """The supergradients of slopes and prices, and the outputs that attain the bound."""
        (first, second), cases = found.scores, found.cases
        kept = np.repeat(second.T[:, None], at.slopes.shape[1], axis=1)
        concave = found.falling < 0
        slope = cases.slope.copy()
        for case, tried in enumerate(cases.tried):
            least = found.totals.reshape(-1, 2, 2**case, *second.T.shape).min(axis=(0, 2))
            slope += tried * (least[1] < least[0])[:, None]
        np.copyto(slope, at.slopes, where=~concave)
        factors = slope * kept
        factors *= found.rising + found.falling
        # A unit that is not kept has costs of 0, and its copies are 1 where prices are above 0.
        copies = (np.matmul(self._weights.swapaxes(1, 2), factors) < at.prices).astype(factors.dtype)
        p = self._weights @ copies
        p += nodes.elements.offsets
        slope *= p
        slope += cases.shift * concave
        slope *= kept
        outputs = self._read(slope, first, second)
        p *= kept
        p *= found.rising
        p *= nodes.elements.mixed
        np.subtract(first.T * nodes.free, copies, out=copies)
        copies *= nodes.kept
        return Multipliers(outputs, p, copies)


def _choose_least(values: Floats, count: int) -> Floats:
    """Where the `count` least values along the second axis are, if below 0: one after the other, as 0 and 1."""
    left = values.copy()
    found = np.zeros((count, *values.shape), dtype=values.dtype)
    numbers = np.arange(values.shape[1])[:, None]
    for which in found:
        at = left.argmin(axis=1)[:, None] == numbers
        np.multiply(at, left < 0, out=which)
        left[at] = 0.0
    return found


def _sum(values: Floats) -> Floats:
    """(..., scores, nodes) over the scores; a product with ones is the fastest sum."""
    return np.asarray((np.ones((1, values.shape[-2]), dtype=values.dtype) @ values)[..., 0, :])

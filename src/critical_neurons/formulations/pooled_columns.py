"""Pooled columns: one column for undecided activations that the network reads only as a weighted sum.

Consider a first-layer ReLU followed by average pooling, in which every element belongs to one output. With relaxed
gates an undecided activation takes any value between two functions of its score s (docs/method.md, section 3),

    max(0, q) <= h <= U (q - L) / (U - L),   q = p - (1 - s) shrink,

so the weighted sum w of those of one output takes any value in

    sum of a max(0, q)  <=  w  <=  sum of a U (q - L) / (U - L),   a the weights of the pooling.

One column y = w / sum of a U per output replaces all of them. The right side is affine in s. The left side is the
maximum of affine functions: with the elements sorted by the score at which their q is 0, the sums of a q over the
first 1, 2, … of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from critical_neurons.core.network import Affine, Op, Relu, Shape
from critical_neurons.core.structure import NO_UNIT, Floats, Ints
from critical_neurons.formulations.gates import GateDecision

EXACT = 1e-12
"""Tolerance in the test that an op is such a pooling."""


@dataclass(frozen=True)
class Deal:
    """Every element of a ReLU (flat) contributes to one of the `size` outputs of op `index`: to output `owners`,
    times `weights`."""

    index: int
    owners: Ints
    weights: Floats
    size: int


def find_deal(ops: tuple[Op, ...], relu: int) -> Deal | None:
    """How the ops behind a ReLU sum its elements, if nothing else reads the elements."""
    deal = Deal(relu, np.arange(int(np.prod(ops[relu].shape))), np.ones(1), int(np.prod(ops[relu].shape)))
    while True:
        readers = [index for index, op in enumerate(ops) if deal.index in op.sources]
        following = ops[readers[0]] if len(readers) == 1 else None
        found = _read_op(following, ops[deal.index].shape) if isinstance(following, Affine) else None
        if found is None:
            return deal if deal.size < deal.owners.size else None
        owners, weights = found
        size = int(np.prod(ops[readers[0]].shape))
        deal = Deal(readers[0], owners[deal.owners], deal.weights * weights[deal.owners], size)


def _read_op(op: Affine, read: Shape) -> tuple[Ints, Floats] | None:
    """Owner and weight of every element, if each has at most one owner and the weights are nonnegative."""
    linear, shape, size = op.map, op.shape, int(np.prod(op.shape))
    weights = linear.adjoint(np.ones((1, *shape))).reshape(-1)
    numbers = linear.adjoint(np.arange(size, dtype=np.float64).reshape(1, *shape)).reshape(-1)
    if weights.min() < 0:
        return None
    owners = np.rint(numbers / np.where(weights > 0, weights, 1.0)).astype(np.int64)
    if owners.min() < 0 or owners.max() >= size:
        return None
    probe = np.random.default_rng(0).uniform(1.0, 2.0, weights.size)
    dealt = np.bincount(owners, weights * probe, minlength=size)
    applied = linear.apply_linear(probe.reshape(1, *read)).reshape(-1)
    return (owners, weights) if np.allclose(dealt, applied, rtol=EXACT, atol=0.0) else None


@dataclass(frozen=True)
class Sums:
    """The undecided activations of one ReLU, summed up, on the whole batch.

    `explicit` are the flat indices (batch, *shape) of outputs with undecided elements, `first` the column of the
    first; the columns times `tops` are the sums. Elements are sorted by output, then by the score at which their q is
    0: `elements` are flat indices of the ReLU, `owners` the index of the output in `explicit`, `weights` those of the
    pooling.
    """

    relu: int
    explicit: Ints
    tops: Floats
    first: int
    units: Ints
    elements: Ints
    owners: Ints
    weights: Floats
    ceiling: tuple[Floats, Floats]
    """The largest y as constant and coefficient of the score, one per output."""
    pieces: tuple[Floats, Floats]
    """The affine functions whose maximum is the least y, in the same form, one per element."""

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + len(self.explicit))

    def add(self, value: Floats, columns: Floats) -> Floats:
        """The value of the op with the sums added."""
        whole = np.array(value, order="C")
        whole.reshape(-1)[self.explicit] += self.tops * columns[self.columns]
        return whole

    def limit(self, point: Floats) -> tuple[Floats, Floats]:
        """The least and the largest y of every output at these scores; equation 9b."""
        scores = np.where(self.units == NO_UNIT, 1.0, point[self.units])
        pieces, tilts = self.pieces
        least = np.zeros(len(self.explicit))
        np.maximum.at(least, self.owners, pieces + tilts * scores[self.owners])
        constant, slope = self.ceiling
        return least, constant + slope * scores

    def gather(self, activations: Floats) -> Floats:
        """The columns at these activations of the ReLU."""
        sums = np.bincount(self.owners, self.weights * activations.reshape(-1)[self.elements], len(self.explicit))
        return sums / self.tops


def sum_up(
    deal: Deal, op: Relu, decision: GateDecision, at_zero: Floats, shrink: Floats, *, relu: int
) -> Sums | None:
    """`at_zero` is q with all scores at 0; the caller sets the columns. None if there is nothing to sum up, or if an
    output has elements of several units."""
    elements = np.flatnonzero(~decision.live & ~decision.dead)
    samples, positions = np.divmod(elements, deal.owners.size)
    outputs, weights = samples * deal.size + deal.owners[positions], deal.weights[positions]
    read = weights > 0
    elements, outputs, weights = elements[read], outputs[read], weights[read]
    units = np.broadcast_to(op.units, op.shape).reshape(-1)[elements % deal.owners.size]
    constant, slope = at_zero.reshape(-1)[elements], shrink.reshape(-1)[elements]
    if len(elements) == 0 or np.any((slope <= 0) != (units == NO_UNIT)):
        return None
    turns = np.where(slope > 0, -constant / np.where(slope > 0, slope, 1.0), np.where(constant > 0, -np.inf, np.inf))
    order = np.lexsort((turns, outputs))
    elements, outputs, weights, units = elements[order], outputs[order], weights[order], units[order]
    constant, slope = constant[order], slope[order]
    explicit, starts, owners = np.unique(outputs, return_index=True, return_inverse=True)
    if np.any(units != units[starts][owners]):
        return None
    lower, upper = decision.floor.reshape(-1)[elements], decision.ceiling.reshape(-1)[elements]
    tops: Floats = np.bincount(owners, weights * upper).astype(np.float64)
    steep = weights * upper / (upper - lower)
    highest = np.bincount(owners, steep * (constant - lower)) / tops
    return Sums(
        relu=relu,
        explicit=explicit,
        tops=tops,
        first=0,
        units=units[starts],
        elements=elements,
        owners=owners,
        weights=weights,
        ceiling=(highest, np.bincount(owners, steep * slope) / tops),
        pieces=(
            _add_up(weights * constant, starts, owners) / tops[owners],
            _add_up(weights * slope, starts, owners) / tops[owners],
        ),
    )


def _add_up(values: Floats, starts: Ints, owners: Ints) -> Floats:
    """Cumulative sums that restart at every start."""
    total = np.cumsum(values)
    before = np.concatenate([[0.0], total])[starts]
    sums: Floats = total - before[owners]
    return sums

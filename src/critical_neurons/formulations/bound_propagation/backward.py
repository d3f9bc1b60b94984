"""Backward substitution: bounds of pre-activations as linear functions of the inputs, layer by layer.

Every ReLU lies between two lines in its pre-activation p and, if its unit has a score, in the score s:

    0, p or p - (1 - s) U  <=  h  <=  (p - L) U / (U - L), p or s U

Clipped activations (ReLU6) have two lines of their own.

A linear function of activations is replaced, layer by layer, by the lines that bound it, until it is a linear
function of the inputs and the scores, whose maximum over their box is at a corner. The same score applies at all
positions of a feature map and at every depth where its unit appears; interval arithmetic would treat these as
independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from scipy import sparse

from critical_neurons.core.bounds import Interval
from critical_neurons.core.deadline import check_time
from critical_neurons.core.network import (
    NO_POSITION,
    Affine,
    Concat,
    Input,
    MaxPool,
    Network,
    Relu,
    Sum,
    pull_linear,
    spread_windows,
)
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints
from critical_neurons.errors import InvalidSettingError

MIXTURES = ((0.0, 0.0), (0.5, 0.25), (1.0, 1.0))
"""Weights of the lines in s against those without, above and below a scored ReLU; all are tried and the best bound is
kept. Chosen by measurement: without the last two, bounds of deeper layers are up to a half wider."""

CHUNK_BYTES = 64 * 2**20
"""Largest array; more rows take several passes."""

MOST_WORK = 10**11
"""Limit on the numbers computed in a call: about a quarter of an hour."""


@dataclass(frozen=True)
class _Line:
    """slope · p + score · s + constant on one data point, (*shape) each."""

    slope: Floats
    score: Floats
    constant: Floats


@dataclass(frozen=True)
class _Pass:
    """A backward pass on one data point, with the coefficients of scores and the constants accumulated so far."""

    sample: int
    mixture: tuple[float, float]
    adjoints: dict[int, Floats]
    scores: Floats
    total: Floats

    def add(self, index: int, adjoint: Floats) -> None:
        self.adjoints[index] = self.adjoints[index] + adjoint if index in self.adjoints else adjoint


class Backward:
    def __init__(self, network: Network, *, pruned: bool) -> None:
        self._network = network
        self._mixtures = MIXTURES if pruned else MIXTURES[:1]
        self._pruned = pruned
        self._offsets: dict[int, Floats] = {}
        self._work = 0

    def tighten(self, index: int, values: dict[int, Interval]) -> Interval:
        """The intersection of a value's interval with that of backward substitution.

        `values` holds the intervals of all earlier values, already tightened at inputs of ReLUs and max pools.
        """
        interval = values[index]
        if interval.lower is interval.upper:
            return interval
        lower, upper = interval.lower.copy(), interval.upper.copy()
        shape = interval.lower.shape[1:]
        for sample in range(len(lower)):
            wide = np.flatnonzero((upper[sample] > 0) & (lower[sample] < upper[sample]))
            for elements in self._chunks(wide, index):
                seeds = np.zeros((2 * len(elements), int(np.prod(shape))))
                rows = np.arange(len(elements))
                seeds[rows, elements], seeds[len(elements) + rows, elements] = 1.0, -1.0
                highest = self._maximise(index, seeds.reshape(-1, *shape), sample, values)
                up, down = np.split(highest, 2)
                flat_lower, flat_upper = lower[sample].reshape(-1), upper[sample].reshape(-1)
                flat_lower[elements] = np.maximum(flat_lower[elements], -down)
                flat_upper[elements] = np.maximum(np.minimum(flat_upper[elements], up), flat_lower[elements])
        return Interval(lower, upper)

    def _chunks(self, elements: Ints, index: int) -> list[Ints]:
        below = [int(np.prod(op.shape)) for op in self._network.ops[: index + 1]]
        self._work += 2 * len(elements) * sum(below) * len(self._mixtures)
        if self._work > MOST_WORK:
            raise InvalidSettingError(
                "bounds: the network is too large for 'backward', which pulls every pre-activation of every data "
                "point back on its own. Use 'interval', or fewer data points."
            )
        step = max(1, CHUNK_BYTES // (16 * max(below)))
        return [elements[at : at + step] for at in range(0, len(elements), step)]

    def _maximise(self, index: int, seeds: Floats, sample: int, values: dict[int, Interval]) -> Floats:
        """Upper bounds of seeds[r] · value on a data point."""
        best = np.full(len(seeds), np.inf)
        for mixture in self._mixtures:
            units = np.zeros((len(seeds), self._network.unit_count))
            run = _Pass(sample, mixture, {index: seeds}, units, np.zeros(len(seeds)))
            for at in range(index, -1, -1):
                adjoint = run.adjoints.pop(at, None)
                if adjoint is not None:
                    self._pull(at, adjoint, run, values)
            best = np.minimum(best, run.total + np.maximum(run.scores, 0.0).sum(axis=1))
        return best

    def _pull(self, at: int, adjoint: Floats, run: _Pass, values: dict[int, Interval]) -> None:
        """One step: express adjoint · value, or an upper bound of it, by the sources of the value."""
        check_time()
        op = self._network.ops[at]
        if at in values and values[at].lower is values[at].upper:
            run.total[:] += _dot(adjoint, values[at].lower[run.sample])
            return
        match op:
            case Input():
                interval = values[at]
                lower, upper = interval.lower[run.sample], interval.upper[run.sample]
                run.total[:] += _dot(np.maximum(adjoint, 0.0), upper) + _dot(np.minimum(adjoint, 0.0), lower)
            case Affine():
                run.total[:] += _dot(adjoint, self._offset(at, op))
                run.add(op.source, op.map.adjoint(adjoint))
            case Relu():
                self._pull_relu(op, adjoint, run, values[op.source])
            case MaxPool():
                self._pull_pool(op, adjoint, run, values[op.source])
            case Sum() if op.ceiling is not None:
                relu = self._network.ops[op.sources[0]]
                assert isinstance(relu, Relu)
                self._pull_relu(relu, adjoint, run, values[relu.source], op.ceiling)
            case Sum() | Concat():
                for source, part in pull_linear(self._network.ops, op, adjoint):
                    run.add(source, part)
            case _:
                assert_never(op)

    def _offset(self, at: int, op: Affine) -> Floats:
        """b of A x + b."""
        if at not in self._offsets:
            self._offsets[at] = op.map.apply(np.zeros((1, *self._network.ops[op.source].shape)))[0]
        return self._offsets[at]

    def _pull_relu(self, op: Relu, adjoint: Floats, run: _Pass, interval: Interval, ceiling: float = np.inf) -> None:
        lower, upper = interval.lower[run.sample], interval.upper[run.sample]
        scored = np.broadcast_to(op.units != NO_UNIT, op.shape) & self._pruned
        below, above = _bound_relu(lower, upper, scored, run.mixture, ceiling)
        rising, falling = np.maximum(adjoint, 0.0), np.minimum(adjoint, 0.0)
        run.total[:] += _dot(rising, above.constant) + _dot(falling, below.constant)
        if self._pruned:
            units = op.units.reshape(-1)
            own = (rising * above.score + falling * below.score).reshape(len(adjoint), len(units), -1).sum(axis=2)
            chosen = np.flatnonzero(units != NO_UNIT)
            place = (np.ones(len(chosen)), (chosen, units[chosen]))
            run.scores[:] += own @ sparse.csr_array(place, shape=(len(units), self._network.unit_count))
        run.add(op.source, rising * above.slope + falling * below.slope)

    def _pull_pool(self, op: MaxPool, adjoint: Floats, run: _Pass, interval: Interval) -> None:
        """x >= h_i with the highest lower bound; x <= h_i if no rival can exceed it, else x <= the highest upper
        bound."""
        lower, upper = (
            spread_windows(op, end[run.sample : run.sample + 1])[0] for end in (interval.lower, interval.upper)
        )
        winners = lower.argmax(axis=2)[..., None]
        rivals = upper.copy()
        np.put_along_axis(rivals, winners, -np.inf, axis=2)
        decided = np.take_along_axis(lower, winners, axis=2)[..., 0] >= rivals.max(axis=2)
        flat = adjoint.reshape(len(adjoint), *decided.shape)
        held = np.where(decided, 0.0, np.maximum(flat, 0.0))
        run.total[:] += _dot(held, upper.max(axis=2))
        shape = self._network.ops[op.source].shape
        positions = np.take_along_axis(np.broadcast_to(op.windows, lower.shape), winners, axis=2)[..., 0]
        assert NO_POSITION not in positions
        size = int(np.prod(shape[1:]))
        columns = (np.arange(shape[0])[:, None] * size + positions).reshape(-1)
        spread = sparse.csr_array(
            (np.ones(len(columns)), (np.arange(len(columns)), columns)), shape=(len(columns), shape[0] * size)
        )
        through = np.asarray((flat - held).reshape(len(adjoint), -1) @ spread)
        run.add(op.source, through.reshape(len(adjoint), *shape))


def _bound_relu(
    lower: Floats, upper: Floats, scored: Bools, mixture: tuple[float, float], ceiling: float
) -> tuple[_Line, _Line]:
    """Lines below and above min(max(p, 0), ceiling) on one data point; exact if p is known.

    For a scored ReLU the upper line is a mixture of those in p and in s, the lower one of 0 and p - (1 - s) U.
    Without a score the lower line is 0 or p, whichever is nearer. If U exceeds the ceiling c, the upper line passes
    through (c, c), or is c if that is nearer, and the lower one through (U, c).
    """
    share_above, share_below = mixture
    top, bottom = np.clip(upper, 0.0, ceiling), np.minimum(lower, 0.0)
    known = (lower == upper) | (upper <= 0) | (~scored & (lower >= ceiling))
    constant = np.where(known & ~scored, top, 0.0)
    in_score = np.where(scored, np.where(known, 1.0, share_above), 0.0)
    flat = ~known & (upper - ceiling > ceiling - lower)
    in_rise = np.where(known, 0.0, 1.0 - in_score) * top
    rise = np.where(known | flat, 0.0, in_rise / np.where(known, 1.0, np.minimum(upper, ceiling) - bottom))
    above = _Line(rise, in_score * top, constant + np.where(flat, in_rise, -rise * bottom))
    part = np.where(known, 0.0, np.where(scored, share_below, upper > -lower))
    foot = np.where(scored, 0.0, np.maximum(lower, 0.0))
    slope = part * (top - foot) / np.where(known, 1.0, upper - foot)
    lost = np.where(scored, part * top, 0.0)
    below = _Line(slope, np.where(known, in_score * top, lost), constant - lost + (part - slope) * foot)
    return below, above


def _dot(rows: Floats, values: Floats) -> Floats:
    product: Floats = rows.reshape(len(rows), -1) @ values.reshape(-1)
    return product

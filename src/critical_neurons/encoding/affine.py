"""The network as an affine function of the scores, once its stable gates are fixed (docs/method.md, section 3).

A unit whose gate is decided on a data point needs no variable of its own: dead, its activation is 0; live, it
is p - (1 - s) U. Only units with L < 0 < U keep an explicit activation, measured in units of its U so that it lies
in [0, 1] like the scores. So everything downstream is affine in the *columns*: the scores, then the explicit
activations. Evaluating it at a point is one forward pass; the
coefficients of one value are one backward pass; no matrix is ever formed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

import numpy as np
from scipy import sparse

from critical_neurons.bounds import Bounds
from critical_neurons.network import NO_UNIT, Affine, Bools, Floats, Input, Ints, Network, Relu

CHUNK_BYTES = 64 * 2**20
"""Largest array held by a backward pass; more rows than fit are pulled back in several passes."""


@dataclass(frozen=True)
class Gate:
    """One ReLU on the whole batch; arrays are (batch, *shape).

    `shrink` is max(U, 0) where the unit has a score and 0 elsewhere: what p loses when its score goes to 0.
    `unstable` are the flat indices with L < 0 < U; the columns `first`, `first + 1`, … times `tops`, their U, are
    their activations.
    """

    lower: Floats
    upper: Floats
    shrink: Floats
    live: Bools
    unstable: Ints
    tops: Floats
    first: int
    units: Ints
    scatter: sparse.csr_array
    scale: float

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + len(self.unstable))


@dataclass(frozen=True)
class Evaluation:
    """`shrunk`: p - (1 - s) max(U, 0) at every ReLU, by op; and the logits (batch, classes)."""

    shrunk: dict[int, Floats]
    logits: Floats


class AffineNetwork:
    def __init__(self, network: Network, bounds: Bounds) -> None:
        self.unit_count = network.unit_count
        self.batch_size = len(bounds.inputs)
        self._ops = network.ops
        self.gates: dict[int, Gate] = {}
        first = self.unit_count
        for index, op in enumerate(network.ops):
            if isinstance(op, Relu):
                gate = _gate(op, bounds, index, first, self.unit_count)
                self.gates[index] = gate
                first += len(gate.unstable)
        self.column_count = first
        self._depends = _depends(network)
        self._constants = _evaluate_constants(network, bounds.inputs, self._depends)
        self._last: tuple[Floats, Evaluation] | None = None

    @cached_property
    def size(self) -> int:
        """Numbers in one forward pass of one data point."""
        return sum(int(np.prod(op.shape)) for op in self._ops)

    @property
    def unstable_count(self) -> int:
        return self.column_count - self.unit_count

    def evaluate(self, point: Floats) -> Evaluation:
        """One forward pass. The result at the last point is kept: rows and cuts both ask for it."""
        columns = point[: self.column_count]
        if self._last is None or not np.array_equal(self._last[0], columns):
            self._last = columns.copy(), self._forward(columns)
        return self._last[1]

    def _forward(self, columns: Floats) -> Evaluation:
        loss = np.append(1.0 - columns[: self.unit_count], 0.0)  # the last entry answers for NO_UNIT
        values: dict[int, Floats] = dict(self._constants)
        shrunk: dict[int, Floats] = {}
        for index, op in enumerate(self._ops):
            if not self._depends[index]:
                continue
            match op:
                case Input():
                    continue
                case Affine():
                    values[index] = op.map.apply(values[op.source])
                case Relu():
                    gate = self.gates[index]
                    shrunk[index] = values[op.source] - loss[gate.units] * gate.shrink
                    activation = np.where(gate.live, shrunk[index], 0.0)
                    activation.reshape(-1)[gate.unstable] = gate.tops * columns[gate.columns]
                    values[index] = activation
                case _:
                    assert_never(op)
        return Evaluation(shrunk, values[len(self._ops) - 1])

    def logits(self, point: Floats) -> Floats:
        return self.evaluate(point).logits

    def forward_pass(self) -> Floats:
        """The columns of the unpruned network: scores at 1, explicit activations as they are."""
        columns = np.ones(self.column_count)
        for index, gate in self.gates.items():  # in topological order: each needs the ones before it
            if len(gate.unstable):
                shrunk = self._forward(columns).shrunk[index]
                columns[gate.columns] = np.maximum(shrunk.reshape(-1)[gate.unstable], 0.0) / gate.tops
        return columns

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        """Coefficients of `seeds[r] · logits[samples[r]]`, one row each; seeds is (rows, classes)."""
        return self._pull_back(len(self._ops) - 1, seeds, samples)

    def differentiate_shrunk(self, index: int, elements: Ints) -> sparse.csr_array:
        """Coefficients of `shrunk[index]` at flat indices (batch, *shape), one row each."""
        op, gate = self._ops[index], self.gates[index]
        assert isinstance(op, Relu)
        size = int(np.prod(op.shape))
        samples, positions = np.divmod(elements, size)
        parts = []
        for chunk in self._chunks(len(elements)):
            seeds = np.zeros((len(elements[chunk]), size))
            seeds[np.arange(len(seeds)), positions[chunk]] = 1.0
            parts.append(self._pull_back(op.source, seeds.reshape(-1, *op.shape), samples[chunk]))
        own_units = np.broadcast_to(gate.units, op.shape).reshape(-1)[positions]
        scored = np.flatnonzero(own_units != NO_UNIT)
        own = sparse.csr_array(
            (gate.shrink.reshape(-1)[elements[scored]], (scored, own_units[scored])),
            shape=(len(elements), self.column_count),
        )
        below = sparse.csr_array(sparse.vstack(parts, format="csr")) if parts else sparse.csr_array(own.shape)
        return sparse.csr_array(below + own)

    def _chunks(self, rows: int) -> Iterator[slice]:
        widest = max(int(np.prod(op.shape)) for op in self._ops)
        step = max(1, CHUNK_BYTES // (8 * widest))
        return (slice(at, at + step) for at in range(0, rows, step))

    def _pull_back(self, index: int, seeds: Floats, samples: Ints) -> sparse.csr_array:
        """One backward pass: rows of coefficients over the columns. Row r lives on data point samples[r]."""
        rows = len(samples)
        scores = np.zeros((rows, self.unit_count))
        explicit: list[tuple[Ints, Ints, Floats]] = []
        adjoints: dict[int, Floats] = {index: seeds}
        for at in range(index, -1, -1):
            adjoint = adjoints.pop(at, None)
            if adjoint is None or not self._depends[at]:
                continue
            op = self._ops[at]
            match op:
                case Affine():
                    _add_adjoint(adjoints, op.source, op.map.adjoint(adjoint))
                case Relu():
                    gate = self.gates[at]
                    through = np.where(gate.live[samples], adjoint, 0.0)
                    lost = (through * gate.shrink[samples]).reshape(rows, gate.scatter.shape[0], -1).sum(axis=2)
                    scores += lost @ gate.scatter
                    if len(gate.unstable):
                        explicit.append(_explicit_entries(gate, adjoint, samples))
                    if self._depends[op.source]:
                        _add_adjoint(adjoints, op.source, through)
                case Input():
                    continue
                case _:
                    assert_never(op)
        return _assemble(scores, explicit, self.column_count)


def _gate(op: Relu, bounds: Bounds, index: int, first: int, unit_count: int) -> Gate:
    lower, upper = bounds.before_relu[index].lower, bounds.before_relu[index].upper
    unstable = np.flatnonzero((lower < 0) & (upper > 0))
    units = op.units.reshape(-1)
    scored = np.flatnonzero(units != NO_UNIT)
    scatter = sparse.csr_array((np.ones(len(scored)), (scored, units[scored])), shape=(len(units), unit_count))
    return Gate(
        lower=lower,
        upper=upper,
        shrink=np.where(op.units != NO_UNIT, np.maximum(upper, 0.0), 0.0),
        live=(lower >= 0) & (upper > 0),
        unstable=unstable,
        tops=upper.reshape(-1)[unstable],
        first=first,
        units=op.units,
        scatter=scatter,
        scale=float(max(np.abs(lower).max(), np.abs(upper).max())) or 1.0,
    )


def _depends(network: Network) -> list[bool]:
    """Which values depend on the columns: everything behind a ReLU, and ReLUs themselves."""
    depends: list[bool] = []
    for op in network.ops:
        match op:
            case Input():
                depends.append(False)
            case Affine():
                depends.append(depends[op.source])
            case Relu():
                depends.append(True)
            case _:
                assert_never(op)
    return depends


def _evaluate_constants(network: Network, inputs: Floats, depends: list[bool]) -> dict[int, Floats]:
    """The values that depend on no column, as far as a ReLU reads them."""
    values: dict[int, Floats] = {}
    for index, op in enumerate(network.ops):
        if not depends[index]:
            values[index] = inputs if isinstance(op, Input) else op.map.apply(values[op.source])  # type: ignore[union-attr]
    return {op.source: values[op.source] for op in network.ops if isinstance(op, Relu) and op.source in values}


def _add_adjoint(adjoints: dict[int, Floats], index: int, adjoint: Floats) -> None:
    adjoints[index] = adjoints[index] + adjoint if index in adjoints else adjoint


def _explicit_entries(gate: Gate, adjoint: Floats, samples: Ints) -> tuple[Ints, Ints, Floats]:
    """Coefficients on the explicit activations of each row's data point."""
    size = adjoint[0].size
    firsts = np.searchsorted(gate.unstable, samples * size)
    ends = np.searchsorted(gate.unstable, (samples + 1) * size)
    counts = ends - firsts
    rows = np.repeat(np.arange(len(samples)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.repeat(firsts, counts) + within
    positions = gate.unstable[numbers] % size
    return rows, gate.first + numbers, gate.tops[numbers] * adjoint.reshape(len(samples), size)[rows, positions]


def _assemble(scores: Floats, explicit: list[tuple[Ints, Ints, Floats]], width: int) -> sparse.csr_array:
    rows, columns = np.nonzero(scores)
    entries = [(rows, columns, scores[rows, columns]), *explicit]
    all_rows, all_columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return sparse.csr_array((values, (all_rows, all_columns)), shape=(len(scores), width))

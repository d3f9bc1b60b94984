"""Network: a trained model as affine maps, ReLUs, max pools, sums and concatenations, and its units.

Ops are in topological order. Values are float64 arrays with a leading batch axis. Value `i` is the output of
`ops[i]`; `ops[0]` is the input and the last op computes the logits. For a span of a model these are the input of its
first and the output of its last module.

Units are those of the structure: unit `u` has score `u` in every program, `NO_UNIT` marks channels without a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, assert_never

import numpy as np

from critical_neurons.core.span import WHOLE, Span
from critical_neurons.core.structure import Fingerprint, Floats, Ints, Layer, Structure

Shape: TypeAlias = tuple[int, ...]

NO_POSITION = -1


class LinearMap(Protocol):
    """x -> A x + b, on arrays with a leading batch axis. A is never written out."""

    def apply(self, values: Floats) -> Floats:
        """A x + b."""

    def apply_linear(self, values: Floats) -> Floats:
        """A x."""

    def apply_absolute(self, values: Floats) -> Floats:
        """|A| x."""

    def adjoint(self, values: Floats) -> Floats:
        """A' y."""


@dataclass(frozen=True)
class Input:
    shape: Shape

    @property
    def sources(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class _OneSource:
    name: str
    source: int
    shape: Shape

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Affine(_OneSource):
    """`keeps_channels`: every output channel comes from the input channel of the same unit alone."""

    map: LinearMap
    keeps_channels: bool = False


@dataclass(frozen=True)
class Relu(_OneSource):
    """`units` broadcasts against `shape`: the unit behind every element, or `NO_UNIT`."""

    units: Ints


@dataclass(frozen=True)
class MaxPool(_OneSource):
    """`windows` (positions out, size): the flat input positions of every window, `NO_POSITION` where it is padded."""

    windows: Ints


@dataclass(frozen=True)
class Sum:
    """With a `ceiling` c: p clipped to [0, c], as max(0, p) - max(0, p - c); the first source is max(0, p)."""

    name: str
    sources: tuple[int, ...]
    shape: Shape
    ceiling: float | None = None


@dataclass(frozen=True)
class Concat:
    """Concatenation along the channels."""

    name: str
    sources: tuple[int, ...]
    shape: Shape


Op: TypeAlias = Input | Affine | Relu | MaxPool | Sum | Concat


@dataclass(frozen=True, repr=False, eq=False)
class Network:
    """A model as a list of ops. `structure` has the scored units; for a span only those inside it, and its costs.

    >>> network = cn.read_network(model, inputs)
    >>> [type(op).__name__ for op in network.ops]
    ['Input', 'Affine', 'Relu', 'Affine', 'Affine', 'Relu', 'Affine']
    >>> network.forward(inputs[:2].double().numpy()).shape
    (2, 3)
    """

    ops: tuple[Op, ...]
    structure: Structure
    notes: tuple[str, ...] = ()
    span: Span = WHOLE

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.structure.layers

    @property
    def removable(self) -> tuple[Layer, ...]:
        return self.structure.removable

    @property
    def group_sizes(self) -> tuple[int, ...]:
        return self.structure.group_sizes

    @property
    def fingerprint(self) -> Fingerprint:
        return self.structure.fingerprint

    @property
    def unit_count(self) -> int:
        return self.structure.unit_count

    @cached_property
    def kernels(self) -> tuple[int, ...]:
        """Height times width of every group's kernel; the largest, if layers share units.

        A linear layer has 1, and so has a convolution with a single output position, which is equivalent to one.
        """
        of_unit = np.ones(self.unit_count + 1, dtype=np.int64)  # the last entry stands for NO_UNIT
        for wiring in self.structure.wirings:
            np.maximum.at(of_unit, wiring.outputs, wiring.kernel if wiring.positions > 1 else 1)
        return tuple(int(part.max()) for part in np.split(of_unit[:-1], np.cumsum(self.group_sizes)[:-1]))

    @property
    def input_shape(self) -> Shape:
        return self.ops[0].shape

    @property
    def class_count(self) -> int:
        """For a network that ends with logits, not for a span that stops before them."""
        return self.ops[-1].shape[0]

    def __repr__(self) -> str:
        return f"Network({len(self.layers)} layers, {self.unit_count} scored units)"

    def __str__(self) -> str:
        return "\n".join([str(self.structure), *self.notes])

    def forward(self, inputs: Floats) -> Floats:
        """The logits, or the output of the span."""
        return self.evaluate(inputs)[-1]

    def evaluate(
        self, inputs: Floats, kept: Floats | None = None, known: Mapping[int, Floats] | None = None
    ) -> list[Floats]:
        """Every value of the network.

        `kept` (units) or (batch, units): factors of every unit's activations. `known`: values by index that need not
        be computed.
        """
        given = known or {}
        shares = np.ones(self.unit_count) if kept is None else kept
        factors = np.concatenate([shares, np.ones((*shares.shape[:-1], 1))], axis=-1)  # the last is that of NO_UNIT
        values: list[Floats] = []
        for index, op in enumerate(self.ops):
            if index in given:
                values.append(given[index])
                continue
            match op:
                case Input():
                    values.append(inputs)
                case Affine():
                    values.append(op.map.apply(values[op.source]))
                case Relu():
                    activation = rectify(values[op.source])
                    values.append(activation if kept is None else activation * factors[..., op.units])
                case MaxPool():
                    values.append(pool_maximum(op, values[op.source]))
                case Sum():
                    values.append(add_up(*(values[source] for source in op.sources)))
                case Concat():
                    values.append(join_channels(*(values[source] for source in op.sources)))
                case _:
                    assert_never(op)
        return values


def pull_linear(ops: Sequence[Op], op: Affine | Sum | Concat, adjoint: Floats) -> list[tuple[int, Floats]]:
    """adjoint · value as a sum over the sources of the value: their indices and coefficients."""
    match op:
        case Affine():
            return [(op.source, op.map.adjoint(adjoint))]
        case Sum():
            return [(source, adjoint) for source in op.sources]
        case Concat():
            ends = np.cumsum([ops[source].shape[0] for source in op.sources])
            return list(zip(op.sources, np.split(adjoint, ends[:-1], axis=1), strict=True))
        case _:
            assert_never(op)


def rectify(values: Floats) -> Floats:
    return np.maximum(values, 0.0)


def add_up(first: Floats, *others: Floats) -> Floats:
    total = first
    for value in others:
        total = total + value
    return total


def join_channels(*values: Floats) -> Floats:
    return np.concatenate(values, axis=1)


def spread_windows(op: MaxPool, values: Floats, padding: float = -np.inf) -> Floats:
    """The elements of every window: (batch, channels, output positions, window size), `padding` where padded."""
    flat = values.reshape(*values.shape[:2], -1)
    padded = np.concatenate([flat, np.full((*flat.shape[:2], 1), padding)], axis=2)
    spread: Floats = padded[:, :, op.windows]
    return spread


def pool_maximum(op: MaxPool, values: Floats) -> Floats:
    highest: Floats = spread_windows(op, values).max(axis=3)
    return highest.reshape(len(values), *op.shape)

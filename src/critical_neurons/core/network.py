"""Network: a trained model as affine maps, ReLUs, max pools, sums and concatenations, and its units.

Ops stand in topological order. Values are float64 arrays with a leading batch axis. Value `i` is the output of
`ops[i]`; `ops[0]` is the input, the last op gives the logits. Of a span of a model, `ops[0]` is what its first module
reads, and the last op gives its output.

A *unit* is a neuron of a linear layer or a feature map of a convolution, or several that meet in an addition and
so live or die together. The units of the scored layers are numbered through: unit `u` owns score `u` of every
program. `NO_UNIT` stands for everything without a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from critical_neurons.core.span import WHOLE, Span

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Shape: TypeAlias = tuple[int, ...]

NO_UNIT = -1
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
class Affine:
    """`keeps_channels`: every output channel comes from the input channel of the same unit alone."""

    name: str
    source: int
    shape: Shape
    map: LinearMap
    keeps_channels: bool = False

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Relu:
    """`units` broadcasts against `shape`: the unit behind every element, or `NO_UNIT`."""

    name: str
    source: int
    shape: Shape
    units: Ints

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(frozen=True)
class MaxPool:
    """`windows` (positions out, size): the flat input positions of every window, `NO_POSITION` where it is padded."""

    name: str
    source: int
    shape: Shape
    windows: Ints

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Sum:
    """With a `ceiling` c: p clipped to [0, c], as max(0, p) - max(0, p - c); the first source is max(0, p)."""

    name: str
    sources: tuple[int, ...]
    shape: Shape
    ceiling: float | None = None


@dataclass(frozen=True)
class Concat:
    """Along the channels."""

    name: str
    sources: tuple[int, ...]
    shape: Shape


Op: TypeAlias = Input | Affine | Relu | MaxPool | Sum | Concat


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or convolution and the units behind its output channels.

    Scored when it has no `reason` to be left alone. Layers that meet in an addition share units. Its channels fall
    into `blocks` equal blocks that must lose as many units each (grouped convolutions).
    """

    name: str
    kind: str
    units: Ints
    reason: str = ""
    blocks: int = 1

    @property
    def scored(self) -> bool:
        return not self.reason

    @property
    def size(self) -> int:
        return len(self.units)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**vars(self), "units": self.units.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layer:
        return cls(**{**data, "units": np.array(data["units"], dtype=np.int64)})


@dataclass(frozen=True, eq=False)
class Wiring:
    """The unit behind every input and output channel of a module: what removal has to slice.

    An input channel is `shifted` behind a batch norm or an added constant that stands behind a ReLU: once its unit is
    removed it still carries its one of the `constants`, which has to be added to the module's bias.

    A pair of an input and an output channel in the same one of `groups` has `kernel` weights, each used at
    `positions` places; an output channel has `extras` parameters of its own.
    """

    module: str
    inputs: Ints
    outputs: Ints
    shifted: Bools
    constants: Floats
    kernel: int = 0
    positions: int = 1
    groups: int = 1
    extras: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            **vars(self),
            "inputs": self.inputs.tolist(),
            "outputs": self.outputs.tolist(),
            "shifted": self.shifted.tolist(),
            "constants": self.constants.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Wiring:
        return cls(
            **{
                **data,
                "inputs": np.array(data["inputs"], dtype=np.int64),
                "outputs": np.array(data["outputs"], dtype=np.int64),
                "shifted": np.array(data["shifted"], dtype=bool),
                "constants": np.array(data["constants"], dtype=np.float64),
            }
        )


@dataclass(frozen=True, eq=False)
class Hold:
    """A module whose output channels, set to zero, hold the activations of their units at zero."""

    module: str
    units: Ints

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"module": self.module, "units": self.units.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Hold:
        return cls(data["module"], np.array(data["units"], dtype=np.int64))


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a model: of its parameter names and shapes, and of their values."""

    architecture: str
    weights: str


@dataclass(frozen=True, repr=False, eq=False)
class Network:
    """`groups` are the sizes of the sets of units that share scores: a layer by itself, or layers that meet in an
    addition. The units of a group are numbered one after the other, group by group."""

    ops: tuple[Op, ...]
    layers: tuple[Layer, ...]
    groups: tuple[int, ...]
    wirings: tuple[Wiring, ...]
    holds: tuple[Hold, ...]
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()
    span: Span = WHOLE

    @cached_property
    def scored(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.scored)

    @property
    def unit_count(self) -> int:
        return sum(self.groups)

    @cached_property
    def kernels(self) -> tuple[int, ...]:
        """Height times width of every group's kernel; of layers that share units the largest.

        A linear layer has 1, and so has a convolution with a single output position: it is a linear layer.
        """
        of_unit = np.ones(self.unit_count + 1, dtype=np.int64)  # the last entry answers for NO_UNIT
        for wiring in self.wirings:
            np.maximum.at(of_unit, wiring.outputs, wiring.kernel if wiring.positions > 1 else 1)
        return tuple(int(part.max()) for part in np.split(of_unit[:-1], np.cumsum(self.groups)[:-1]))

    @property
    def input_shape(self) -> Shape:
        return self.ops[0].shape

    @property
    def class_count(self) -> int:
        """Of a network that ends with logits, not of a span that stops before them."""
        return self.ops[-1].shape[0]

    def __repr__(self) -> str:
        return f"Network({len(self.layers)} layers, {self.unit_count} scored units)"

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.kind:<8} {layer.size:>5} units  {self.describe(layer)}"
            for layer in self.layers
        ]
        return "\n".join([*lines, *self.notes])

    def describe(self, layer: Layer) -> str:
        """Whether the layer is scored, and with which others, or why not."""
        if not layer.scored:
            return layer.reason
        others = [
            other.name for other in self.scored if other is not layer and np.isin(other.units, layer.units).any()
        ]
        return f"scored together with {', '.join(others)}" if others else "scored"

    def forward(self, inputs: Floats) -> Floats:
        """The logits, or the output of the span."""
        return self.evaluate(inputs)[-1]

    def evaluate(
        self, inputs: Floats, kept: Floats | None = None, known: Mapping[int, Floats] | None = None
    ) -> list[Floats]:
        """Every value of the network.

        `kept` (units) or (batch, units): with the activations of every unit times this. `known`: values that need not
        be computed, by index.
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
    """Every window side by side: (batch, channels, positions out, size), `padding` where a window is padded."""
    flat = values.reshape(*values.shape[:2], -1)
    padded = np.concatenate([flat, np.full((*flat.shape[:2], 1), padding)], axis=2)
    spread: Floats = padded[:, :, op.windows]
    return spread


def pool_maximum(op: MaxPool, values: Floats) -> Floats:
    highest: Floats = spread_windows(op, values).max(axis=3)
    return highest.reshape(len(values), *op.shape)

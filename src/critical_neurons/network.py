"""Network: a trained model as affine maps and ReLUs in topological order, with its units.

Values are float64 arrays with a leading batch axis. Value `i` is the output of `ops[i]`; `ops[0]` is the
input, the last op gives the logits.

A *unit* is a neuron of a linear layer or a feature map of a convolution. The units of the scored layers are
numbered through: unit `u` owns score `u` of every program. `NO_UNIT` stands for everything without a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Shape: TypeAlias = tuple[int, ...]

NO_UNIT = -1


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


@dataclass(frozen=True)
class Affine:
    name: str
    source: int
    shape: Shape
    map: LinearMap


@dataclass(frozen=True)
class Relu:
    """`units` broadcasts against `shape`: the unit behind every element, or `NO_UNIT`."""

    name: str
    source: int
    shape: Shape
    units: Ints


Op: TypeAlias = Input | Affine | Relu


@dataclass(frozen=True)
class Layer:
    """A linear layer or convolution. Scored when it has no `reason` to be left alone.

    `held_at` names the module whose output, set to zero, holds the activations of a unit at zero.
    """

    name: str
    kind: str
    size: int
    reason: str = ""
    held_at: str = ""

    @property
    def scored(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Wiring:
    """The unit behind every input and output channel of a module: what removal has to slice."""

    module: str
    inputs: Ints
    outputs: Ints


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a model: of its parameter names and shapes, and of their values."""

    architecture: str
    weights: str


@dataclass(frozen=True, repr=False)
class Network:
    ops: tuple[Op, ...]
    layers: tuple[Layer, ...]
    wirings: tuple[Wiring, ...]
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()

    @cached_property
    def scored(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.scored)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Units of every scored layer."""
        return tuple(layer.size for layer in self.scored)

    @property
    def unit_count(self) -> int:
        return sum(self.sizes)

    @property
    def input_shape(self) -> Shape:
        return self.ops[0].shape

    @property
    def class_count(self) -> int:
        return self.ops[-1].shape[0]

    def __repr__(self) -> str:
        return f"Network({len(self.layers)} layers, {self.unit_count} scored units)"

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.kind:<8} {layer.size:>5} units  {layer.reason or 'scored'}"
            for layer in self.layers
        ]
        return "\n".join([*lines, *self.notes])

    def split(self, per_unit: Floats) -> dict[str, Floats]:
        """One array for all units -> one array per scored layer."""
        parts = np.split(per_unit, np.cumsum(self.sizes)[:-1])
        return {layer.name: part.copy() for layer, part in zip(self.scored, parts, strict=True)}

    def join(self, per_layer: Mapping[str, NDArray[np.generic]]) -> NDArray[np.generic]:
        """One array per scored layer -> one array for all units."""
        return np.concatenate([per_layer[layer.name] for layer in self.scored])

    def forward(self, inputs: Floats) -> Floats:
        """The logits."""
        return self.evaluate(inputs)[-1]

    def evaluate(self, inputs: Floats) -> Sequence[Floats]:
        """Every value of the network."""
        values: list[Floats] = []
        for op in self.ops:
            match op:
                case Input():
                    values.append(inputs)
                case Affine():
                    values.append(op.map.apply(values[op.source]))
                case Relu():
                    values.append(np.maximum(values[op.source], 0.0))
                case _:
                    assert_never(op)
        return values

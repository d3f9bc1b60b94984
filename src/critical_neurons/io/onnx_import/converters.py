"""Converters: the registry of ONNX operators, `@converts`, and what a converter receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from critical_neurons.errors import ConversionError
from critical_neurons.io.onnx_import.builder import Builder, Size, find_number, find_shape
from critical_neurons.io.onnx_import.onnx_file import OnnxGraph, OnnxNode


@dataclass(frozen=True)
class Sizes:
    """Integers computed from shapes, some of them known only when the network runs."""

    entries: NDArray[np.object_]


Value: TypeAlias = "Tensor | fx.Node | Sizes"
"""A constant, the result of a call, or sizes."""


@dataclass(frozen=True)
class GraphStep:
    """The ONNX node being converted."""

    node: OnnxNode
    graph: OnnxGraph
    values: dict[str, Value]
    builder: Builder

    @property
    def opset(self) -> int:
        return self.graph.opset

    def attribute(self, name: str, default: Any = None) -> Any:
        value = self.node.attributes.get(name)
        return default if value is None else value

    def has(self, place: int) -> bool:
        return place < len(self.node.inputs) and self.node.inputs[place] != ""

    def any(self, place: int = 0) -> Value:
        if not self.has(place):
            raise self.refuse(f"has no input {place}", "one")
        return self.values[self.node.inputs[place]]

    def input(self, place: int = 0) -> Tensor | fx.Node:
        value = self.any(place)
        if isinstance(value, Sizes):
            raise self.refuse("calculates with shapes", "in shapes Gather, Slice, Concat and whole numbers")
        return value

    def inputs(self) -> list[Tensor | fx.Node]:
        return [self.input(place) for place in range(len(self.node.inputs))]

    def computed(self, place: int = 0) -> fx.Node:
        """An input that must not be a constant."""
        value = self.input(place)
        if isinstance(value, Tensor):
            raise self.refuse("reads a constant where a layer reads what the network computes", "computed values")
        return value

    def constant(self, place: int) -> Tensor:
        value = self.any(place)
        if not isinstance(value, Tensor):
            raise self.refuse(f"computes its input {place}, {self.node.inputs[place]!r}", "a constant there")
        return value

    def optional(self, place: int) -> Tensor | None:
        return self.constant(place) if self.has(place) else None

    def sizes(self, place: int) -> list[Size]:
        value = self.any(place)
        if isinstance(value, fx.Node):
            raise self.refuse(
                f"computes its input {place}, {self.node.inputs[place]!r}", "constants and shapes there"
            )
        return [*(value.entries if isinstance(value, Sizes) else np.asarray(value)).reshape(-1).tolist()]

    def numbers(self, place: int, attribute: str = "", default: Any = None) -> Any:
        """Integers that older opsets have as an attribute, newer ones as an input."""
        if self.has(place):
            return tuple(find_number(size) for size in self.sizes(place))
        return self.attribute(attribute, default)

    def any_sizes(self) -> bool:
        return any(isinstance(self.values.get(name), Sizes) for name in self.node.inputs)

    def shape(self, place: int = 0) -> tuple[int, ...]:
        return find_shape(self.input(place))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | fx.Node:
        """Call a function that returns one tensor."""
        result: Tensor | fx.Node = self.builder.call(self.node.name, function, *args, **kwargs)
        return result

    def module(self, module: nn.Module, value: fx.Node | None = None) -> fx.Node:
        return self.builder.call_module(self._name(), module, self.computed() if value is None else value)

    def activate(self, module: nn.Module) -> Value:
        """Apply a module without weights; immediately if the input is a constant."""
        value = self.input()
        return self.call(module, value) if isinstance(value, Tensor) else self.module(module, value)

    def refuse(self, found: str, accepted: str) -> ConversionError:
        return ConversionError(f"{self.describe()} {found}. Accepted: {accepted}.")

    def describe(self) -> str:
        return f"{self.graph.path}: {self.node.name} ({self.node.operator})"

    def _name(self) -> str:
        """The module's name from the name of its weight, or else the node's name."""
        names = [name.removesuffix(".weight") for name in self.node.inputs[1:] if name.endswith(".weight")]
        return names[0] if names else self.node.name


Converter: TypeAlias = Callable[[GraphStep], "Value | tuple[Value, ...]"]

CONVERTERS: dict[str, Converter] = {}


def converts(*operators: str) -> Callable[[Converter], Converter]:
    def register(converter: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(operators, converter))
        return converter

    return register


def fill(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Set the tensors of a module that was made on the meta device, which draws no random numbers."""
    for name, values in tensors.items():
        if values is None:
            setattr(module, name, None)
        elif name in module._buffers:
            module._buffers[name] = values.clone()
        else:
            setattr(module, name, nn.Parameter(values.clone().contiguous()))
    if "num_batches_tracked" in module._buffers:
        module._buffers["num_batches_tracked"] = torch.tensor(0)
    return module

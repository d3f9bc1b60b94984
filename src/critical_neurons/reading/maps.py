"""Affine maps in float64: dense matrices in numpy, everything else as a torch function of its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from critical_neurons.network import Floats, Shape


@dataclass(frozen=True)
class DenseMap:
    """A fully connected layer: weight (outputs, inputs), offset (outputs,)."""

    weight: Floats
    offset: Floats

    def apply(self, values: Floats) -> Floats:
        return values @ self.weight.T + self.offset

    def apply_linear(self, values: Floats) -> Floats:
        return values @ self.weight.T

    def apply_absolute(self, values: Floats) -> Floats:
        return values @ np.abs(self.weight).T

    def adjoint(self, values: Floats) -> Floats:
        return values @ self.weight


@dataclass(frozen=True)
class ScaleMap:
    """One factor and one offset per channel (axis 1): batch norm in evaluation mode."""

    scale: Floats
    offset: Floats

    def apply(self, values: Floats) -> Floats:
        return values * _per_channel(self.scale, values) + _per_channel(self.offset, values)

    def apply_linear(self, values: Floats) -> Floats:
        return values * _per_channel(self.scale, values)

    def apply_absolute(self, values: Floats) -> Floats:
        return values * _per_channel(np.abs(self.scale), values)

    def adjoint(self, values: Floats) -> Floats:
        return values * _per_channel(self.scale, values)


@dataclass(frozen=True)
class ReshapeMap:
    """The same elements in another shape."""

    input_shape: Shape
    output_shape: Shape

    def apply(self, values: Floats) -> Floats:
        return values.reshape(len(values), *self.output_shape)

    apply_linear = apply
    apply_absolute = apply

    def adjoint(self, values: Floats) -> Floats:
        return values.reshape(len(values), *self.input_shape)


@dataclass(frozen=True)
class TorchMap:
    """`function(x, weight)`, linear in x, plus an offset per channel: convolution and average pooling."""

    function: Callable[[Tensor, Tensor], Tensor]
    weight: Floats
    offset: Floats
    input_shape: Shape

    def apply(self, values: Floats) -> Floats:
        result = self.apply_linear(values)
        if self.offset.any():
            result += _per_channel(self.offset, result)
        return result

    def apply_linear(self, values: Floats) -> Floats:
        with torch.no_grad():
            return _array(self.function(_tensor(values), _tensor(self.weight)))

    def apply_absolute(self, values: Floats) -> Floats:
        with torch.no_grad():
            return _array(self.function(_tensor(values), _tensor(self.weight).abs()))

    def adjoint(self, values: Floats) -> Floats:
        with torch.enable_grad():
            at = torch.zeros(len(values), *self.input_shape, dtype=torch.float64, requires_grad=True)
            (result,) = torch.autograd.grad(self.function(at, _tensor(self.weight)), at, _tensor(values))
        return _array(result)


def _per_channel(values: Floats, like: Floats) -> Floats:
    return values.reshape(-1, *[1] * (like.ndim - 2))


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _array(values: Tensor) -> Floats:
    result: Floats = values.numpy()
    return result

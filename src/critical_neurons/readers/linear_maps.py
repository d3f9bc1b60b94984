"""Affine maps in float64. Matrix products are numpy's, convolutions torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor

from critical_neurons.core.deadline import check_time
from critical_neurons.core.network import NO_POSITION, Shape
from critical_neurons.core.structure import Floats, Ints


@dataclass(frozen=True)
class DenseMap:
    """A fully connected layer: weight (outputs, inputs), offset (outputs,)."""

    weight: Floats
    offset: Floats

    def apply(self, values: Floats) -> Floats:
        result = self.apply_linear(values)
        result += self.offset  # in place, as in convolutions: a second array of all data points is large
        return result

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

    adjoint = apply_linear

    def apply_absolute(self, values: Floats) -> Floats:
        return values * _per_channel(np.abs(self.scale), values)


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


@dataclass(frozen=True, eq=False)
class GatherMap:
    """Every output is an input element or zero: `elements` (output shape) are flat indices or `NO_POSITION`."""

    elements: Ints
    input_shape: Shape

    def apply(self, values: Floats) -> Floats:
        gathered = np.take(values.reshape(len(values), -1), self.elements, axis=1)
        return np.where(self.elements == NO_POSITION, 0.0, gathered)

    apply_linear = apply
    apply_absolute = apply

    def adjoint(self, values: Floats) -> Floats:
        """Sums over all outputs that read an element."""
        result: Floats = values.reshape(len(values), -1) @ self._matrix
        return result.reshape(len(values), *self.input_shape)

    @cached_property
    def _matrix(self) -> sparse.csr_array:
        read = np.flatnonzero(self.elements != NO_POSITION)
        entries = (np.ones(len(read)), (read, self.elements.reshape(-1)[read]))
        return sparse.csr_array(entries, shape=(self.elements.size, math.prod(self.input_shape)))


AT_ONCE = 64
"""Data points convolved at once: torch unfolds the windows of all of them in float64."""


@dataclass(frozen=True)
class ConvolutionMap:
    """A 1- or 2-dimensional convolution with zero padding: weight (outputs, inputs / groups, *kernel).

    `before` and `after` are the zeros added at the two ends of each spatial axis.
    """

    weight: Tensor
    offset: Floats
    stride: Shape
    before: Shape
    after: Shape
    dilation: Shape
    groups: int
    input_shape: Shape

    def apply(self, values: Floats) -> Floats:
        result = self.apply_linear(values)
        if self.offset.any():
            result += _per_channel(self.offset, result)
        return result

    def apply_linear(self, values: Floats) -> Floats:
        return self._convolve(values, self.weight)

    def apply_absolute(self, values: Floats) -> Floats:
        return self._convolve(values, self.weight.abs())

    def adjoint(self, values: Floats) -> Floats:
        """The transposed convolution, cropped by the padding."""
        check_time()
        padded = [
            size + before + after
            for size, before, after in zip(self.input_shape[1:], self.before, self.after, strict=True)
        ]
        reached = [
            (size - 1) * stride + dilation * (kernel - 1) + 1
            for size, stride, dilation, kernel in zip(
                values.shape[2:], self.stride, self.dilation, self.weight.shape[2:], strict=True
            )
        ]
        unread = tuple(whole - part for whole, part in zip(padded, reached, strict=True))
        transposed = (F.conv_transpose1d, F.conv_transpose2d)[len(self.stride) - 1]
        result = transposed(_tensor(values), self.weight, None, self.stride, 0, unread, self.groups, self.dilation)
        for axis, (before, size) in enumerate(zip(self.before, self.input_shape[1:], strict=True), start=2):
            result = result.narrow(axis, before, size)
        return result.numpy()

    def _convolve(self, values: Floats, weight: Tensor) -> Floats:
        check_time()
        padding, given = self.before, _tensor(values)
        if self.before != self.after:
            ends = [end for pair in zip(self.before, self.after, strict=True) for end in reversed(pair)]
            padding, given = (0,) * len(self.before), F.pad(given, ends[::-1])
        convolve = (F.conv1d, F.conv2d)[len(self.stride) - 1]
        options = (self.stride, padding, self.dilation, self.groups)
        first, *others = torch.split(given, AT_ONCE)
        result = convolve(first, weight, None, *options)
        if others:
            start, result = result, result.new_empty((len(given), *result.shape[1:]))
            result[:AT_ONCE] = start
        for number, part in enumerate(others, start=1):
            result[number * AT_ONCE : number * AT_ONCE + len(part)] = convolve(part, weight, None, *options)
        return result.numpy()


@dataclass(frozen=True)
class TransposedConvolutionMap:
    """A 1- or 2-dimensional transposed convolution: weight (inputs, outputs / groups, *kernel).

    Without its offset it is the adjoint of a convolution with the same weight.
    """

    weight: Tensor
    offset: Floats
    stride: Shape
    padding: Shape
    output_padding: Shape
    dilation: Shape
    groups: int

    def apply(self, values: Floats) -> Floats:
        result = self.apply_linear(values)
        return result + _per_channel(self.offset, result)

    def apply_linear(self, values: Floats) -> Floats:
        return self._transpose(values, self.weight)

    def apply_absolute(self, values: Floats) -> Floats:
        return self._transpose(values, self.weight.abs())

    def adjoint(self, values: Floats) -> Floats:
        convolve = (F.conv1d, F.conv2d)[len(self.stride) - 1]
        options = (self.stride, self.padding, self.dilation, self.groups)
        return convolve(_tensor(values), self.weight, None, *options).numpy()

    def _transpose(self, values: Floats, weight: Tensor) -> Floats:
        transposed = (F.conv_transpose1d, F.conv_transpose2d)[len(self.stride) - 1]
        options = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return transposed(_tensor(values), weight, None, *options).numpy()


@dataclass(frozen=True)
class PositionsMap:
    """One nonnegative matrix (outputs, inputs) per spatial axis, applied to every channel: average pooling."""

    matrices: tuple[Floats, ...]
    input_shape: Shape
    output_shape: Shape

    def apply(self, values: Floats) -> Floats:
        return self._multiply(values, self.matrices).reshape(len(values), *self.output_shape)

    apply_linear = apply
    apply_absolute = apply

    def adjoint(self, values: Floats) -> Floats:
        sizes = [matrix.shape[0] for matrix in self.matrices]
        shaped = values.reshape(len(values), self.input_shape[0], *sizes)
        return self._multiply(shaped, tuple(matrix.T for matrix in self.matrices))

    @staticmethod
    def _multiply(values: Floats, matrices: tuple[Floats, ...]) -> Floats:
        for axis, matrix in enumerate(matrices, start=2):
            values = np.moveaxis(np.moveaxis(values, axis, -1) @ matrix.T, -1, axis)
        return values


@dataclass(frozen=True)
class MeanMap:
    """The mean over `axes`, counted with the batch as the first."""

    axes: Shape
    input_shape: Shape
    output_shape: Shape

    def apply(self, values: Floats) -> Floats:
        means: Floats = values.mean(axis=self.axes)
        return means.reshape(len(values), *self.output_shape)

    apply_linear = apply
    apply_absolute = apply

    def adjoint(self, values: Floats) -> Floats:
        kept = [1 if axis in self.axes else size for axis, size in enumerate(self.input_shape, start=1)]
        count = math.prod(self.input_shape) // math.prod(kept)
        spread = np.broadcast_to(values.reshape(len(values), *kept), (len(values), *self.input_shape))
        return spread / count


def separate_pooling(pool: Callable[[Tensor], Tensor], shape: Shape) -> tuple[Floats, ...]:
    """The matrices of a pooling that is the same on every channel and separates by axis.

    P = R x C is read off the images of e_i x 1 and 1 x e_j, which are R e_i x C 1 and R 1 x C e_j.
    """
    if len(shape) == 1:
        return (_run(pool, np.eye(shape[0])).T,)
    height, width = shape
    rows = _run(pool, np.repeat(np.eye(height)[:, :, None], width, axis=2))
    columns = _run(pool, np.repeat(np.eye(width)[:, None, :], height, axis=1))
    total = rows.sum(axis=0)
    at = np.unravel_index(np.argmax(total), total.shape)
    return rows[:, :, at[1]].T, columns[:, at[0], :].T / total[at]


def _run(pool: Callable[[Tensor], Tensor], images: Floats) -> Floats:
    with torch.no_grad():
        result: Floats = pool(torch.from_numpy(images)[:, None])[:, 0].numpy()
    return result


def _per_channel(values: Floats, like: Floats) -> Floats:
    return values.reshape(-1, *[1] * (like.ndim - 2))


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))

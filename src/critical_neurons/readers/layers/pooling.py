"""The built-in readers of pooling, upsampling and zero padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critical_neurons.core.network import NO_POSITION, Shape
from critical_neurons.core.structure import Ints
from critical_neurons.readers.layers.rearranging import find_elements, run_again
from critical_neurons.readers.linear_maps import MeanMap, PositionsMap, separate_pooling
from critical_neurons.readers.registry import (
    KeepsChannels,
    Passes,
    PoolsMaximum,
    Reading,
    Rearranges,
    TracedCall,
    reads,
)

INTERPOLATIONS = ("nearest", "nearest-exact", "linear", "bilinear", "area")
"""Modes of upsampling that take weighted averages along one axis after the other."""


@reads(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
@reads(F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)
def read_average_pool(call: TracedCall) -> Reading:
    return _pooling(call, lambda values: run_again(call, values))


@reads(torch.mean, "mean")
def read_mean(call: TracedCall) -> Reading:
    axes, ndim = call.argument(1, "dim"), call.input.ndim
    chosen = {axis % ndim for axis in _as_tuple(axes)} if axes is not None else {0}
    if 0 in chosen or len(chosen) == ndim - 1:
        raise call.refuse(f"a mean over the axes {axes}", "Only a mean over positions is read, not over all of them.")
    if 1 not in chosen:
        return _pooling(call, lambda values: values.mean(axes, keepdim=True))
    last = max(set(range(1, ndim)) - chosen)  # channels are behind the positions, as in (batch, positions, channels)
    after = last - 1 if call.output.ndim == ndim else last - 1 - sum(axis < last for axis in chosen)
    mean = MeanMap(tuple(sorted(chosen)), call.input_shape, call.output_shape)
    return KeepsChannels(mean, keeps_constants=True, axes=(last - 1, after))


@reads(nn.MaxPool1d, nn.MaxPool2d, F.max_pool1d, F.max_pool2d, torch.max_pool1d, torch.max_pool2d)
def read_max_pool(call: TracedCall) -> Reading:
    """The positions of each window, axis by axis; the number of windows comes from the output."""
    sizes, kernel = call.input_shape[1:], call.setting(1, "kernel_size")
    stride = call.setting(2, "stride") or kernel
    padding, dilation = call.setting(3, "padding", 0), call.setting(4, "dilation", 1)
    axes = [
        _windows(size, count, *options)
        for size, count, *options in zip(
            sizes,
            call.output_shape[1:],
            *(_per_axis(value, len(sizes)) for value in (kernel, stride, padding, dilation)),
            strict=True,
        )
    ]
    return _cross(axes, sizes)


@reads(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, F.adaptive_max_pool1d, F.adaptive_max_pool2d)
def read_adaptive_max_pool(call: TracedCall) -> Reading:
    return _adaptive_max_pooling(call, call.output_shape[1:])


@reads(torch.amax, "amax")
def read_maximum(call: TracedCall) -> Reading:
    axes, ndim = call.argument(1, "dim"), call.input.ndim
    if axes is None or not _spatial(axes, ndim):
        raise call.refuse(f"a maximum over the axes {axes}", "Only one over positions (axes 2 and 3) is read.")
    gone = {axis % ndim for axis in _as_tuple(axes)}
    return _adaptive_max_pooling(
        call, tuple(1 if axis in gone else size for axis, size in enumerate(call.input_shape[1:], start=2))
    )


@reads(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample)
def read_upsampling(call: TracedCall) -> Reading:
    mode = call.setting(3, "mode", "nearest")
    if mode not in INTERPOLATIONS or call.input.ndim > 4:
        raise call.refuse(
            f"upsampling of {call.input.ndim - 2} axes in the mode {mode!r}",
            f"One or two axes are read, in the modes {', '.join(INTERPOLATIONS)}.",
        )
    return _pooling(call, lambda values: run_again(call, values))


@reads(nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d)
def read_padding(call: TracedCall) -> Reading:
    module = call.module
    assert isinstance(module, nn.ConstantPad1d | nn.ConstantPad2d)
    return _padding(call, module.padding, "constant", module.value)


@reads(F.pad)
def read_functional_padding(call: TracedCall) -> Reading:
    return _padding(call, call.argument(1, "pad"), call.argument(2, "mode", "constant"), call.argument(3, "value"))


def _pooling(call: TracedCall, pool: Callable[[Tensor], Tensor]) -> Reading:
    matrices = separate_pooling(pool, call.input_shape[1:])
    keeps_constants = all(np.allclose(matrix.sum(axis=1), matrix.sum(axis=1)[0]) for matrix in matrices)
    whole = float(np.prod([matrix.sum(axis=1)[0] for matrix in matrices]))
    return KeepsChannels(
        PositionsMap(matrices, call.input_shape, call.output_shape),
        keeps_constants=keeps_constants and math.isclose(whole, 1.0, rel_tol=1e-9),
    )


def _padding(call: TracedCall, widths: Sequence[int], mode: str, value: float | None) -> Reading:
    """`widths` as F.pad takes them: two for every axis, the last axis first."""
    positions = 2 * (call.input.ndim - 2)
    around, beside = widths[:positions], widths[positions : positions + 2]
    if mode != "constant" or value not in (None, 0) or any(widths[positions + 2 :]) or (any(around) and any(beside)):
        raise call.refuse(
            f"padding by {tuple(widths)} in the mode {mode!r} with the value {value or 0}",
            "One with zeros is read, around positions (axes 2 and 3) or beside channels (axis 1), not both at once.",
        )
    if any(beside):
        return Rearranges(find_elements(call))
    return _pooling(call, lambda values: F.pad(values, around)) if any(around) else Passes()


def _adaptive_max_pooling(call: TracedCall, counts: Shape) -> Reading:
    """Window i of n reaches from floor(i size / n) to ceil((i + 1) size / n)."""
    sizes = call.input_shape[1:]
    axes = []
    for size, count in zip(sizes, counts, strict=True):
        first = np.arange(count) * size // count
        last = -(-(np.arange(count) + 1) * size // count)
        positions = first[:, None] + np.arange((last - first).max())
        axes.append(np.where(positions < last[:, None], positions, NO_POSITION))
    return _cross(axes, sizes)


def _cross(axes: Sequence[Ints], sizes: Shape) -> Reading:
    """Windows of one or two axes, by flat positions."""
    if len(axes) == 1:
        return PoolsMaximum(axes[0])
    rows, columns = axes[0][:, None, :, None], axes[1][None, :, None, :]
    inside = (rows != NO_POSITION) & (columns != NO_POSITION)
    flat = np.where(inside, rows * sizes[1] + columns, NO_POSITION)
    return PoolsMaximum(flat.reshape(len(axes[0]) * len(axes[1]), -1))


def _windows(size: int, count: int, kernel: int, stride: int, padding: int, dilation: int) -> Ints:
    positions = (np.arange(count) * stride - padding)[:, None] + dilation * np.arange(kernel)
    return np.where((positions >= 0) & (positions < size), positions, NO_POSITION)


def _per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


def _spatial(axes: int | tuple[int, ...], ndim: int) -> bool:
    chosen = _as_tuple(axes)
    return len(chosen) > 0 and all(axis % ndim >= 2 for axis in chosen)


def _as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)

"""The built-in readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critical_neurons.network import NO_POSITION, Floats, Ints, Shape
from critical_neurons.reading.maps import (
    ConvolutionMap,
    DenseMap,
    PositionsMap,
    separate_pooling,
)
from critical_neurons.reading.registry import (
    SINGLE_ADVICE,
    Call,
    Concatenates,
    Ends,
    Filters,
    KeepsChannels,
    Mixes,
    Passes,
    PoolsMaximum,
    Reading,
    Rectifies,
    Reshapes,
    Scales,
    reads,
)


@reads(nn.Linear)
def read_linear(call: Call) -> Reading:
    module = _module(call, nn.Linear)
    if len(call.input_shape) != 1:
        raise call.refuse(
            f"a linear layer on inputs of shape {_batched(call.input_shape)}",
            "Linear layers are read on (batch, features). Flatten before it.",
        )
    return Mixes(DenseMap(_array(module.weight), _offset(module.bias, module.out_features)))


@reads(nn.Conv1d, nn.Conv2d)
def read_convolution(call: Call) -> Reading:
    module = _module(call, nn.Conv1d, nn.Conv2d)
    if module.padding_mode != "zeros":
        raise call.refuse(f"padding_mode={module.padding_mode!r}", "Convolutions are read with padding_mode='zeros'.")
    before, after = _paddings(module)
    convolution = ConvolutionMap(
        weight=module.weight.detach(),
        offset=_offset(module.bias, module.out_channels),
        stride=module.stride,
        before=before,
        after=after,
        dilation=module.dilation,
        groups=module.groups,
        input_shape=call.input_shape,
    )
    padded = any(before) or any(after)
    if module.groups == module.in_channels > 1:
        return Filters(convolution, padded=padded)
    return Mixes(convolution, groups=module.groups, padded=padded)


@reads(nn.BatchNorm1d, nn.BatchNorm2d)
def read_batch_norm(call: Call) -> Reading:
    module = _module(call, nn.BatchNorm1d, nn.BatchNorm2d)
    if module.running_mean is None or module.running_var is None:
        raise call.refuse(
            "a batch norm without running statistics, which depends on the whole batch",
            "Train it with track_running_stats=True.",
        )
    scale = 1.0 / np.sqrt(_array(module.running_var) + module.eps)
    if module.weight is not None:
        scale = scale * _array(module.weight)
    return Scales(scale, _offset(module.bias, module.num_features) - scale * _array(module.running_mean))


@reads(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def read_average_pool(call: Call) -> Reading:
    return _pooling(call, call.function)


@reads(F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)
def read_functional_average_pool(call: Call) -> Reading:
    return _pooling(call, lambda values: call.function(values, *call.args[1:], **call.kwargs))


@reads(torch.mean, "mean")
def read_mean(call: Call) -> Reading:
    axes = call.argument(1, "dim")
    if axes is None or not _spatial(axes, call.input.ndim):
        raise call.refuse(f"a mean over the axes {axes}", "Only a mean over positions (axes 2 and 3) is read.")
    return _pooling(call, lambda values: values.mean(axes, keepdim=True))


@reads(nn.Flatten, torch.flatten, "flatten", "view", "reshape", torch.reshape)
def read_reshape(call: Call) -> Reading:
    if len(call.output) != len(call.input):
        raise call.refuse(
            f"it turns {tuple(call.input.shape)} into {tuple(call.output.shape)} and so changes the batch axis",
            "Keep the first axis, as x.flatten(1) does.",
        )
    if call.output.ndim == 1:
        raise call.refuse(
            f"it turns {tuple(call.input.shape)} into {tuple(call.output.shape)}",
            f"Logits of shape (batch, classes) are read. {SINGLE_ADVICE}",
        )
    sizes = ", ".join(map(str, call.literal_sizes))
    return Reshapes(f"{call.name}, which has the size {sizes} written into it; write x.flatten(1)" if sizes else "")


@reads(nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_")
def read_relu(call: Call) -> Reading:
    return Rectifies()


@reads(nn.ReLU6, F.relu6)
def read_relu6(call: Call) -> Reading:
    return Rectifies(ceiling=6.0)


@reads(torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clamp_", "clip", "clip_")
def read_clamp(call: Call) -> Reading:
    return _clamp(call, call.argument(1, "min"), call.argument(2, "max"))


@reads(torch.clamp_min, torch.clamp_min_, "clamp_min", "clamp_min_")
def read_clamp_from_below(call: Call) -> Reading:
    return _clamp(call, call.argument(1, "min"), None)


@reads(nn.Hardtanh)
def read_hardtanh(call: Call) -> Reading:
    module = _module(call, nn.Hardtanh)
    return _clamp(call, module.min_val, module.max_val)


@reads(F.hardtanh, F.hardtanh_)
def read_functional_hardtanh(call: Call) -> Reading:
    return _clamp(call, call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0))


@reads(nn.Threshold)
def read_threshold(call: Call) -> Reading:
    module = _module(call, nn.Threshold)
    return _threshold(call, module.threshold, module.value)


@reads(F.threshold, torch.threshold, torch.threshold_)
def read_functional_threshold(call: Call) -> Reading:
    return _threshold(call, call.argument(1, "threshold"), call.argument(2, "value"))


@reads(nn.MaxPool1d, nn.MaxPool2d)
def read_max_pool(call: Call) -> Reading:
    module = _module(call, nn.MaxPool1d, nn.MaxPool2d)
    return _max_pooling(call, module.kernel_size, module.stride, module.padding, module.dilation)


@reads(F.max_pool1d, F.max_pool2d, torch.max_pool1d, torch.max_pool2d)
def read_functional_max_pool(call: Call) -> Reading:
    kernel = call.argument(1, "kernel_size")
    stride = call.argument(2, "stride") or kernel
    return _max_pooling(call, kernel, stride, call.argument(3, "padding", 0), call.argument(4, "dilation", 1))


@reads(torch.cat, torch.concat)
def read_concatenation(call: Call) -> Reading:
    axis = call.argument(1, "dim", 0)
    if axis % call.output.ndim != 1:
        raise call.refuse(f"a concatenation along axis {axis}", "Only one along the channels (axis 1) is read.")
    return Concatenates()


@reads(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity, "contiguous")
def read_identity(call: Call) -> Reading:
    return Passes()


@reads(F.dropout, F.dropout1d, F.dropout2d)
def read_functional_dropout(call: Call) -> Reading:
    if not torch.equal(call.input, call.output):
        raise call.refuse("dropout that stays on in evaluation mode", "Pass training=self.training.")
    return Passes()


@reads(nn.Softmax, nn.LogSoftmax, F.softmax, F.log_softmax, torch.softmax, torch.log_softmax)
@reads("softmax", "log_softmax")
def read_softmax(call: Call) -> Reading:
    axis = call.module.dim if call.module is not None else call.argument(1, "dim")  # None: torch takes axis 1
    if call.input.ndim != 2 or axis not in (None, 1, -1):
        raise call.refuse(f"a softmax over axis {axis} of {call.input.ndim}", "Only one over the classes is read.")
    return Ends(f"{call.name} (softmax) is left out: the program works on the logits before it")


def _clamp(call: Call, lowest: Any, highest: Any) -> Reading:
    upper = math.inf if highest is None else highest
    if not (isinstance(lowest, int | float) and isinstance(upper, int | float) and lowest == 0 < upper):
        raise call.refuse(
            f"a clamp from {lowest} to {highest}",
            "One from the number 0 is read, a ReLU, to a positive number or without an upper end.",
        )
    return Rectifies(ceiling=None if upper == math.inf else float(upper))


def _threshold(call: Call, threshold: Any, value: Any) -> Reading:
    if threshold != 0 or value != 0:
        raise call.refuse(
            f"a threshold {threshold} with the value {value}", "One of 0 with the value 0 is read: a ReLU."
        )
    return Rectifies()


def _pooling(call: Call, pool: Callable[[Tensor], Tensor]) -> Reading:
    matrices = separate_pooling(pool, call.input_shape[1:])
    keeps_constants = all(np.allclose(matrix.sum(axis=1), matrix.sum(axis=1)[0]) for matrix in matrices)
    whole = float(np.prod([matrix.sum(axis=1)[0] for matrix in matrices]))
    return KeepsChannels(
        PositionsMap(matrices, call.input_shape, call.output_shape),
        keeps_constants=keeps_constants and math.isclose(whole, 1.0, rel_tol=1e-9),
    )


def _max_pooling(call: Call, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Reading:
    """The positions each window covers, axis by axis; how many windows there are is read off the output."""
    sizes, counts = call.input_shape[1:], call.output_shape[1:]
    axes = [
        _windows(size, count, *options)
        for size, count, *options in zip(
            sizes,
            counts,
            *(_per_axis(value, len(sizes)) for value in (kernel, stride, padding, dilation)),
            strict=True,
        )
    ]
    if len(axes) == 1:
        return PoolsMaximum(axes[0])
    rows, columns = axes[0][:, None, :, None], axes[1][None, :, None, :]
    inside = (rows != NO_POSITION) & (columns != NO_POSITION)
    flat = np.where(inside, rows * sizes[1] + columns, NO_POSITION)
    return PoolsMaximum(flat.reshape(counts[0] * counts[1], -1))


def _windows(size: int, count: int, kernel: int, stride: int, padding: int, dilation: int) -> Ints:
    positions = (np.arange(count) * stride - padding)[:, None] + dilation * np.arange(kernel)
    return np.where((positions >= 0) & (positions < size), positions, NO_POSITION)


def _per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


def _paddings(module: nn.Conv1d | nn.Conv2d) -> tuple[Shape, Shape]:
    """Zeros before and after each axis. "same" adds the odd one after, as torch does."""
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    padding = (0,) * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
    return padding, padding


def _module(call: Call, *kinds: type[nn.Module]) -> Any:
    assert isinstance(call.module, kinds)
    return call.module


def _array(values: Tensor) -> Floats:
    result: Floats = values.detach().numpy()
    return result


def _offset(bias: Tensor | None, size: int) -> Floats:
    return np.zeros(size) if bias is None else _array(bias)


def _spatial(axes: int | tuple[int, ...], ndim: int) -> bool:
    chosen = (axes,) if isinstance(axes, int) else axes
    return all(axis % ndim >= 2 for axis in chosen)


def _batched(shape: tuple[int, ...]) -> str:
    return f"(batch, {', '.join(map(str, shape))})"

"""The built-in readers of linear layers, convolutions, batch norms, concatenation, dropout and final activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critical_neurons.core.network import Shape
from critical_neurons.core.structure import Floats
from critical_neurons.readers.linear_maps import ConvolutionMap, DenseMap, TransposedConvolutionMap
from critical_neurons.readers.registry import (
    LEFT_OUT,
    Concatenates,
    Ends,
    Filters,
    Mixes,
    Passes,
    Reading,
    Scales,
    TracedCall,
    reads,
)


@reads(nn.Linear)
def read_linear(call: TracedCall) -> Reading:
    module = _module(call, nn.Linear)
    return Mixes(
        DenseMap(_array(module.weight), _offset(module.bias, module.out_features)), axis=len(call.input_shape) - 1
    )


@reads(nn.Conv1d, nn.Conv2d)
def read_convolution(call: TracedCall) -> Reading:
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


@reads(nn.ConvTranspose1d, nn.ConvTranspose2d)
def read_transposed_convolution(call: TracedCall) -> Reading:
    module = _module(call, nn.ConvTranspose1d, nn.ConvTranspose2d)
    if call.kwargs or len(call.args) > 1:
        raise call.refuse("a transposed convolution with an output_size", "Set output_padding instead.")
    transposed = TransposedConvolutionMap(
        weight=module.weight.detach(),
        offset=_offset(module.bias, module.out_channels),
        stride=module.stride,
        padding=module.padding,
        output_padding=module.output_padding,
        dilation=module.dilation,
        groups=module.groups,
    )
    return Mixes(transposed, groups=module.groups, padded=True)  # fewer inputs reach an element at the border


@reads(nn.BatchNorm1d, nn.BatchNorm2d)
def read_batch_norm(call: TracedCall) -> Reading:
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


@reads(torch.cat, torch.concat)
def read_concatenation(call: TracedCall) -> Reading:
    axis = call.argument(1, "dim", 0)
    if axis % call.output.ndim != 1:
        raise call.refuse(f"a concatenation along axis {axis}", "Only one along the channels (axis 1) is read.")
    return Concatenates()


@reads(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity, "contiguous")
def read_identity(call: TracedCall) -> Reading:
    return Passes()


@reads(F.dropout, F.dropout1d, F.dropout2d)
def read_functional_dropout(call: TracedCall) -> Reading:
    if not torch.equal(call.input, call.output):
        raise call.refuse("dropout that stays on in evaluation mode", "Pass training=self.training.")
    return Passes()


@reads(nn.Softmax, nn.LogSoftmax, F.softmax, F.log_softmax, torch.softmax, torch.log_softmax)
@reads("softmax", "log_softmax")
def read_softmax(call: TracedCall) -> Reading:
    axis = call.setting(1, "dim")  # None: torch takes axis 1
    if call.input.ndim != 2 or axis not in (None, 1, -1):
        raise call.refuse(f"a softmax over axis {axis} of {call.input.ndim}", "Only one over the classes is read.")
    return Ends(f"{call.name} (softmax) {LEFT_OUT}")


@reads(nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid", nn.LogSigmoid, F.logsigmoid)
def read_sigmoid(call: TracedCall) -> Reading:
    if call.input[0].numel() != 1:
        raise call.refuse("a sigmoid of other than one output", "Only one of a single output, at the end, is read.")
    return Ends(f"{call.name} (sigmoid) {LEFT_OUT}")


def _paddings(module: nn.Conv1d | nn.Conv2d) -> tuple[Shape, Shape]:
    """Zeros before and after each axis. "same" adds the odd one after, as torch does."""
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    padding = (0,) * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
    return padding, padding


def _module(call: TracedCall, *kinds: type[nn.Module]) -> Any:
    assert isinstance(call.module, kinds)
    return call.module


def _array(values: Tensor) -> Floats:
    result: Floats = values.detach().numpy()
    return result


def _offset(bias: Tensor | None, size: int) -> Floats:
    return np.zeros(size) if bias is None else _array(bias)

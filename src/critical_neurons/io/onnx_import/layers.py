"""Converters of layers with weights: convolutions, linear layers, normalisations."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from critical_neurons.io.onnx_import.converters import GraphStep, Value, converts, fill
from critical_neurons.io.onnx_import.windows import find_window

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
"""By how many axes there are besides batch and channels."""


@converts("Conv")
def convert_convolution(step: GraphStep) -> Value:
    value, weight, bias = step.computed(), step.constant(1), step.optional(2)
    axes = weight.ndim - 2
    if axes not in CONVOLUTIONS:
        raise step.refuse(f"has weights of shape {tuple(weight.shape)}", "one to three axes of positions")
    window = find_window(step, tuple(weight.shape[2:]))
    value, padding = window.pad(step, value, 0.0)
    groups = step.attribute("group", 1)
    module = CONVOLUTIONS[axes](
        weight.shape[1] * groups,
        weight.shape[0],
        window.kernel,
        window.stride,
        padding,
        window.dilation,
        groups,
        bias=bias is not None,
        device="meta",
    )
    return step.module(fill(module, weight=weight, bias=bias), value)


@converts("ConvTranspose")
def convert_transposed_convolution(step: GraphStep) -> Value:
    value, weight, bias = step.computed(), step.constant(1), step.optional(2)
    axes = weight.ndim - 2
    if axes not in TRANSPOSED:
        raise step.refuse(f"has weights of shape {tuple(weight.shape)}", "one to three axes of positions")
    if step.attribute("auto_pad", "NOTSET") != "NOTSET" or step.attribute("output_shape"):
        raise step.refuse("has auto_pad or output_shape", "pads and output_padding")
    window = find_window(step, tuple(weight.shape[2:]))
    groups = step.attribute("group", 1)
    module = TRANSPOSED[axes](
        weight.shape[0],
        weight.shape[1] * groups,
        window.kernel,
        window.stride,
        window.before if window.symmetric else 0,
        step.attribute("output_padding", (0,) * axes),
        groups,
        bias=bias is not None,
        dilation=window.dilation,
        device="meta",
    )
    result = step.module(fill(module, weight=weight, bias=bias), value)
    if window.symmetric:
        return result
    ends = (slice(first, -last or None) for first, last in zip(window.before, window.after, strict=True))
    return step.call(operator.getitem, result, (slice(None), slice(None), *ends))


@converts("Gemm")
def convert_gemm(step: GraphStep) -> Value:
    """alpha A B + beta C."""
    alpha, beta = step.attribute("alpha", 1.0), step.attribute("beta", 1.0)
    weight = step.any(1)
    bias = step.any(2) if step.has(2) else None
    if step.attribute("transA", 0) or not isinstance(weight, Tensor) or isinstance(bias, fx.Node):
        raise step.refuse("transposes its first input, or computes the others", "constants, the first as it is")
    weight = alpha * (weight if step.attribute("transB", 0) else weight.T)
    if bias is not None:
        bias = beta * step.constant(2)
        if bias.numel() not in (1, len(weight)) or (bias.ndim > 1 and bias.shape[-1] != bias.numel()):
            raise step.refuse(f"adds a constant of shape {tuple(bias.shape)}", "one number for every column")
        bias = bias.reshape(-1).expand(len(weight))
    return step.module(_make_linear(weight, bias))


@converts("MatMul")
def convert_product(step: GraphStep) -> Value:
    right = step.any(1)
    if isinstance(step.any(0), fx.Node) and isinstance(right, Tensor) and right.ndim == 2:
        return step.module(_make_linear(right.T, None))
    return step.call(torch.matmul, step.input(0), step.input(1))


def _make_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return fill(module, weight=weight, bias=bias)


@converts("BatchNormalization")
def convert_batch_norm(step: GraphStep) -> Value:
    axes = len(step.shape()) - 2
    if step.attribute("training_mode", 0) or not step.attribute("spatial", 1) or axes not in BATCH_NORMS:
        raise step.refuse("is in training mode, or not one per channel", "batch norms for inference, per channel")
    scale, offset, mean, variance = (step.constant(place) for place in range(1, 5))
    module = BATCH_NORMS[axes](len(scale), eps=step.attribute("epsilon", 1e-5), device="meta")
    return step.module(fill(module, weight=scale, bias=offset, running_mean=mean, running_var=variance))


@converts("InstanceNormalization")
def convert_instance_norm(step: GraphStep) -> Value:
    scale, axes = step.constant(1), len(step.shape()) - 2
    if axes not in INSTANCE_NORMS:
        raise step.refuse(f"reads {axes + 2} axes", "three to five")
    module = INSTANCE_NORMS[axes](len(scale), eps=step.attribute("epsilon", 1e-5), affine=True, device="meta")
    return step.module(fill(module, weight=scale, bias=step.constant(2)))


@converts("LayerNormalization")
def convert_layer_norm(step: GraphStep) -> Value:
    shape = step.shape()
    sizes = shape[step.attribute("axis", -1) % len(shape) :]
    bias = step.optional(2)
    module = nn.LayerNorm(list(sizes), eps=step.attribute("epsilon", 1e-5), bias=bias is not None, device="meta")
    offset = None if bias is None else bias.expand(sizes)
    return step.module(fill(module, weight=step.constant(1).expand(sizes), bias=offset))


@converts("GroupNormalization")
def convert_group_norm(step: GraphStep) -> Value:
    channels, groups = step.shape()[1], step.attribute("num_groups", 1)
    module = nn.GroupNorm(groups, channels, eps=step.attribute("epsilon", 1e-5), device="meta")
    scale, offset = (step.constant(place) for place in (1, 2))
    if step.opset < 21:  # one number per group until then
        scale, offset = (each.repeat_interleave(channels // groups) for each in (scale, offset))
    return step.module(fill(module, weight=scale, bias=offset))


@converts("LRN")
def convert_local_response_norm(step: GraphStep) -> Value:
    return step.module(
        nn.LocalResponseNorm(
            step.attribute("size"),
            step.attribute("alpha", 1e-4),
            step.attribute("beta", 0.75),
            step.attribute("bias", 1.0),
        )
    )

"""Converters of activations, arithmetic and reductions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from critical_neurons.io.onnx_import.builder import find_shape
from critical_neurons.io.onnx_import.converters import GraphStep, Sizes, Value, converts, fill

ACTIVATIONS: dict[str, Callable[[GraphStep], nn.Module]] = {
    "Relu": lambda step: nn.ReLU(),
    "LeakyRelu": lambda step: nn.LeakyReLU(step.attribute("alpha", 0.01)),
    "Sigmoid": lambda step: nn.Sigmoid(),
    "HardSwish": lambda step: nn.Hardswish(),
    "Tanh": lambda step: nn.Tanh(),
    "Elu": lambda step: nn.ELU(step.attribute("alpha", 1.0)),
    "Celu": lambda step: nn.CELU(step.attribute("alpha", 1.0)),
    "Gelu": lambda step: nn.GELU(step.attribute("approximate", "none")),
    "Mish": lambda step: nn.Mish(),
    "Softplus": lambda step: nn.Softplus(),
    "Softsign": lambda step: nn.Softsign(),
    "ThresholdedRelu": lambda step: nn.Threshold(step.attribute("alpha", 1.0), 0.0),
}
UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Log": torch.log,
    "Neg": operator.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sqrt": torch.sqrt,
}
BINARY: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "And": torch.logical_and,
    "Div": operator.truediv,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": operator.mul,
    "Or": torch.logical_or,
    "Pow": torch.pow,
    "Sub": operator.sub,
}
OF_SIZES = {"Add": operator.add, "Div": operator.floordiv, "Mul": operator.mul, "Sub": operator.sub}
VARIADIC: dict[str, Callable[..., Any]] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": operator.add}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceL2": torch.linalg.vector_norm,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceSum": torch.sum,
}


@converts(*ACTIVATIONS)
def convert_activation(step: GraphStep) -> Value:
    return step.activate(ACTIVATIONS[step.node.operator](step))


@converts("Identity", "Dropout")
def convert_nothing(step: GraphStep) -> Value:
    if step.has(2) and bool(step.constant(2)):
        raise step.refuse("is in training mode", "dropout for inference")
    return step.any()


@converts("PRelu")
def convert_parametric_relu(step: GraphStep) -> Value:
    slope, shape = step.constant(1), step.shape()
    sizes = (1,) * (len(shape) - slope.ndim) + tuple(slope.shape)
    if any(size > 1 for axis, size in enumerate(sizes) if axis != 1):
        raise step.refuse(f"has slopes of shape {tuple(slope.shape)}", "one, or one per channel")
    module = nn.PReLU(slope.numel(), device="meta")
    return step.module(fill(module, weight=slope.reshape(-1)))


@converts("Clip")
def convert_clip(step: GraphStep) -> Value:
    lowest = float(step.constant(1)) if step.has(1) else step.attribute("min", -math.inf)
    highest = float(step.constant(2)) if step.has(2) else step.attribute("max", math.inf)
    if lowest == 0 and highest in (6.0, math.inf):
        return step.activate(nn.ReLU6() if highest == 6 else nn.ReLU())
    bounds = {"min": lowest, "max": highest}
    given = {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    return step.call(torch.clamp, step.input(), **given) if given else step.input()


@converts("HardSigmoid")
def convert_hard_sigmoid(step: GraphStep) -> Value:
    slope, offset = step.attribute("alpha", 0.2), step.attribute("beta", 0.5)
    if math.isclose(slope, 1 / 6, rel_tol=1e-6) and offset == 0.5:
        return step.activate(nn.Hardsigmoid())
    line = step.call(operator.add, step.call(operator.mul, step.input(), slope), offset)
    return step.call(torch.clamp, line, min=0.0, max=1.0)


@converts("Selu")
def convert_selu(step: GraphStep) -> Value:
    """gamma times an ELU; torch's SELU has fixed alpha and gamma."""
    alpha, gamma = step.attribute("alpha", 1.6732632), step.attribute("gamma", 1.0507010)
    if math.isclose(alpha, 1.6732632, rel_tol=1e-6) and math.isclose(gamma, 1.0507010, rel_tol=1e-6):
        return step.activate(nn.SELU())
    return step.call(operator.mul, step.activate(nn.ELU(alpha)), gamma)


@converts("Softmax", "LogSoftmax")
def convert_softmax(step: GraphStep) -> Value:
    rank = len(step.shape())
    axis = step.attribute("axis", -1 if step.opset >= 13 else 1) % rank
    if step.opset < 13 and any(size > 1 for size in step.shape()[axis + 1 :]):
        raise step.refuse(f"flattens the axes from {axis} on, as before opset 13", "one over the last axis")
    return step.activate(nn.Softmax(axis) if step.node.operator == "Softmax" else nn.LogSoftmax(axis))


@converts(*UNARY)
def convert_unary(step: GraphStep) -> Value:
    return step.call(UNARY[step.node.operator], step.input())


@converts(*BINARY)
def convert_binary(step: GraphStep) -> Value:
    kind = step.node.operator
    if step.any_sizes() and kind in OF_SIZES:
        function = partial(step.builder.call, step.node.name, OF_SIZES[kind])
        return Sizes(np.frompyfunc(function, 2, 1)(*(as_entries(step, place) for place in (0, 1))))
    first, second = step.input(0), step.input(1)
    if kind == "Add" and (folded := _fold_bias(step, first, second) or _fold_bias(step, second, first)):
        return folded
    whole = all(isinstance(each, Tensor) and not each.is_floating_point() for each in (first, second))
    if kind == "Div" and whole:
        return step.call(torch.div, first, second, rounding_mode="trunc")
    return step.call(BINARY[kind], _as_number(first, second), _as_number(second, first))


def as_entries(step: GraphStep, place: int) -> Any:
    """Sizes as an array of integers and nodes."""
    value = step.any(place)
    if isinstance(value, Sizes):
        return value.entries
    constant = step.constant(place)
    if constant.is_floating_point():
        raise step.refuse("calculates with a shape and fractions", "whole numbers")
    return constant.numpy().astype(object)


def _as_number(value: Tensor | fx.Node, other: Tensor | fx.Node) -> Any:
    """A constant with one element as a number, if that does not change the shape of the result."""
    alone = isinstance(value, Tensor) and value.numel() == 1 and isinstance(other, fx.Node)
    return value.item() if alone and value.ndim <= len(find_shape(other)) else value  # type: ignore[union-attr]


def _fold_bias(step: GraphStep, value: Any, constant: Any) -> fx.Node | None:
    """Make the constant the bias of the layer that computes the value, if the layer has none, nothing else reads it,
    and the constant has one number per unit."""
    if not isinstance(value, fx.Node) or value.op != "call_module" or not isinstance(constant, Tensor):
        return None
    module = step.builder.root.get_submodule(str(value.target))
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or module.bias is not None:
        return None
    shape = find_shape(value)
    axis = len(shape) - 1 if isinstance(module, nn.Linear) else 1
    sizes = (1,) * (len(shape) - constant.ndim) + tuple(constant.shape)
    elsewhere = [size for place, size in enumerate(sizes) if place != axis]
    read = max(step.graph.uses[name] for name in step.node.inputs if step.values[name] is value)
    if read > 1 or value.users or len(sizes) != len(shape) or any(size > 1 for size in elsewhere):
        return None
    module.bias = nn.Parameter(constant.reshape(-1).expand(shape[axis]).to(module.weight.dtype).clone())
    return value


@converts(*VARIADIC)
def convert_variadic(step: GraphStep) -> Value:
    return reduce(partial(step.call, VARIADIC[step.node.operator]), step.inputs())


@converts("Mean")
def convert_mean(step: GraphStep) -> Value:
    values = step.inputs()
    return step.call(operator.truediv, reduce(partial(step.call, operator.add), values), len(values))


@converts("Where")
def convert_choice(step: GraphStep) -> Value:
    return step.call(torch.where, *step.inputs())


@converts(*REDUCTIONS)
def convert_reduction(step: GraphStep) -> Value:
    axes = step.numbers(1, "axes")
    if not axes and step.attribute("noop_with_empty_axes", 0):
        return step.input()
    chosen = [*axes] if axes else [*range(len(step.shape()))]
    keep = bool(step.attribute("keepdims", 1))
    return step.call(REDUCTIONS[step.node.operator], step.input(), dim=chosen, keepdim=keep)


@converts("ReduceProd")
def convert_product_of_sizes(step: GraphStep) -> Value:
    """Only of shapes: the number of elements."""
    if not step.any_sizes():
        raise step.refuse("multiplies values of the network", "sizes")
    product = reduce(partial(step.builder.call, step.node.name, operator.mul), step.sizes(0))
    result = np.empty((1,) if step.attribute("keepdims", 1) else (), dtype=object)
    result[...] = product
    return Sizes(result)

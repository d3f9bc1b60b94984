"""The built-in readers of arithmetic: additions, and calculations with constants."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

from critical_neurons.core.structure import Floats
from critical_neurons.readers.registry import Adds, Reading, Rectifies, Scales, TakesMaximum, TracedCall, reads

CONSTANTS_READ = "A constant is read that is one number, or one per channel: of shape (channels, 1, 1) for images."


@reads(operator.add, operator.iadd, torch.add, "add", "add_")
def read_addition(call: TracedCall) -> Reading:
    if len(call.inputs) == 1:
        return _scale(call, 1.0, _constant(call))
    _require_alike(call, "an addition", "x + y")
    return Adds()


@reads(operator.sub, operator.isub, torch.sub, "sub", "sub_")
def read_subtraction(call: TracedCall) -> Reading:
    if len(call.inputs) == 2:
        _require_alike(call, "a subtraction", "x - y")
        return Adds(difference=True)
    constant = _constant(call)
    return _scale(call, 1.0, -constant) if _stands_first(call) else _scale(call, -1.0, constant)


@reads(operator.mul, operator.imul, torch.mul, "mul", "mul_")
def read_multiplication(call: TracedCall) -> Reading:
    return _scale(call, _constant(call), 0.0)


@reads(operator.truediv, operator.itruediv, torch.div, "div", "div_")
def read_division(call: TracedCall) -> Reading:
    constant = _constant(call)
    if not _stands_first(call) or not constant.all():
        raise call.refuse("a division by values of the network, or by zero", "Only one by a constant is read.")
    return _scale(call, 1.0 / constant, 0.0)


@reads(operator.neg, torch.neg, "neg")
def read_negative(call: TracedCall) -> Reading:
    return _scale(call, -1.0, 0.0)


@reads(torch.maximum, "maximum", torch.max, "max", torch.minimum, "minimum", torch.min, "min")
def read_comparison(call: TracedCall) -> Reading:
    """Of two values, or of one and zero: a ReLU."""
    name = call.function if isinstance(call.function, str) else call.function.__name__
    smaller = name in ("minimum", "min")
    if len(call.inputs) == 2:
        _require_alike(call, "a comparison", f"torch.{name}(x, y)")
        return TakesMaximum(smaller=smaller)
    other = call.argument(1, "other") if _stands_first(call) else call.argument(0, "input")
    if smaller or not isinstance(other, Tensor) or other.any() or call.output.shape != call.input.shape:
        raise call.refuse(
            "a maximum or minimum of other than two values of the network",
            "torch.maximum and torch.minimum of two are read, and torch.maximum of one and zeros.",
        )
    return Rectifies()


@reads(torch.zeros_like)
def read_zeros(call: TracedCall) -> Reading:
    return _scale(call, 0.0, 0.0)


def _require_alike(call: TracedCall, what: str, read: str) -> None:
    if len({value.shape for value in call.inputs}) > 1 or call.argument(2, "alpha", 1) != 1:
        raise call.refuse(
            f"{what} of other than two values of one shape",
            f"Only {read} of the same shape is read.",
        )


def _scale(call: TracedCall, scale: Floats | float, offset: Floats | float) -> Reading:
    per_channel = np.ndim(scale) or np.ndim(offset)
    zeros = np.zeros(call.input_shape[0])
    return Scales(
        zeros + scale, zeros + offset, "whose constants, one per channel, cannot be sliced" if per_channel else ""
    )


def _constant(call: TracedCall) -> Floats:
    """What the input is combined with: one number, or one per channel."""
    if len(call.inputs) != 1:
        raise call.refuse(
            "it combines two values of the network",
            "Values are joined by x + y, x - y, torch.maximum and torch.cat; constants by + - * /.",
        )
    if call.argument(2, "alpha", 1) != 1 or call.kwargs.get("rounding_mode") is not None:
        raise call.refuse(
            "it multiplies by alpha, or rounds", "Arithmetic is read without alpha= and rounding_mode=."
        )
    other = call.argument(1, "other") if _stands_first(call) else call.argument(0, "input")
    constant = torch.as_tensor(other, dtype=torch.float64).detach()
    sizes = (1,) * (call.input.ndim - constant.ndim) + tuple(constant.shape)
    if call.output.shape != call.input.shape or any(size > 1 for size in (*sizes[:1], *sizes[2:])):
        raise call.refuse(
            f"it combines {_shape(call.input)} with a constant of shape {tuple(constant.shape)}", CONSTANTS_READ
        )
    result: Floats = constant.reshape(-1 if constant.numel() > 1 else ()).numpy()
    return result


def _stands_first(call: TracedCall) -> bool:
    return call.argument(0, "input") is call.input


def _shape(values: Tensor) -> str:
    return f"(batch, {', '.join(map(str, values.shape[1:]))})"

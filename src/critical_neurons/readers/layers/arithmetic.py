"""The built-in readers of arithmetic: additions, and calculations with constants."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

from critical_neurons.core.network import Floats
from critical_neurons.readers.registry import Adds, Call, Reading, Scales, reads

CONSTANTS_READ = "A constant is read that is one number, or one per channel: of shape (channels, 1, 1) for images."


@reads(operator.add, operator.iadd, torch.add, "add", "add_")
def read_addition(call: Call) -> Reading:
    if len(call.inputs) == 1:
        return _scale(call, 1.0, _constant(call))
    if len({value.shape for value in call.inputs}) > 1 or call.argument(2, "alpha", 1) != 1:
        raise call.refuse(
            "an addition of other than two values of one shape", "Only x + y of the same shape is read."
        )
    return Adds()


@reads(operator.sub, operator.isub, torch.sub, "sub", "sub_")
def read_subtraction(call: Call) -> Reading:
    constant = _constant(call)
    return _scale(call, 1.0, -constant) if _stands_first(call) else _scale(call, -1.0, constant)


@reads(operator.mul, operator.imul, torch.mul, "mul", "mul_")
def read_multiplication(call: Call) -> Reading:
    return _scale(call, _constant(call), 0.0)


@reads(operator.truediv, operator.itruediv, torch.div, "div", "div_")
def read_division(call: Call) -> Reading:
    constant = _constant(call)
    if not _stands_first(call) or not constant.all():
        raise call.refuse("a division by values of the network, or by zero", "Only one by a constant is read.")
    return _scale(call, 1.0 / constant, 0.0)


@reads(operator.neg, torch.neg, "neg")
def read_negative(call: Call) -> Reading:
    return _scale(call, -1.0, 0.0)


def _scale(call: Call, scale: Floats | float, offset: Floats | float) -> Reading:
    per_channel = np.ndim(scale) or np.ndim(offset)
    zeros = np.zeros(call.input_shape[0])
    return Scales(
        zeros + scale, zeros + offset, "whose constants, one per channel, cannot be sliced" if per_channel else ""
    )


def _constant(call: Call) -> Floats:
    """What the input is combined with: one number, or one per channel."""
    if len(call.inputs) != 1:
        raise call.refuse(
            "it combines two values of the network",
            "Values are joined by x + y and torch.cat only; constants by + - * /.",
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


def _stands_first(call: Call) -> bool:
    return call.argument(0, "input") is call.input


def _shape(values: Tensor) -> str:
    return f"(batch, {', '.join(map(str, values.shape[1:]))})"

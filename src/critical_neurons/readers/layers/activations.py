"""The built-in readers of activation functions that are piecewise linear and zero at zero."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from critical_neurons.readers.registry import Reading, Rectifies, TracedCall, reads


@reads(nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_")
def read_relu(call: TracedCall) -> Reading:
    return Rectifies()


@reads(nn.ReLU6, F.relu6)
def read_relu6(call: TracedCall) -> Reading:
    return Rectifies(ceiling=6.0)


@reads(torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clamp_", "clip", "clip_")
def read_clamp(call: TracedCall) -> Reading:
    return _clamp(call, call.argument(1, "min"), call.argument(2, "max"))


@reads(torch.clamp_min, torch.clamp_min_, "clamp_min", "clamp_min_")
def read_clamp_from_below(call: TracedCall) -> Reading:
    return _clamp(call, call.argument(1, "min"), None)


@reads(nn.Hardtanh, F.hardtanh, F.hardtanh_)
def read_hardtanh(call: TracedCall) -> Reading:
    return _clamp(call, call.setting(1, "min_val", -1.0), call.setting(2, "max_val", 1.0))


@reads(nn.Threshold, F.threshold, torch.threshold, torch.threshold_)
def read_threshold(call: TracedCall) -> Reading:
    threshold, value = call.setting(1, "threshold"), call.setting(2, "value")
    if threshold != 0 or value != 0:
        raise call.refuse(
            f"a threshold {threshold} with the value {value}", "One of 0 with the value 0 is read: a ReLU."
        )
    return Rectifies()


@reads(nn.LeakyReLU, F.leaky_relu, F.leaky_relu_)
def read_leaky_relu(call: TracedCall) -> Reading:
    return Rectifies(slope=float(call.setting(1, "negative_slope", 0.01)))


@reads(nn.RReLU)
def read_randomised_leaky_relu(call: TracedCall) -> Reading:
    """In evaluation mode the slope is the mean of what it is drawn from in training."""
    assert isinstance(call.module, nn.RReLU)
    return Rectifies(slope=(call.module.lower + call.module.upper) / 2)


@reads(nn.PReLU, F.prelu, torch.prelu, "prelu")
def read_prelu(call: TracedCall) -> Reading:
    slopes = call.setting(1, "weight").detach().numpy()
    if slopes.size == 1:
        return Rectifies(slope=float(slopes[0]))
    obstacle = "whose slopes, one per channel, cannot be sliced" if call.module is None else ""
    return Rectifies(slope=slopes, obstacle=obstacle)


@reads(torch.abs, torch.absolute, operator.abs, "abs", "absolute")
def read_absolute_value(call: TracedCall) -> Reading:
    return Rectifies(slope=-1.0)


def _clamp(call: TracedCall, lowest: Any, highest: Any) -> Reading:
    lower, upper = -math.inf if lowest is None else lowest, math.inf if highest is None else highest
    if not (isinstance(lower, int | float) and isinstance(upper, int | float) and lower <= 0 < upper):
        raise call.refuse(
            f"a clamp from {lowest} to {highest}",
            "One is read from 0, a number below or no lower end to a number above 0 or no upper end.",
        )
    ceiling = None if upper == math.inf else float(upper)
    return Rectifies(ceiling, 0.0 if lower == 0 else 1.0, None if lower == -math.inf else -float(lower))

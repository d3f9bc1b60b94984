"""Box: the range of inputs, from the pair, arrays or radius that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from critical_neurons.core.bounds import Interval
from critical_neurons.core.settings import check_number, is_amount
from critical_neurons.core.structure import Floats
from critical_neurons.errors import InvalidInputError, InvalidSettingError

ACCEPTED = "Accepted: a pair (lower, upper) of numbers, or of arrays of the shape of one input."


def make_boxes(box: Any, inputs: Floats | None, radius: float | None) -> Interval:
    """The box, (1, *shape); with a radius one around every input, (batch, *shape), within `box` if there is one."""
    if box is None and radius is None:
        raise InvalidSettingError(
            "box: give the range of the inputs, as a box, or as inputs and a radius around them."
        )
    whole = None if box is None else _make_box(box, inputs)
    if radius is None:
        assert whole is not None
        return Interval(whole.lower[None], whole.upper[None])
    if inputs is None:
        raise InvalidSettingError("radius: needs inputs, around which the boxes lie. Give inputs=, or a box alone.")
    reach = check_number("radius", radius, Real, is_amount, "0 or more")
    lower, upper = inputs - reach, inputs + reach
    if whole is not None:
        lower, upper = np.maximum(lower, whole.lower), np.minimum(upper, whole.upper)
    return Interval(lower, upper)


def _make_box(box: Any, inputs: Floats | None) -> Interval:
    ends = (box.lower, box.upper) if isinstance(box, Interval) else box
    if not isinstance(ends, Sequence) or len(ends) != 2:
        raise InvalidSettingError(f"box: found {type(box).__name__}. {ACCEPTED}")
    lower, upper = (_as_array(end) for end in ends)
    shape = np.broadcast_shapes(lower.shape, upper.shape) if lower.ndim * upper.ndim == 0 else lower.shape
    if lower.ndim and upper.ndim and lower.shape != upper.shape:
        raise InvalidInputError(f"box: found ends of shape {lower.shape} and {upper.shape}. {ACCEPTED}")
    if inputs is not None:
        if shape not in ((), inputs.shape[1:]):
            raise InvalidInputError(f"box: found shape {shape} for inputs of shape {inputs.shape[1:]}. {ACCEPTED}")
        shape = inputs.shape[1:]
    if not shape:
        raise InvalidSettingError(
            "box: two numbers do not say what an input looks like. Give arrays of its shape, or inputs= beside them."
        )
    for end in (lower, upper):
        if not np.isfinite(end).all():
            raise InvalidInputError("box: NaN or infinite ends. Nothing is proved of a box without bounds.")
    if (lower > upper).any():
        raise InvalidInputError("box: it is empty: a lower end lies above its upper end.")
    found = Interval(*(np.broadcast_to(end, shape).copy() for end in (lower, upper)))
    if inputs is not None:
        outside = ((inputs < found.lower) | (inputs > found.upper)).reshape(len(inputs), -1).any(axis=1)
        if outside.any():
            raise InvalidInputError(
                f"box: {int(outside.sum())} of {len(inputs)} inputs lie outside, the first being number "
                f"{int(outside.argmax())}: nothing would be proved of them. Give a box that holds the data."
            )
    return found


def _as_array(end: Any) -> Floats:
    if hasattr(end, "detach"):
        end = end.detach().cpu()
    try:
        return np.asarray(end, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"box: an end is no array of numbers. {ACCEPTED}") from error

"""Bounding: network, inputs and radius to bounds, in float64."""

from __future__ import annotations

from functools import partial
from typing import assert_never, get_args

import numpy as np

from critical_neurons.bounding.backward import Backward
from critical_neurons.bounding.interval import make_box, map_ends, push
from critical_neurons.bounds import Bounds, Interval
from critical_neurons.errors import InvalidSettingError
from critical_neurons.network import (
    NO_UNIT,
    Affine,
    Concat,
    Floats,
    Input,
    MaxPool,
    Network,
    Relu,
    Sum,
    add_up,
    join_channels,
    pool_maximum,
    rectify,
)
from critical_neurons.settings import BoundsName

__all__ = ["bound_network"]


def bound_network(
    network: Network, inputs: Floats, *, radius: float = 0.0, pruned: bool = False, method: BoundsName = "interval"
) -> Bounds:
    """Bounds valid for every point of the boxes of half width `radius` around the rows of `inputs`.

    `pruned`: valid as well whatever the scores are, so that every scored activation may fall to zero.
    `method`: "interval" arithmetic, or "backward" substitution: tighter, and far slower where layers are large.
    """
    if method not in get_args(BoundsName):
        accepted = ", ".join(map(repr, get_args(BoundsName)))
        raise InvalidSettingError(f"method: found {method!r}. Accepted: {accepted}.")
    values: dict[int, Interval] = {}
    before_relu: dict[int, Interval] = {}
    before_pool: dict[int, Interval] = {}
    backward = Backward(network, pruned=pruned) if method == "backward" else None
    for index, op in enumerate(network.ops):
        if backward is not None and isinstance(op, Relu | MaxPool):
            values[op.source] = backward.tighten(op.source, values)
        match op:
            case Input():
                values[index] = make_box(inputs, radius)
            case Affine():
                values[index] = push(values[op.source], op.map)
            case Relu():
                before_relu[index] = values[op.source]
                values[index] = map_ends(rectify, values[op.source])
                if pruned:
                    lower, upper = values[index].lower, values[index].upper
                    values[index] = Interval(np.where(op.units != NO_UNIT, 0.0, lower), upper)
            case MaxPool():
                before_pool[index] = values[op.source]
                values[index] = map_ends(partial(pool_maximum, op), values[op.source])
            case Sum():
                values[index] = map_ends(add_up, *(values[source] for source in op.sources))
            case Concat():
                values[index] = map_ends(join_channels, *(values[source] for source in op.sources))
            case _:
                assert_never(op)
    return Bounds(inputs, radius, before_relu, before_pool, pruned)

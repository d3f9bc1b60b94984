"""Bounding: network, inputs and radius to bounds, by interval arithmetic in float64 (equation 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

import numpy as np

from critical_neurons.bounds import Bounds, Interval
from critical_neurons.network import (
    NO_UNIT,
    Affine,
    Concat,
    Floats,
    Input,
    LinearMap,
    MaxPool,
    Network,
    Relu,
    Sum,
    add_up,
    join_channels,
    pool_maximum,
    rectify,
)


def bound_network(network: Network, inputs: Floats, *, radius: float = 0.0, pruned: bool = False) -> Bounds:
    """Bounds valid for every point of the boxes of half width `radius` around the rows of `inputs`.

    `pruned`: valid as well whatever the scores are, so that every scored activation may fall to zero.
    """
    values: dict[int, Interval] = {}
    before_relu: dict[int, Interval] = {}
    before_pool: dict[int, Interval] = {}
    for index, op in enumerate(network.ops):
        match op:
            case Input():
                values[index] = _box(inputs, radius)
            case Affine():
                values[index] = _push(values[op.source], op.map)
            case Relu():
                before_relu[index] = values[op.source]
                values[index] = _apply(rectify, values[op.source])
                if pruned:
                    lower, upper = values[index].lower, values[index].upper
                    values[index] = Interval(np.where(op.units != NO_UNIT, 0.0, lower), upper)
            case MaxPool():
                before_pool[index] = values[op.source]
                values[index] = _apply(partial(pool_maximum, op), values[op.source])
            case Sum():
                values[index] = _apply(add_up, *(values[source] for source in op.sources))
            case Concat():
                values[index] = _apply(join_channels, *(values[source] for source in op.sources))
            case _:
                assert_never(op)
    return Bounds(inputs, radius, before_relu, before_pool, pruned)


def _box(centre: Floats, radius: float) -> Interval:
    return Interval(centre, centre) if radius == 0 else Interval(centre - radius, centre + radius)


def _push(interval: Interval, linear: LinearMap) -> Interval:
    """Centre through A x + b, radius through |A|: W+ L + W- U + b and W+ U + W- L + b."""
    if interval.lower is interval.upper:
        point = linear.apply(interval.lower)
        return Interval(point, point)
    centre = linear.apply((interval.lower + interval.upper) / 2)
    radius = linear.apply_absolute((interval.upper - interval.lower) / 2)
    return Interval(centre - radius, centre + radius)


def _apply(monotone: Callable[..., Floats], *intervals: Interval) -> Interval:
    """End by end, through a function that never falls when an argument rises."""
    lower = monotone(*(interval.lower for interval in intervals))
    if all(interval.lower is interval.upper for interval in intervals):
        return Interval(lower, lower)
    return Interval(lower, monotone(*(interval.upper for interval in intervals)))

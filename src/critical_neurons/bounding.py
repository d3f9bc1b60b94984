"""Bounding: network, inputs and radius to bounds, by interval arithmetic in float64 (equation 3)."""

from __future__ import annotations

from typing import assert_never

import numpy as np

from critical_neurons.bounds import Bounds, Interval
from critical_neurons.network import Affine, Floats, Input, LinearMap, Network, Relu


def bound_network(network: Network, inputs: Floats, *, radius: float = 0.0) -> Bounds:
    """Bounds valid for every point of the boxes of half width `radius` around the rows of `inputs`."""
    values: dict[int, Interval] = {}
    before_relu: dict[int, Interval] = {}
    for index, op in enumerate(network.ops):
        match op:
            case Input():
                values[index] = _box(inputs, radius)
            case Affine():
                values[index] = _push(values[op.source], op.map)
            case Relu():
                before_relu[index] = values[op.source]
                values[index] = _rectify(values[op.source])
            case _:
                assert_never(op)
    return Bounds(inputs, radius, before_relu)


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


def _rectify(interval: Interval) -> Interval:
    lower = np.maximum(interval.lower, 0.0)
    return Interval(lower, lower if interval.lower is interval.upper else np.maximum(interval.upper, 0.0))

"""Interval arithmetic through one op (equation 3)."""

from __future__ import annotations

from collections.abc import Callable

from critical_neurons.core.bounds import Interval
from critical_neurons.core.network import LinearMap
from critical_neurons.core.structure import Floats


def make_box(centre: Floats, radius: float) -> Interval:
    return Interval(centre, centre) if radius == 0 else Interval(centre - radius, centre + radius)


def push(interval: Interval, linear: LinearMap) -> Interval:
    """Centre through A x + b, radius through |A|: W+ L + W- U + b and W+ U + W- L + b."""
    if interval.lower is interval.upper:
        point = linear.apply(interval.lower)
        return Interval(point, point)
    centre = linear.apply((interval.lower + interval.upper) / 2)
    radius = linear.apply_absolute((interval.upper - interval.lower) / 2)
    return Interval(centre - radius, centre + radius)


def map_ends(monotone: Callable[..., Floats], *intervals: Interval) -> Interval:
    """The interval of a monotone function."""
    lower = monotone(*(interval.lower for interval in intervals))
    if all(interval.lower is interval.upper for interval in intervals):
        return Interval(lower, lower)
    return Interval(lower, monotone(*(interval.upper for interval in intervals)))

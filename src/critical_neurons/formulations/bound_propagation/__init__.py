"""Bound propagation: network, inputs and radius to bounds, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, assert_never, get_args

import numpy as np

from critical_neurons.core.bounds import Bounds, Interval
from critical_neurons.core.deadline import check_time
from critical_neurons.core.formulation import BoundsName
from critical_neurons.core.network import (
    Affine,
    Concat,
    Input,
    MaxPool,
    Network,
    Relu,
    Sum,
    add_up,
    join_channels,
    pool_maximum,
)
from critical_neurons.core.structure import NO_UNIT, Floats
from critical_neurons.errors import InvalidSettingError
from critical_neurons.formulations.bound_propagation.backward import Backward
from critical_neurons.formulations.bound_propagation.interval import make_box, map_ends, push

__all__ = ["Tighten", "bound_network", "bound_output", "bound_values"]

Tighten: TypeAlias = Callable[[int, dict[int, Interval]], Interval]
"""Tightens the interval of a ReLU's or max pool's input, given its index and the intervals of all values up to it."""


def bound_network(
    network: Network,
    inputs: Floats,
    *,
    radius: float = 0.0,
    box: Interval | None = None,
    pruned: bool = False,
    method: BoundsName = "interval",
) -> Bounds:
    """Bounds valid for every point of the boxes of half width `radius` around the rows of `inputs`.

    `box` (batch, *shape): the range of the network's inputs, if `radius` belongs to the input of an earlier module.
    `pruned`: valid for all scores in [0, 1] too, so that every scored activation may fall to zero.
    `method`: "interval" arithmetic, or "backward" substitution, which is tighter but far slower for large layers.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs.double().numpy(), radius=0.01, method="backward")
    >>> first = next(iter(bounds.before_relu.values()))
    >>> bool((first.lower <= first.upper).all())
    True
    """
    entering = make_box(inputs, radius) if box is None else box
    values = bound_values(network, entering, pruned=pruned, tighten=_choose(network, method, pruned=pruned))
    relus, pools = (
        {index: values[op.source] for index, op in enumerate(network.ops) if isinstance(op, kind)}
        for kind in (Relu, MaxPool)
    )
    return Bounds(inputs, radius, relus, pools, pruned, box)


def bound_output(network: Network, box: Interval, *, method: BoundsName = "interval") -> Interval:
    """The range of the network's last value for inputs in `box`."""
    return bound_values(network, box, tighten=_choose(network, method))[len(network.ops) - 1]


def _choose(network: Network, method: BoundsName, *, pruned: bool = False) -> Tighten | None:
    if method not in get_args(BoundsName):
        accepted = ", ".join(map(repr, get_args(BoundsName)))
        raise InvalidSettingError(f"method: found {method!r}. Accepted: {accepted}.")
    return Backward(network, pruned=pruned).tighten if method == "backward" else None


def bound_values(
    network: Network, box: Interval, *, pruned: bool = False, tighten: Tighten | None = None
) -> dict[int, Interval]:
    """The interval of every value, by its index in `network.ops`. `tighten` is applied before ReLUs and max pools."""
    values: dict[int, Interval] = {}
    for index, op in enumerate(network.ops):
        check_time()
        if tighten is not None and isinstance(op, Relu | MaxPool):
            values[op.source] = tighten(op.source, values)
        match op:
            case Input():
                values[index] = box
            case Affine():
                values[index] = push(values[op.source], op.map)
            case Relu():
                values[index] = _bound_activation(op, values[op.source], pruned=pruned)
            case MaxPool():
                values[index] = map_ends(partial(pool_maximum, op), values[op.source])
            case Sum():
                values[index] = map_ends(add_up, *(values[source] for source in op.sources))
                if op.ceiling is not None and values[index].lower is not values[index].upper:
                    relu = network.ops[op.sources[0]]
                    assert isinstance(relu, Relu)
                    values[index] = _bound_activation(relu, values[relu.source], pruned=pruned, ceiling=op.ceiling)
            case Concat():
                values[index] = map_ends(join_channels, *(values[source] for source in op.sources))
            case _:
                assert_never(op)
    return values


def _bound_activation(op: Relu, before: Interval, *, pruned: bool, ceiling: float | None = None) -> Interval:
    """The interval of max(0, p) or min(max(0, p), ceiling), both monotone in p."""
    after = map_ends(partial(np.clip, a_min=0.0, a_max=ceiling), before)
    return Interval(np.where(op.units != NO_UNIT, 0.0, after.lower), after.upper) if pruned else after

"""Shrinkage: what every ReLU subtracts when the score of its unit goes from 1 to 0.

An activation loses (1 - s) max(U, 0) in total. If the unit's channel reaches the ReLU by a skip connection or a
depthwise convolution, a part was already subtracted at an earlier ReLU and only the rest is subtracted here;
otherwise a channel of a residual stream would be charged again at every block. At s = 1 nothing changes; at s = 0 the
channel is zero behind every ReLU.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from critical_neurons.core.bounds import Bounds
from critical_neurons.core.network import Affine, Concat, Input, MaxPool, Network, Relu, Sum, spread_windows
from critical_neurons.core.structure import NO_UNIT, Floats


def find_shrinks(network: Network, bounds: Bounds) -> dict[int, Floats]:
    """By the index of each ReLU: (batch, *shape), zero where no unit has a score."""
    shrinks: dict[int, Floats] = {}
    lost: dict[int, Floats] = {}  # by value: what was subtracted so far; nothing if missing
    for index, op in enumerate(network.ops):
        match op:
            case Input():
                pass
            case Affine():
                if op.source in lost and op.keeps_channels:
                    lost[index] = op.map.apply_linear(lost[op.source])
            case Relu():
                upper = bounds.before_relu[index].upper
                top, scored = np.maximum(upper, 0.0), op.units != NO_UNIT
                if op.source not in lost and scored.all():  # one array for both: with many data points it is large
                    shrinks[index] = lost[index] = top
                    continue
                before = lost.get(op.source, np.zeros(1))
                shrinks[index] = np.where(scored, top - before, 0.0)
                lost[index] = np.where(upper > 0, np.where(scored, top, before), 0.0)
            case MaxPool():
                if op.source in lost:
                    winners = spread_windows(op, bounds.before_pool[index].upper).argmax(axis=3)[..., None]
                    taken = np.take_along_axis(spread_windows(op, lost[op.source], 0.0), winners, axis=3)
                    lost[index] = taken.reshape(len(taken), *op.shape)
            case Sum():
                parts = [lost[source] for source in op.sources if source in lost]
                if parts:
                    lost[index] = sum(parts[1:], parts[0])
            case Concat():
                if any(source in lost for source in op.sources):
                    shapes = [(len(bounds.inputs), *network.ops[source].shape) for source in op.sources]
                    parts = [
                        lost.get(source, np.zeros(shape)) for source, shape in zip(op.sources, shapes, strict=True)
                    ]
                    lost[index] = np.concatenate(parts, axis=1)
            case _:
                assert_never(op)
    return shrinks

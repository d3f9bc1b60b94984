"""Maxima of values of any sign, written with ReLUs without units: max(a, b) = b + max(0, a - b)."""

from __future__ import annotations

import numpy as np

from critical_neurons.core.network import NO_POSITION, Affine, MaxPool, Op, Relu, Shape, Sum
from critical_neurons.core.structure import NO_UNIT, Ints
from critical_neurons.readers.linear_maps import GatherMap, ScaleMap


def write_difference(name: str, shape: Shape, a: int, b: int, first: int) -> list[Op]:
    """max(0, a - b); `a` and `b` are indices of ops, `first` is that of the first new op."""
    ones = np.ones(shape[0])
    units = np.full((shape[0], *[1] * (len(shape) - 1)), NO_UNIT)
    return [
        Affine(name, b, shape, ScaleMap(-ones, 0.0 * ones), keeps_channels=True),
        Sum(name, (a, first), shape),
        Relu(name, first + 1, shape, units),
    ]


def write_max_pool(pool: MaxPool, read: Shape, first: int) -> list[Op]:
    """Pairwise maxima of the elements of every window, in rounds; `read` is the shape of the input."""
    inside = np.take_along_axis(pool.windows, (pool.windows != NO_POSITION).argmax(axis=1)[:, None], axis=1)
    windows = np.where(pool.windows == NO_POSITION, inside, pool.windows)  # repeats change no maximum
    elements = np.arange(read[0])[:, None, None] * int(np.prod(read[1:])) + windows
    ops: list[Op] = []
    source, shape = pool.source, read
    while elements.shape[2] > 1:
        paired = np.concatenate([elements, elements[:, :, -1:]], axis=2) if elements.shape[2] % 2 else elements
        at, half = first + len(ops), paired[:, :, ::2].shape
        ops += [_gather(pool.name, source, paired[:, :, start::2], shape) for start in (0, 1)]
        ops += write_difference(pool.name, half, at, at + 1, at + 2)
        ops.append(Sum(pool.name, (at + 4, at + 1), half))
        source, shape, elements = at + 5, half, np.arange(int(np.prod(half))).reshape(half)
    return [*ops, _gather(pool.name, source, elements.reshape(pool.shape), shape)]


def _gather(name: str, source: int, elements: Ints, read: Shape) -> Affine:
    return Affine(name, source, elements.shape, GatherMap(elements, read), keeps_channels=True)

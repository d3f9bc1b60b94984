"""Provisional units: the unit of every element of a value, and what was applied to it since its layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from critical_neurons.core.network import NO_POSITION, Shape
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Channels:
    """For each element of a value: its provisional unit; whether a ReLU was applied since the layer that computed it;
    whether a batch norm or a constant has shifted it since then, and the constant that is left if its unit is
    removed.

    Each of the four arrays broadcasts to `shape`, with size 1 along axes on which it is constant: a feature map has
    one unit at all its positions. `nonnegative`: no element can be negative.
    """

    shape: Shape
    units: Ints
    rectified: Bools
    shifted: Bools
    constants: Floats
    nonnegative: bool = False

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.units, self.rectified, self.shifted, self.constants

    def rearrange(self, shape: Shape, move: Callable[[NDArray[Any], Any], NDArray[Any]]) -> Channels:
        """Move elements; `move` gets an array of this shape, and the entry of padding."""
        moved = [
            shrink_axes(move(np.broadcast_to(array, self.shape), blank))
            for array, blank in zip(self.arrays, BLANKS, strict=True)
        ]
        return self._change(shape, moved)

    def reshape(self, shape: Shape) -> Channels:
        return self if shape == self.shape else self.rearrange(shape, lambda array, _: array.reshape(shape))

    def gather(self, elements: Ints) -> Channels:
        """`elements` as in `linear_maps.GatherMap`."""
        return self.rearrange(
            elements.shape,
            lambda array, blank: np.where(elements == NO_POSITION, blank, array.reshape(-1)[elements]),
        )

    def along(self, axis: int) -> tuple[Channels, Ints]:
        """One entry per index of the axis, as a value of one axis; and the units at indices where entries differ,
        which get no unit."""
        size = self.shape[axis]
        moved = [np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in self.arrays]
        lines = [np.broadcast_to(array, (size, array.shape[1])) for array in moved]
        mixed = np.logical_or.reduce([(array != array[:, :1]).any(axis=1) for array in lines])
        entries = [np.where(mixed, blank, array[:, 0]) for array, blank in zip(lines, BLANKS, strict=True)]
        return self._change((size,), entries), lines[0][mixed]

    def spread(self, shape: Shape, axis: int = 0) -> Channels:
        """Broadcast a value of one axis to this shape."""
        aligned = tuple(-1 if other == axis % len(shape) else 1 for other in range(len(shape)))
        return self._change(shape, [array.reshape(aligned) for array in self.arrays])

    def _change(self, shape: Shape, arrays: Sequence[NDArray[Any]]) -> Channels:
        units, rectified, shifted, constants = arrays
        return replace(self, shape=shape, units=units, rectified=rectified, shifted=shifted, constants=constants)


BLANKS = (NO_UNIT, True, False, 0.0)
"""The entries of an element that belongs to no unit."""


def make_channels(units: Ints, *, rectified: bool = False) -> Channels:
    """A value of one axis, without shifts."""
    never = np.zeros(len(units), dtype=bool)
    return Channels((len(units),), units, never | rectified, never, np.zeros(len(units)))


def join(parts: Sequence[Channels]) -> Channels:
    """Concatenate along the first axis."""
    rest = parts[0].shape[1:]
    arrays = []
    for found in zip(*(part.arrays for part in parts), strict=True):
        flat = all(math.prod(array.shape[1:]) == 1 for array in found)
        tail = (1,) * len(rest) if flat else rest
        whole = [np.broadcast_to(array, (part.shape[0], *tail)) for array, part in zip(found, parts, strict=True)]
        arrays.append(shrink_axes(np.concatenate(whole)))
    units, rectified, shifted, constants = arrays
    return Channels(
        (sum(part.shape[0] for part in parts), *rest),
        units,
        rectified,
        shifted,
        constants,
        nonnegative=all(part.nonnegative for part in parts),
    )


def shrink_axes(array: NDArray[Any]) -> NDArray[Any]:
    """Reduce every axis on which the array is constant to size 1."""
    for axis in range(array.ndim):
        first = array.take([0], axis=axis)
        if array.shape[axis] > 1 and (array == first).all():
            array = first
    return array

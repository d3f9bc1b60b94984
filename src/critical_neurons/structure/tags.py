"""Tags: the label of every element of a tensor, in as little room as it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from critical_neurons.structure.labels import NONE


@dataclass(frozen=True, eq=False)
class Tag:
    """`labels` broadcast to the tensor's shape: an axis along which they do not change has size 1.

    `rest` is what an element is once its unit is removed, None for zero: a function that is not zero at zero leaves
    something. Up to the first such function behind a layer, its `active` part, a unit is removed whole.
    `constant`: computed from parameters and buffers alone.
    """

    labels: Tensor
    rest: Tensor | None = None
    active: bool = False
    constant: bool = False

    @property
    def varying(self) -> tuple[int, ...]:
        """The axes along which labels change."""
        return tuple(axis for axis, size in enumerate(self.labels.shape) if size > 1)

    @property
    def labelled(self) -> bool:
        """Whether there is any unit behind it."""
        return bool((self.labels >= 0).any())


def blank(ndim: int, *, constant: bool = False, label: int = NONE) -> Tag:
    """No unit behind any element."""
    return Tag(torch.full((1,) * ndim, float(label), dtype=torch.float64), constant=constant)


def compact(values: Tensor) -> Tensor:
    """One entry of every axis along which nothing changes. The same values, broadcast."""
    strides = values.stride()
    for axis in sorted(range(values.ndim), key=lambda axis: (strides[axis] > 0, -strides[axis])):
        if values.shape[axis] <= 1:
            continue
        first = values.narrow(axis, 0, 1)
        if strides[axis] == 0 or bool((values == first).all()):
            values = first
    return values.contiguous()


def align(labels: Tensor, ndim: int) -> Tensor:
    """With as many axes, new ones of size 1 in front, as broadcasting has it."""
    return labels.reshape((1,) * (ndim - labels.ndim) + tuple(labels.shape))


def along(labels: Tensor, axis: int, size: int) -> Tensor:
    """(size, others): the labels at every index of an axis."""
    moved = labels.movedim(axis, 0).reshape(labels.shape[axis], -1)
    return moved.expand(size, -1) if moved.shape[0] != size else moved


def spread_along(labels: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector of labels as those of a tensor that change along one axis."""
    shape = [1] * ndim
    shape[axis] = len(labels)
    return labels.reshape(shape)


def meets_none(one: Tensor, other: Tensor) -> Tensor:
    """Where a label stands beside what cannot shrink."""
    return ((one == NONE) & (other >= 0)) | ((other == NONE) & (one >= 0))

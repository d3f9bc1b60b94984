"""Tags: the labels of all elements of a tensor, stored compactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from critical_neurons.structure.labels import NONE


@dataclass(frozen=True, eq=False)
class Tag:
    """`labels` broadcast to the tensor's shape, with size 1 along axes on which they are constant.

    `rest` is the value of an element whose unit is removed, None for zero: a function that is not zero at zero leaves
    a constant. `active`: whether such a function was applied since the layer; before it, a removed unit is zero.
    `constant`: computed from parameters and buffers only.
    """

    labels: Tensor
    rest: Tensor | None = None
    active: bool = False
    constant: bool = False

    @property
    def varying(self) -> tuple[int, ...]:
        """The axes along which labels vary."""
        return tuple(axis for axis, size in enumerate(self.labels.shape) if size > 1)

    @cached_property
    def labelled(self) -> bool:
        """Whether any element has a label."""
        return bool((self.labels.numpy() >= 0).any())


def blank(ndim: int, *, constant: bool = False, label: int = NONE) -> Tag:
    """A tag without labels."""
    return Tag(torch.full((1,) * ndim, float(label), dtype=torch.float64), constant=constant)


def compact(values: Tensor) -> Tensor:
    """Reduce axes along which nothing changes to size 1."""
    strides = values.stride()
    for axis in sorted(range(values.ndim), key=lambda axis: (strides[axis] > 0, -strides[axis])):
        if values.shape[axis] <= 1:
            continue
        first = values.narrow(axis, 0, 1)
        if strides[axis] == 0 or bool((values.numpy() == first.numpy()).all()):
            values = first
    return values.contiguous()


def align(labels: Tensor, ndim: int) -> Tensor:
    """Add leading axes of size 1, as broadcasting does."""
    return labels.reshape((1,) * (ndim - labels.ndim) + tuple(labels.shape))


def along(labels: Tensor, axis: int, size: int) -> Tensor:
    """(size, others): the labels at every index of an axis."""
    moved = labels.movedim(axis, 0).reshape(labels.shape[axis], -1)
    return moved.expand(size, -1) if moved.shape[0] != size else moved


def spread_along(labels: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector of labels along one axis of a tensor."""
    shape = [1] * ndim
    shape[axis] = len(labels)
    return labels.reshape(shape)


def meets_none(one: Tensor, other: Tensor) -> Tensor:
    """Where a label is next to something that cannot shrink."""
    left, right = one.numpy(), other.numpy()
    return torch.from_numpy(((left == NONE) & (right >= 0)) | ((right == NONE) & (left >= 0)))


def list_steps(values: Tensor) -> list[tuple[int, int]]:
    """The memory layout: size and stride of every axis, without the strides of axes of size 1."""
    steps = [(size, stride if size > 1 else 0) for size, stride in zip(values.shape, values.stride(), strict=True)]
    return [(int(values.storage_offset()), 0), *steps]

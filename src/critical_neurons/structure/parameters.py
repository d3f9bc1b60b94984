"""Parameters: which axis of which parameter a tensor in a call belongs to, through views and copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor, nn

from critical_neurons.removal.parametrised import list_parametrised
from critical_neurons.structure.labels import Labels
from critical_neurons.structure.tags import Tag, blank

MOST_ELEMENTS = 2**22
"""Larger parameters are only sliced as weights, not elementwise: no bias or scale is as large."""


@dataclass(frozen=True)
class Axis:
    """A range of an axis of a parameter: indices `first` to `first + size`."""

    tensor: str
    axis: int
    first: int
    size: int


@dataclass(frozen=True, eq=False)
class _Memory:
    """A parameter or buffer, or a converted copy of a view of one, and the parameter axes of its axes."""

    name: str
    values: Tensor
    axes: tuple[Axis | None, ...]
    copy_of: Tensor | None = None

    def holds(self, view: Tensor) -> bool:
        first = self.values.storage_offset()
        return first <= view.storage_offset() < first + max(self.values.numel(), 1)


class Parameters:
    """All parameters and buffers of a model, by their first name.

    A weight has labels for the indices of each axis, an elementwise parameter for its elements.
    """

    def __init__(self, model: nn.Module, labels: Labels) -> None:
        self._labels = labels
        self.computed = {
            f"{name}.{each.original}" if name else each.original: (name, each)
            for name, each in list_parametrised(model).items()
        }
        """Parametrised weights, by the name of the tensor of the same shape: their module, and how they are
        computed."""
        self.named: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
        self._memories: dict[int, list[_Memory]] = {}
        for name, values in self.named.items():
            axes = tuple(Axis(name, axis, 0, size) for axis, size in enumerate(values.shape))
            self._add(_Memory(name, values, axes))
        self.axes: dict[tuple[str, int], Tensor] = {}
        self.elements: dict[str, Tensor] = {}

    def _add(self, memory: _Memory) -> None:
        self._memories.setdefault(memory.values.untyped_storage().data_ptr(), []).append(memory)

    def _find(self, view: Tensor) -> _Memory | None:
        if view.numel() == 0:
            return None
        memories = self._memories.get(view.untyped_storage().data_ptr(), ())
        return next((memory for memory in memories if memory.holds(view)), None)

    def owns(self, view: Tensor) -> bool:
        """Whether it is a parameter or buffer, a view of one, or a copy."""
        return self._find(view) is not None

    def add_copy(self, copied: Tensor, view: Tensor) -> None:
        """Register a converted copy, which is treated like the parameter."""
        source = self._find(view)
        assert source is not None
        axes = tuple(self.locate(view, axis) for axis in range(view.ndim))
        self._add(_Memory(source.name, copied, axes, view))

    def find_module(self, tensor: str) -> str | None:
        """The module whose weight it is, or whose weight is computed from it."""
        if tensor in self.computed:
            return self.computed[tensor][0]
        owner, _, key = tensor.rpartition(".")
        return owner if key == "weight" else None

    def link_computed(self) -> None:
        """Give the other tensors of a parametrised weight the slices of the weight."""
        for tensor, (name, each) in self.computed.items():
            prefix = f"{name}." if name else ""
            shared = {"weight norm": (each.dim,), "spectral norm": (0, 1), "mask": ()}[each.kind]
            for axis in shared:
                labels = self.axes.get((tensor, axis))
                if labels is not None and labels.ndim > 1:  # one entry serves all groups
                    self.axes[tensor, axis] = self._labels.unite_along(labels, 0).expand_as(labels)
            axes = [self._first_row(self.axes.get((tensor, axis))) for axis in range(2)]
            match each.kind:
                case "weight norm":
                    linked = {(each.others[0], each.dim): axes[each.dim] if each.dim >= 0 else None}
                case "spectral norm":
                    kernel = self.named[tensor][0, 0].numel()
                    other = axes[1 - each.dim]
                    spread = None if other is None else other.repeat_interleave(kernel)
                    linked = {(each.others[0], 0): axes[each.dim], (each.others[1], 0): spread}
                case "mask":
                    linked = {(each.others[0], axis): self.axes.get((tensor, axis)) for axis in range(2)}
            self.axes |= {
                (prefix + key, axis): labels for (key, axis), labels in linked.items() if labels is not None
            }

    @staticmethod
    def _first_row(labels: Tensor | None) -> Tensor | None:
        return labels[0] if labels is not None and labels.ndim > 1 else labels

    def forget(self, values: Tensor) -> None:
        """Forget a copy that is written to."""
        pointer = values.untyped_storage().data_ptr()
        self._memories[pointer] = [each for each in self._memories.get(pointer, ()) if each.copy_of is None]

    def locate(self, view: Tensor, axis: int) -> Axis | None:
        """The axis of a parameter that an axis of a view runs along; None if unknown."""
        source = self._find(view)
        if source is None:
            return None
        whole, size = source.values, view.shape[axis]
        if view.shape == whole.shape and view.stride() == whole.stride():
            return source.axes[axis]
        if whole.ndim == 2 and view.shape == whole.shape[::-1] and view.stride() == whole.stride()[::-1]:
            return source.axes[1 - axis]
        offset = view.storage_offset() - whole.storage_offset()
        for place in range(whole.ndim) if size > 1 else ():
            stride = whole.stride(place)
            if whole.shape[place] > 1 and stride == view.stride(axis):
                first, found = offset // stride % whole.shape[place], source.axes[place]
                if found is not None and first + size <= whole.shape[place]:
                    return replace(found, first=found.first + first, size=size)
        return None

    def label_axis(self, at: Axis, blocks: int = 1) -> Tensor:
        """The labels of a range of an axis; with blocks (blocks, size)."""
        key = (at.tensor, at.axis)
        if key not in self.axes:
            size = self.named[at.tensor].shape[at.axis]
            self.axes[key] = self._labels.fresh(blocks, size) if blocks > 1 else self._labels.fresh(size)
        labels = self.axes[key]
        if at.size < labels.shape[-1]:
            tie_pieces(self._labels, labels, labels.ndim - 1, at.size, at.first)
        return labels[..., at.first : at.first + at.size]

    def tag(self, view: Tensor) -> Tag:
        """The tag of a view of an elementwise parameter."""
        source = self._find(view)
        assert source is not None
        named = self.named[source.name]
        if named.numel() > MOST_ELEMENTS or not named.is_floating_point():
            return blank(view.ndim, constant=True)
        whole = source.values
        if source.copy_of is None:
            elements = self._label_elements(source.name)
            self._tie_unseen(whole, elements, view)
        else:
            elements = _lay_out(self.tag(source.copy_of).labels, whole)
        offset = view.storage_offset() - whole.storage_offset()
        return Tag(elements.as_strided(view.size(), view.stride(), offset), constant=True)

    def _label_elements(self, name: str) -> Tensor:
        if name not in self.elements:
            values = self.named[name]
            self.elements[name] = _lay_out(self._labels.fresh(*values.shape), values)
        return self.elements[name]

    def _tie_unseen(self, whole: Tensor, elements: Tensor, view: Tensor) -> None:
        """Unite a view of a part of a parameter with the rest, so that all parts keep the same size."""
        seen = {stride: size for size, stride in zip(view.shape, view.stride(), strict=True) if stride and size > 1}
        count = 1
        for size in seen.values():
            count *= size
        if count >= whole.numel():
            return
        offset = view.storage_offset() - whole.storage_offset()
        for axis, (size, stride) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
            if size > 1 and (width := seen.get(stride, 1)) < size:
                tie_pieces(self._labels, elements, axis, width, offset // stride % size)


def tie_pieces(labels: Labels, of: Tensor, axis: int, width: int, first: int = 0) -> Tensor:
    """For a piece of an axis: divide the axis into equal pieces that fit it, and unite labels at the same place of
    all pieces. Returns the labels of the axis."""
    size = of.shape[axis]
    width = gcd(size, width, first)
    dealt = torch.unflatten(of, axis, (size // width, width))
    return labels.tie(dealt, axis).flatten(axis, axis + 1)


def _lay_out(labels: Tensor, like: Tensor) -> Tensor:
    """In the memory format of another tensor."""
    if like.is_contiguous() and labels.is_contiguous():
        return labels
    return torch.empty_like(like, dtype=torch.float64, device="cpu").copy_(labels)

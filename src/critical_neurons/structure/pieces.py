"""Pieces: rules for parts of an axis: slices, splits, and elements selected by index."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from critical_neurons.structure.parameters import tie_pieces
from critical_neurons.structure.rules import Call, Tags, keep_all, list_outputs, rule
from critical_neurons.structure.tags import Tag, compact

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun


@rule("slice", "select", "narrow", "split", "split_with_sizes", "unsafe_split", "chunk", "unbind", "unsafe_chunk")
def take_pieces(run: LabelledRun, call: Call) -> Tags:
    """Channels at the same place of all pieces are removed together."""
    values: Tensor = call.args[0]
    tag, axis = run.tag(values), call.argument("dim", 0) % max(values.ndim, 1)
    if axis in tag.varying and not tag.constant:
        labels = _tie(run, call, tag.labels, axis)
        if labels is None:
            return keep_all(run, call, f"{call.name} takes a part of its channels")
        tag = replace(tag, labels=labels, rest=None if labels is not tag.labels else tag.rest)
    full = tag.labels.expand(values.shape)
    found = [compact(piece) for piece in list_outputs(call.func(full, *call.args[1:], **call.kwargs))]
    rests: list[Tensor | None] = [None] * len(found)
    if tag.rest is not None:
        moved = call.func(tag.rest.expand(values.shape), *call.args[1:], **call.kwargs)
        rests = [compact(piece) for piece in list_outputs(moved)]
    return [Tag(labels, rest, tag.active, tag.constant) for labels, rest in zip(found, rests, strict=True)]


def _tie(run: LabelledRun, call: Call, labels: Tensor, axis: int) -> Tensor | None:
    """Labels united so that all pieces keep the same size; None if they have different sizes."""
    size = labels.shape[axis]
    if call.name in ("select", "unbind"):
        return tie_pieces(run.labels, labels, axis, 1)
    widths = {piece.shape[axis] for piece in list_outputs(call.outputs)}
    width = max(widths)
    if call.name != "slice":
        return tie_pieces(run.labels, labels, axis, width) if len(widths) == 1 else None
    step, start = call.argument("step", 1) or 1, call.argument("start", 0) or 0
    start = max(start + size, 0) if start < 0 else start
    if width == size:
        return labels
    if step == 1 and size % width == 0 and start % width == 0:
        return tie_pieces(run.labels, labels, axis, width)
    if start < step and size % step == 0 and width == size // step:  # every second element, as in rotary embeddings
        dealt = torch.unflatten(labels, axis, (width, step))
        return run.labels.tie(dealt, axis + 1).flatten(axis, axis + 1)
    return None


@rule(
    "index",
    "index_select",
    "gather",
    "take_along_dim",
    "roll",
    "unfold",
    "diagonal",
    "as_strided",
    "repeat_interleave",
)
def pick(run: LabelledRun, call: Call) -> Tags:
    """Elements selected by index. Axes on which labels vary must stay, since removal would change the indices."""
    values: Tensor = call.args[0]
    tag = run.tag(values)
    for other in call.tensors[1:]:
        if run.tag(other).labelled and call.name not in ("gather", "take_along_dim"):
            run.keep(run.tag(other).labels, f"{call.name} picks by it")
    if set(tag.varying) & _picked_axes(call, values):
        return keep_all(run, call, f"{call.name} picks some of its channels by their numbers")
    if call.name in ("gather", "take_along_dim"):
        other = run.tag(call.argument("index")).labels
        run.labels.unite(tag.labels, other)
        return [Tag(tag.labels, None, tag.active, tag.constant)]
    full = tag.labels.expand(values.shape)
    labels = compact(call.func(full, *call.args[1:], **call.kwargs))
    return [Tag(labels, None, tag.active, tag.constant)]


def _picked_axes(call: Call, values: Tensor) -> set[int]:
    """The axes along which a call selects elements by index."""
    every = set(range(values.ndim))
    if call.name == "index":
        axes: set[int] = set()
        place = 0
        for index in call.args[1]:
            count = index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
            axes |= set(range(place, place + count)) if index is not None else set()
            place += count
        return axes
    if call.name == "diagonal":
        return {call.argument("dim1", 0) % values.ndim, call.argument("dim2", 1) % values.ndim}
    if call.name == "as_strided":
        return every
    given = call.argument("dimension" if call.name == "unfold" else "dims" if call.name == "roll" else "dim")
    axes = set(given) if isinstance(given, tuple | list) else {given} if given is not None else every
    return {axis % max(values.ndim, 1) for axis in axes} or every

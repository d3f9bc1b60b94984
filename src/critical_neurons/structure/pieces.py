"""Rules for pieces of an axis: slices, splits, single indices."""

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
    """Of pieces of an axis along which labels change, channels at the same place go together."""
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
    """The labels, tied so that the pieces are as long as each other whatever is removed; None where they are not."""
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
    if start < step and size % step == 0 and width == size // step:  # every second, as in rotary embeddings
        dealt = torch.unflatten(labels, axis, (width, step))
        return run.labels.tie(dealt, axis + 1).flatten(axis, axis + 1)
    return None

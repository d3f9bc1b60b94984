"""Moving: rules for calls that move elements, which are applied to the labels as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from critical_neurons.structure.channels import note_used_size, pair
from critical_neurons.structure.rules import Call, Tags, keep_all, rule
from critical_neurons.structure.tags import Tag, blank, compact

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun


@rule("clone", "detach", "alias", "lift_fresh", "contiguous", "_to_copy", "dropout", "fill", "zero")
def pass_on(run: LabelledRun, call: Call) -> Tags:
    return [run.tag(call.args[0])]


@rule("native_dropout")
def drop(run: LabelledRun, call: Call) -> Tags:
    tag = run.tag(call.args[0])
    return [tag, Tag(tag.labels)]


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "bernoulli")
@rule("normal", "uniform", "exponential", "log_normal", "cauchy", "geometric", "random")
def make_like(run: LabelledRun, call: Call) -> Tags:
    """A tensor made in the shape of another shrinks with it."""
    labels = run.tag(call.tensors[0]).labels
    for other in call.tensors[1:]:
        pair(run, labels, run.tag(other).labels)
    return [Tag(labels)]


@rule("copy")
def overwrite(run: LabelledRun, call: Call) -> Tags:
    """Source and target must keep the same size."""
    target, source = call.args[:2]
    tag = run.tag(source)
    labels = tag.labels.expand(source.shape).expand(target.shape)
    pair(run, labels, run.tag(target).labels)
    return [Tag(compact(labels), active=tag.active)]


@rule("_local_scalar_dense", "_is_all_true", "_is_any_true", "equal", "is_nonzero")
def decide(run: LabelledRun, call: Call) -> Tags:
    """A value that controls the forward pass: the same for masked and removed units."""
    return [blank(0)]


@rule("tril", "triu")
def cut(run: LabelledRun, call: Call) -> Tags:
    """Which elements are zeroed depends on row and column numbers, so these axes cannot shrink."""
    values: Tensor = call.args[0]
    tag = run.tag(values)
    if any(axis >= values.ndim - 2 for axis in tag.varying):
        return keep_all(run, call)
    return [replace(tag, rest=None)]


@rule("cat", "stack", "concatenate", "_cat")
def join(run: LabelledRun, call: Call) -> Tags:
    """Concatenate labels along an axis; along others they stay compact."""
    parts = [
        part for part in call.args[0] if part.ndim == call.args[0][-1].ndim
    ]  # torch allows empty tensors with 1 axis
    tags = [run.tag(part) for part in parts]
    axis, ndim = call.argument("dim", 0), parts[0].ndim
    axis = axis % (ndim + 1 if call.name == "stack" else ndim)

    def join_each(read: Callable[[Tag], Tensor]) -> Tensor:
        pieces = [read(tag) for tag in tags]
        sizes = [max(piece.shape[place] for piece in pieces) for place in range(ndim)]
        if call.name == "stack":
            return torch.stack([piece.expand(sizes) for piece in pieces], axis)
        each = [[*sizes[:axis], part.shape[axis], *sizes[axis + 1 :]] for part in parts]
        return torch.cat([piece.expand(size) for piece, size in zip(pieces, each, strict=True)], axis)

    rest = compact(join_each(_read_rest)) if any(tag.rest is not None for tag in tags) else None
    labels = compact(join_each(lambda tag: tag.labels))
    return [Tag(labels, rest, all(tag.active for tag in tags), all(tag.constant for tag in tags))]


@rule(
    *("expand", "squeeze", "unsqueeze", "flip", "repeat", "pixel_unshuffle"),
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "movedim", "numpy_T"),
)
def move(run: LabelledRun, call: Call) -> Tags:
    values: Tensor = call.args[0]
    tag = run.tag(values)
    if call.name == "view" and isinstance(call.args[1], torch.dtype):
        return keep_all(run, call)
    if call.name in ("permute", "transpose", *RESHAPES):
        tag = _make_rectangular(run, call, tag)
    if call.name in RESHAPES and len(tag.varying) > 0 and not tag.constant:
        return [_note_sizes(run, call, tag)]
    return [_move(run, call, tag)]


def _note_sizes(run: LabelledRun, call: Call, tag: Tag) -> Tag:
    """Sizes in the call may come from attributes of a module."""
    moved = _move(run, call, tag)
    for axis in moved.varying:
        note_used_size(run, moved.labels, axis)
    return moved


def _move(run: LabelledRun, call: Call, tag: Tag) -> Tag:
    values: Tensor = call.args[0]
    shape, output = list(values.shape), list(call.output.shape)
    if call.name in RESHAPES and shape[:1] == output[:1] and tag.labels.shape[0] == 1:
        shape[0] = output[0] = 1  # all rows have the same labels

    def move_it(read: Tensor) -> Tensor:
        full = read.narrow(0, 0, 1) if read.ndim and shape and read.shape[0] != shape[0] == 1 else read
        if call.name in RESHAPES:
            return full.expand(shape).reshape(output)
        moved: Tensor = call.func(full.expand(shape), *call.args[1:], **call.kwargs)
        return moved

    rest = None if tag.rest is None else compact(move_it(tag.rest))
    labels = compact(move_it(tag.labels))
    if call.name == "expand" and not tag.labelled and call.output.numel() > values.numel():
        labels = run.fill(call.output.ndim).labels  # the size is given by the forward pass
    return Tag(labels, rest, tag.active, tag.constant)


RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias")


@rule("pixel_shuffle", "channel_shuffle", "native_channel_shuffle")
def shuffle(run: LabelledRun, call: Call) -> Tags:
    """Channels are moved to positions or permuted between groups: those moved together are removed together."""
    values, count = call.args[:2]
    tag = run.tag(values)
    axis = values.ndim - 3 if call.name == "pixel_shuffle" else 1
    if any(place != axis for place in tag.varying):
        return keep_all(run, call)
    if axis not in tag.varying:
        return [replace(tag, rest=None)]
    dealt = (-1, count**2) if call.name == "pixel_shuffle" else (count, -1)
    apart = torch.unflatten(tag.labels, axis, dealt)
    tied = run.labels.unite_along(apart, axis + (call.name == "pixel_shuffle"))
    if call.name == "pixel_shuffle":
        return [Tag(tied.flatten(axis, axis + 1), None, tag.active, tag.constant)]
    return [
        Tag(tied.expand_as(apart).transpose(axis, axis + 1).flatten(axis, axis + 1), None, tag.active, tag.constant)
    ]


@rule("im2col", "col2im")
def slide(run: LabelledRun, call: Call) -> Tags:
    """im2col and its adjoint: the windows of a channel become channels, and back."""
    values: Tensor = call.args[0]
    tag, axis = run.tag(values), values.ndim - (3 if call.name == "im2col" else 2)
    if any(place != axis for place in tag.varying):
        return keep_all(run, call)
    labels = tag.labels
    count = prod(call.argument("kernel_size"))
    if axis in tag.varying and call.name == "im2col":
        labels = labels.repeat_interleave(count, axis)
    elif axis in tag.varying:
        labels = run.labels.unite_along(torch.unflatten(labels, axis, (-1, count)), axis + 1).flatten(axis, axis + 1)
    shape = [1] * call.output.ndim
    shape[axis] = labels.shape[axis]
    return [Tag(labels.reshape(shape), None, tag.active, tag.constant)]


@rule("constant_pad_nd")
def pad(run: LabelledRun, call: Call) -> Tags:
    """Padding of positions keeps channels; padding of channels adds ones that cannot shrink."""
    values, amounts = call.args[0], list(call.args[1])
    tag = run.tag(values)
    labels = tag.labels
    for place, (before, behind) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        axis = values.ndim - 1 - place
        if axis not in tag.varying or not (before or behind):
            continue
        if before < 0 or behind < 0:
            return keep_all(run, call, "padding cuts some of its channels off")
        sizes = [[*labels.shape[:axis], amount, *labels.shape[axis + 1 :]] for amount in (before, behind)]
        around = [blank(values.ndim).labels.expand(size) for size in sizes]
        labels = torch.cat([around[0], labels, around[1]], axis)
    rest = None if any(amounts) else tag.rest  # with padding the remaining value is not constant
    return [Tag(compact(labels), rest, tag.active, tag.constant)]


def _read_rest(tag: Tag) -> Tensor:
    return torch.zeros_like(tag.labels) if tag.rest is None else tag.rest


def _make_rectangular(run: LabelledRun, call: Call, tag: Tag) -> Tag:
    """If channels were split into several axes, only the last of these can shrink.

    So the groups of a channel shuffle lose the channels at the same place. While the axes stay in order, either may
    still shrink: attention heads are distinguished from their channels where they are multiplied.
    """
    if len(tag.varying) < 2 or tag.constant:
        return tag
    values: Tensor = call.args[0]
    if call.name in ("permute", "transpose"):
        order = _list_order(call, values.ndim)
        if sorted(tag.varying, key=order.index) == list(tag.varying):
            return tag
    elif not _merges(values.shape, call.output.shape, tag.varying):
        return tag
    labels = tag.labels
    for axis in tag.varying[:-1]:
        labels = run.labels.unite_along(labels, axis)
    return replace(tag, labels=labels, rest=None)


def _list_order(call: Call, ndim: int) -> list[int]:
    """The axes in their new order."""
    if call.name == "permute":
        return [axis % ndim for axis in call.args[1]]
    order = list(range(ndim))
    one, other = (axis % ndim for axis in call.args[1:3])
    order[one], order[other] = order[other], order[one]
    return order


def _merges(before: torch.Size, after: torch.Size, axes: tuple[int, ...]) -> bool:
    """Whether a reshape merges some of these axes. Axes of both shapes are matched in the smallest possible
    groups."""
    one = other = 0
    while one < len(before):
        start, left, right = one, before[one], after[other] if other < len(after) else 1
        one, other = one + 1, other + 1
        while left != right:
            if left < right and one < len(before):
                left *= before[one]
                one += 1
            elif other < len(after):
                right *= after[other]
                other += 1
            else:
                return True
        if sum(start <= axis < one for axis in axes) > 1:
            return True
    return False

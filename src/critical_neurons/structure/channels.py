"""Channels: rules for normalisation of channels, groups of channels or whole axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from critical_neurons.structure.labels import NONE
from critical_neurons.structure.records import Multiplication
from critical_neurons.structure.rules import Call, Tags, keep_all, rule
from critical_neurons.structure.tags import Tag, along, meets_none, spread_along

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun


WIDTHS = ("dim", "size", "width", "channels")
"""Parts of the names of widths, as opposed to counts."""

MEETS = "it is read along with what cannot shrink"


def read_axis(run: LabelledRun, values: Tensor, axis: int, what: str) -> Tensor:
    """One label per index of an axis: labels at one index are united, and stay if one of them cannot shrink."""
    labels = along(run.tag(values).labels, axis, values.shape[axis])
    if labels.shape[1] == 1:
        return labels[:, 0]
    first = run.labels.unite_along(labels, 1)[:, 0]
    mixed = (labels == NONE).any(1) & (first >= 0)
    if bool(mixed.any()):
        run.keep(labels[mixed], what)
    return torch.where(mixed, float(NONE), first)


def pair(run: LabelledRun, one: Tensor, other: Tensor) -> None:
    """Unite labels at the same place; they stay if the other one cannot shrink."""
    run.labels.unite(one, other)
    alone = meets_none(one, other)
    if bool(alone.any()):
        run.keep(torch.maximum(one, other)[alone], MEETS)


def link(run: LabelledRun, labels: Tensor, *vectors: Tensor | None) -> None:
    """Vectors of parameters, an entry for every label."""
    found = [run.tag(each).labels.expand(each.shape).flatten() for each in vectors if each is not None]
    if found:
        pair(run, torch.stack(found) if len(found) > 1 else found[0], labels)


def note_size(run: LabelledRun, name: str, labels: Tensor) -> None:
    """Record an integer attribute of the running module that is the number of these labels, possibly times the number
    of rows."""
    place, module = run.module
    size = getattr(module, name, None)
    if not isinstance(size, int) or isinstance(size, bool) or size == 0 or len(labels) not in (size, size * run.rows):
        return
    key = f"{place}.{name}" if place else name
    if key in run.sizes:
        run.labels.unite(run.sizes[key], labels[:size])
    run.sizes[key] = labels[:size]


def note_used_size(run: LabelledRun, labels: Tensor, axis: int) -> None:
    """Record integer attributes of the running module that equal the size of an axis and are named in the running
    code. Of several, those named like a number of heads, since the width of a head may be as large."""
    place, module = run.module
    size = labels.shape[axis]
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
    names = [name for name, value in numbers.items() if size in (value, value * run.rows)]
    if not names:
        return
    names = [name for name in names if name in run.names_used()]
    likely = [name for name in names if "head" in name and not any(part in name for part in WIDTHS)]
    for name in likely if len(names) > 1 and likely else names:
        first = labels.narrow(axis, 0, numbers[name])
        if torch.equal(torch.cat([first] * (size // numbers[name]), axis), labels):  # the batch may be folded into it
            run.used_sizes.append((f"{place}.{name}" if place else name, first, axis))


@rule(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm"),
    *("_batch_norm_with_update", "_batch_norm_no_update", "cudnn_batch_norm", "miopen_batch_norm"),
)
def normalise_channels(run: LabelledRun, call: Call) -> Tags:
    values: Tensor = call.args[0]
    labels = read_axis(run, values, 1, "a batch norm reads it with what cannot shrink")
    vectors = [call.argument(name) for name in ("weight", "bias", "running_mean", "running_var")]
    link(run, labels, *vectors)
    note_size(run, "num_features", labels)
    _record(run, labels)
    tag, rest = run.tag(values), None
    if tag.active and vectors[2] is not None:
        rest = _normalise(tag.rest, vectors, float(call.argument("eps", 1e-5)), values.ndim)
    return [Tag(spread_along(labels, 1, values.ndim), rest, tag.active), None, None]


def _record(run: LabelledRun, labels: Tensor) -> None:
    """Record a batch norm among the multiplications, since refitting adjusts its statistics."""
    name, module = run.module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        constants = torch.zeros(len(labels))
        kind = type(module).__name__
        run.multiplications.append(Multiplication(name, name, kind, labels, labels, constants, 0, 0, 1, True, True))


def _normalise(rest: Tensor | None, vectors: list[Tensor | None], eps: float, ndim: int) -> Tensor | None:
    """The output of a batch norm for a removed unit."""
    weight, bias, mean, variance = (
        None if vector is None else spread_along(vector.detach().double().cpu(), 1, ndim) for vector in vectors
    )
    assert mean is not None
    assert variance is not None
    found = ((0.0 if rest is None else rest) - mean) / torch.sqrt(variance + eps)
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    return found if bool(found.any()) else None


@rule("native_group_norm", "group_norm")
def normalise_groups(run: LabelledRun, call: Call) -> Tags:
    """Group norm: a group of channels is removed as a whole."""
    values: Tensor = call.args[0]
    groups = int(call.argument("group", call.argument("num_groups")))
    labels = read_axis(run, values, 1, "a group norm reads it with what cannot shrink")
    if groups == 1 and len(labels) > 1:
        run.keep(labels, "a group norm has one group for all of its channels")
        labels = torch.full_like(labels, -1.0)
    grouped = labels.reshape(groups, -1)
    run.labels.unite(grouped[:, :1], grouped)
    link(run, labels, call.argument("weight"), call.argument("bias"))
    note_size(run, "num_channels", labels)
    note_size(run, "num_groups", grouped[:, 0])
    return [Tag(spread_along(labels, 1, values.ndim), None, run.tag(values).active), None, None]


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def normalise_all(run: LabelledRun, call: Call) -> Tags:
    """Layer norm: labels that vary along the normalised axes must stay."""
    values: Tensor = call.args[0]
    tag = run.tag(values)
    first = values.ndim - len(call.argument("normalized_shape"))
    inside = [axis for axis in tag.varying if axis >= first]
    if not inside:
        return [Tag(tag.labels, None, tag.active), None, None]
    if len(inside) == len(tag.varying) or not run.whole_heads or not run.labels.are_apart(tag.labels.flatten(first)):
        return keep_all(run, call, "a layer norm runs over its channels")
    labels = tag.labels
    for axis in inside:  # a norm per head: a head is removed as a whole
        labels = run.labels.unite_along(labels, axis)
    return [Tag(labels, None, tag.active), None, None]

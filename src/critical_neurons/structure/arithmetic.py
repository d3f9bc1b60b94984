"""Arithmetic: rules for elementwise functions, reductions along axes, and windows of positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from critical_neurons.structure.labels import FILL, NONE
from critical_neurons.structure.rules import Call, Tags, keep_all, list_outputs, rule
from critical_neurons.structure.tags import Tag, align, blank, compact, meets_none

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun

AFFINE = frozenset({"add", "sub", "mul", "div", "neg", "rsub", "lerp", "addcmul", "_to_copy"})
"""Affine functions: a unit is removed before the first other function behind it."""


@rule("pointwise", "where", "masked_fill", "_prelu_kernel", "prelu", "rrelu_with_noise", "hardswish", "threshold")
def combine(run: LabelledRun, call: Call) -> Tags:
    """Labels at the same place are united. An operand of size 1 along the axes on which the others' labels vary is
    broadcast and not united; an operand that cannot shrink makes the labels it meets stay."""
    shape = call.output.shape
    ndim = len(shape)
    operands = [(values, run.tag(values)) for values in call.tensors]
    tags = [tag for _, tag in operands]
    if len(operands) == 1:
        return [Tag(align(tags[0].labels, ndim), *_rest(call, tags, shape), tags[0].constant)]
    constant = all(tag.constant for tag in tags)
    leading = [align(tag.labels, ndim) for tag in tags if tag.labelled and (constant or not tag.constant)]
    if not leading:
        for values, tag in operands:
            if tag.constant and values.shape == shape:
                run.keep(tag.labels, f"{call.name} joins it with what cannot shrink")
        if not constant and all(bool((tag.labels == FILL).all()) or values.ndim == 0 for values, tag in operands):
            return [run.fill(ndim)]
        return [blank(ndim, constant=constant)]
    axes = {axis for labels in leading for axis, size in enumerate(labels.shape) if size > 1}
    narrow = _find_narrow(operands, axes, shape)
    if narrow:  # one value for all channels of a head, which are therefore removed together
        tags = [_tie(run, tag, [axis - ndim for axis in axes - narrow]) for tag in tags]
        operands, axes = [(values, tag) for (values, _), tag in zip(operands, tags, strict=True)], narrow
    tied: set[int] = set()
    result: Tensor | None = None
    for values, tag in operands:
        sizes = (1,) * (ndim - values.ndim) + tuple(values.shape)
        full = {axis for axis in axes if sizes[axis] == shape[axis]}
        if full == axes and (axes or values.ndim):
            labels = align(tag.labels, ndim)
            result = labels if result is None else _meet(run, call, result, labels)
            continue
        tied |= {axis for axis in full if shape[axis] > 1}
        if tag.labelled and not tag.constant:
            run.keep(tag.labels, f"{call.name} spreads it over other channels")
    if result is None:
        return keep_all(run, call)
    if tied and tied == axes:
        return keep_all(run, call, f"{call.name} joins it with what has other channels")
    for axis in tied:  # an operand with its own channels along another axis: this axis cannot shrink
        result = run.labels.unite_along(result, axis)
    return [Tag(compact(result), *_rest(call, tags, shape), constant)]


def _find_narrow(operands: list[tuple[Tensor, Tag]], axes: set[int], shape: torch.Size) -> set[int]:
    """The axes of an operand whose labels vary along some of the axes and that is broadcast along the others."""
    for values, tag in operands:
        sizes = (1,) * (len(shape) - values.ndim) + tuple(values.shape)
        own = {axis + len(shape) - values.ndim for axis in tag.varying}
        if not tag.constant and own and own < axes and all(sizes[axis] == 1 < shape[axis] for axis in axes - own):
            return own
    return set()


def _tie(run: LabelledRun, tag: Tag, axes: list[int]) -> Tag:
    labels = tag.labels
    for axis in axes:
        if -axis <= labels.ndim and labels.shape[axis] > 1 and not tag.constant:
            labels = run.labels.unite_along(labels, axis)
    return replace(tag, labels=labels)


def _meet(run: LabelledRun, call: Call, one: Tensor, other: Tensor) -> Tensor:
    run.labels.unite(one, other)
    alone = meets_none(one, other)
    larger = torch.maximum(one, other)
    if not bool(alone.any()):
        return larger
    run.keep(larger[alone], f"{call.name} joins it with what cannot shrink")
    return torch.where(alone, float(NONE), larger)


def _rest(call: Call, tags: list[Tag], shape: torch.Size) -> tuple[Tensor | None, bool]:
    """The value of an element whose unit is removed, and whether an activation function was applied."""
    units = [tag for tag in tags if not tag.constant and tag.labelled]
    if not units:
        return None, False
    active = all(tag.active for tag in units)
    if call.name in AFFINE and not active:
        return None, False
    if call.name in AFFINE and all(tag.rest is None for tag in units) and not _adds_constant(call, tags):
        return None, active
    places = iter(tags)
    arguments: list[Any] = []
    for value in call.args:
        if not isinstance(value, Tensor):
            arguments.append(value)
            continue
        tag = next(places)
        if tag.constant:
            arguments.append(value.double() if value.is_floating_point() else value)
        elif not tag.labelled:
            return None, True  # the remaining value would depend on the input
        else:
            arguments.append(torch.zeros_like(tag.labels) if tag.rest is None else tag.rest)
    try:
        if call.func._schema.is_mutable:  # in place, so on a copy
            operands = [each for each in arguments if isinstance(each, Tensor)]
            arguments[0] = torch.broadcast_tensors(*operands)[0].clone()  # type: ignore[no-untyped-call]
        result = call.func(*arguments, **call.kwargs)
        rest: Tensor = result[0] if isinstance(result, tuple) else result
    except (RuntimeError, TypeError):
        return None, True
    if not rest.is_floating_point() or not bool(rest.any()) or not bool(torch.isfinite(rest).all()):
        return None, True
    return compact(align(rest.double(), len(shape))), True


def _adds_constant(call: Call, tags: list[Tag]) -> bool:
    return call.name in ("add", "sub", "rsub", "lerp", "addcmul") and (
        any(tag.constant for tag in tags) or len(tags) == 1
    )


@rule("log_sigmoid_forward")
def combine_twice(run: LabelledRun, call: Call) -> Tags:
    """The second output is only for gradients."""
    return [*combine(run, call), None]


@rule("index_put")
def put(run: LabelledRun, call: Call) -> Tags:
    """Writing a number by a mask, as in `x[x < 0] = 0`, is elementwise."""
    values, indices, written = call.args[:3]
    masked = len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].shape == values.shape
    if not masked or written.numel() != 1:
        return keep_all(run, call)
    tag = run.tag(values)
    _meet(run, call, tag.labels, run.tag(indices[0]).labels)
    return [Tag(tag.labels, None, True, tag.constant)]


@rule("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "index_reduce")
def scatter(run: LabelledRun, call: Call) -> Tags:
    """Rows of one tensor written or added to another, such as messages along the edges of a graph."""
    values, axis, index, source = call.args[0], call.args[1] % max(call.args[0].ndim, 1), *call.args[2:4]
    if not isinstance(source, Tensor) or source.ndim != values.ndim or run.tag(index).labelled:
        return keep_all(run, call)
    tags = [run.tag(values), run.tag(source)]
    if any(axis in tag.varying for tag in tags):
        return keep_all(run, call)
    return [Tag(compact(_meet(run, call, tags[0].labels, tags[1].labels)), None, True)]


@rule("glu")
def gate(run: LabelledRun, call: Call) -> Tags:
    """One half of the channels times a function of the other half: the two channels of a pair are removed
    together."""
    values: Tensor = call.args[0]
    tag, axis = run.tag(values), call.argument("dim", -1) % values.ndim
    labels = tag.labels
    if axis in tag.varying:
        labels = _meet(run, call, *labels.chunk(2, axis))
    return [Tag(compact(labels), None, True, tag.constant)]


@rule(
    *("mean", "sum", "amax", "amin", "max", "min", "prod", "var", "std", "logsumexp", "norm", "linalg_vector_norm"),
    *("argmax", "argmin", "any", "all", "median", "var_mean", "std_mean", "nansum", "aminmax"),
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "logcumsumexp"),
)
def reduce(run: LabelledRun, call: Call) -> Tags:
    """Labels are unchanged if they are constant along the reduced axes. Otherwise the reduced ones are united or
    stay."""
    values: Tensor = call.args[0]
    tag = run.tag(values)
    if len(call.tensors) > 1:  # max and min of two tensors work element by element
        return combine(run, call)
    given = call.argument("dim")
    chosen = [given] if isinstance(given, int) else given or range(values.ndim)
    axes = {axis % values.ndim for axis in chosen} if values.ndim else set()
    joined = axes & set(tag.varying)
    labels, rest = tag.labels, None
    if joined and set(tag.varying) <= axes:
        if call.name == "mean" and not tag.constant:  # attention returns mean weights, which are often unused
            return [run.keep_if_used(labels, f"{call.name} runs over its channels", call.output)]
        if call.name not in SUMS or tag.rest is not None:
            kept = keep_all(run, call, f"{call.name} runs over its channels")
            return [Tag(labels, None, True, tag.constant)] if "softmax" in call.name else kept
        labels = blank(values.ndim).labels
    for axis in joined & set(Tag(labels).varying):
        labels = run.labels.unite_along(labels, axis)
    if tag.rest is not None and call.name in ("mean", "amax", "amin") and not joined:
        within = [axis for axis in axes if tag.rest.shape[axis] > 1]
        rest = getattr(tag.rest, call.name)(within, keepdim=True) if within else tag.rest
    if call.output.ndim != values.ndim:
        for axis in sorted(axes, reverse=True):
            labels = labels.squeeze(axis)
            rest = None if rest is None else rest.squeeze(axis)
    return [Tag(labels, rest, True, tag.constant) for _ in list_outputs(call.outputs)]


SUMS = frozenset({"sum", "norm", "linalg_vector_norm"})
"""Reductions that zeros do not change."""


@rule(
    *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d"),
    *(
        "adaptive_max_pool3d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
    ),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "upsample_nearest1d", "upsample_nearest2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d"),
    *("replication_pad3d", "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "mkldnn_max_pool2d"),
    "mkldnn_adaptive_avg_pool2d",
)
def pool(run: LabelledRun, call: Call) -> Tags:
    """Pooling: windows of positions, channel by channel."""
    values: Tensor = call.args[0]
    tag = run.tag(values)
    for other in call.tensors[1:]:
        labels = run.tag(other).labels
        if "unpool" in call.name:
            run.labels.unite(tag.labels, labels)
        else:  # a sampling grid
            run.keep(labels, f"it is read by {call.name}")
    shrunk = {axis for axis in tag.varying if axis >= _first_position(call)}
    labels = tag.labels
    if shrunk and set(tag.varying) <= shrunk:
        return keep_all(run, call, f"{call.name} joins its channels")
    for axis in shrunk:
        labels = run.labels.unite_along(labels, axis)
    rest = tag.rest if not shrunk and _keeps_constants(call) else None
    if rest is not None and any(rest.shape[axis] > 1 for axis in range(_first_position(call), values.ndim)):
        rest = None
    return [Tag(labels, rest, tag.active, tag.constant) for _ in list_outputs(call.outputs)]


def _first_position(call: Call) -> int:
    digit = next(character for character in reversed(call.name) if character.isdigit())
    return call.output.ndim - int(digit)


def _keeps_constants(call: Call) -> bool:
    """Whether a channel that is constant over positions keeps its value."""
    if "unpool" in call.name or "grid" in call.name or call.argument("divisor_override") is not None:
        return False
    padding = call.argument("padding", 0)
    padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
    return not ("avg" in call.name and padded)

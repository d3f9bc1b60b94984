"""Products: rules for attention and other products of two computed values."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from critical_neurons.structure.channels import MEETS, pair, read_axis
from critical_neurons.structure.labels import NONE
from critical_neurons.structure.records import Cost
from critical_neurons.structure.rules import Call, Tags, keep_all, list_outputs, rule
from critical_neurons.structure.tags import Tag, blank, compact, meets_none, spread_along

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun


def multiply_values(run: LabelledRun, call: Call, one: Tensor, other: Tensor) -> Tags:
    """Unite the labels of the summed axes; the others are those of the result."""
    first, second = _settle_heads(run, one), _settle_heads(run, other)
    if any(axis < one.ndim - 2 for tag in (first, second) for axis in tag.varying):
        return _multiply_each(run, call, first, second, one.shape[-1])
    inner_one, inner_other, outer_one, outer_other = one.ndim - 1, other.ndim - 2, one.ndim - 2, other.ndim - 1
    axes: list[Tensor] = []
    if inner_one in first.varying or inner_other in second.varying:
        left = read_axis(run, one, inner_one, MEETS)
        right = read_axis(run, other, inner_other, MEETS)
        pair(run, left, right)
        axes.append(left)
        if first.rest is not None and second.rest is not None:
            run.keep(left, "a sum runs over it, of what is not zero without it")
    result = blank(call.output.ndim).labels
    for tag, place in ((first, outer_one), (second, outer_other)):
        if place not in tag.varying:
            continue
        values = one if tag is first else other
        labels = read_axis(run, values, place, MEETS)
        axes.append(labels)
        if bool((result >= 0).any()):
            run.keep(torch.cat([result.flatten(), labels]), "a product of two values has it on both sides")
            result = blank(call.output.ndim).labels
        else:
            result = spread_along(labels, place - values.ndim + call.output.ndim, call.output.ndim)
    run.costs.append(Cost(run.module[0], call.output.numel() * one.shape[-1] // run.rows, tuple(axes)))
    return [Tag(result)]


def _settle_heads(run: LabelledRun, values: Tensor) -> Tag:
    """If labels vary both along a matrix axis and along one that counts matrices, the latter are heads: unite either
    all channels of a head, or the channels at the same place of all heads."""
    tag = run.tag(values)
    outside = [axis for axis in tag.varying if axis < values.ndim - 2]
    inside = [axis for axis in tag.varying if axis >= values.ndim - 2]
    if not outside or not inside:
        return tag
    labels = tag.labels
    for axis in inside if run.whole_heads else outside:
        labels = run.labels.unite_along(labels, axis)
    if run.whole_heads:
        run.note_heads(labels)
    return replace(tag, labels=labels)


def _multiply_each(run: LabelledRun, call: Call, first: Tag, second: Tag, inner: int) -> Tags:
    """One matrix product per head, which is removed with its head."""
    ndim = call.output.ndim
    if any(axis >= ndim - 2 for tag in (first, second) for axis in tag.varying):
        for tag in (first, second):
            run.keep(tag.labels, "a product of matrices is made for each of its channels")
        return [blank(ndim)]
    labels = _join_heads(run, first.labels, second.labels)
    if first.rest is not None and second.rest is not None:
        run.keep(labels, "a product of matrices of what is not zero without it")
    run.costs.append(Cost(run.module[0], call.output.numel() * inner // run.rows, (labels.flatten(),)))
    return [Tag(labels)]


def _join_heads(run: LabelledRun, *several: Tensor) -> Tensor:
    """Unite the heads of several values; they stay if one of them cannot shrink."""
    found = several[0]
    for labels in several[1:]:
        pair(run, found, labels)
        alone = meets_none(found, labels)
        found = torch.where(alone, float(NONE), torch.maximum(found, labels))
    return compact(found)


@rule("mv", "dot", "vdot")
def multiply_vector(run: LabelledRun, call: Call) -> Tags:
    """A weighted sum over all channels."""
    matrix, vector = call.args[:2]
    labels = read_axis(run, matrix, matrix.ndim - 1, MEETS)
    if matrix.ndim == 2 and 0 in run.tag(matrix).varying:
        return keep_all(run, call)
    pair(run, labels, read_axis(run, vector, 0, MEETS))
    run.costs.append(Cost(run.module[0], matrix.numel() // (run.rows if run.is_value(matrix) else 1), (labels,)))
    return [blank(call.output.ndim, constant=not (run.is_value(matrix) or run.is_value(vector)))]


@rule(
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *(
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_cudnn_attention",
    ),
    *("_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_fused_attention_overrideable"),
    "scaled_dot_product_attention",
)
def attend(run: LabelledRun, call: Call) -> Tags:
    """Fused attention: the result has the channels of the values. Those of queries and keys must stay unless the
    scale is given, since it depends on their number."""
    query, key, value = call.args[:3]
    tags = [_settle_heads(run, each) for each in (query, key, value)]
    masks = call.tensors[3:]
    name, _ = run.module
    length = query.shape[-2] * key.shape[-2] * prod(query.shape[1:-2])
    rest: list[Tag | None] = [None] * (len(list_outputs(call.outputs)) - 1)
    if any(axis < query.ndim - 2 for tag in tags for axis in tag.varying):
        if len({each.shape[:-2] for each in (query, key, value)}) > 1:
            return keep_all(run, call)
        if any(axis >= query.ndim - 2 for tag in tags for axis in tag.varying):
            return keep_all(run, call, "attention joins heads with what has other channels")
        labels = _join_heads(run, *(tag.labels for tag in tags), *_read_masks(run, masks, query.ndim))
        run.costs.append(Cost(name, length * (query.shape[-1] + value.shape[-1]), (labels.flatten(),)))
        return [Tag(labels), *rest]
    for mask in masks:
        run.keep(run.tag(mask).labels, "attention is masked by it")
    queries, keys = (read_axis(run, each, each.ndim - 1, MEETS) for each in (query, key))
    pair(run, queries, keys)
    if call.argument("scale") is None:
        scaled = "attention divides by the root of how many there are of it"
        if run.why_split:
            run.labels.keep(torch.cat([queries, keys]), run.why_split)
        run.keep(torch.cat([queries, keys]), scaled)
    labels = read_axis(run, value, value.ndim - 1, MEETS)
    run.costs += [Cost(name, length * query.shape[-1], (queries,)), Cost(name, length * value.shape[-1], (labels,))]
    return [Tag(spread_along(labels, value.ndim - 1, value.ndim)), *rest]


def _read_masks(run: LabelledRun, masks: list[Tensor], ndim: int) -> list[Tensor]:
    """The labels of masks that differ between heads."""
    found = []
    for mask in masks:
        labels = run.tag(mask).labels
        if mask.ndim == ndim and prod(mask.shape[1:-2]) > 1:
            for axis in (ndim - 2, ndim - 1):
                labels = run.labels.unite_along(labels, axis)
            found.append(labels)
        else:
            run.keep(labels, "attention is masked by it")
    return found

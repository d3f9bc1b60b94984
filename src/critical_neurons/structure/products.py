"""Rules for products of two values: attention, and matrices that are both computed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from critical_neurons.structure.channels import MEETS, pair, read_axis
from critical_neurons.structure.records import Cost
from critical_neurons.structure.rules import Call, Tags, keep_all, list_outputs, rule
from critical_neurons.structure.tags import Tag, blank, spread_along

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun


def multiply_values(run: LabelledRun, call: Call, one: Tensor, other: Tensor) -> Tags:
    """What is summed over goes together, what is not goes on."""
    first, second = run.tag(one), run.tag(other)
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
    for tag in (first, second):
        if any(axis < len(tag.labels.shape) - 2 for axis in tag.varying):
            run.keep(tag.labels, "a product of matrices is made for each of its channels")
    run.costs.append(Cost(run.module[0], call.output.numel() * one.shape[-1] // run.rows, tuple(axes)))
    return [Tag(result)]


@rule("mv", "dot", "vdot")
def multiply_vector(run: LabelledRun, call: Call) -> Tags:
    """A sum over all channels, weighted by a vector."""
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
    """Attention in one call: the channels of the values go on; those of queries and keys set the scale, unless that
    is given."""
    query, key, value = call.args[:3]
    for other in call.tensors[3:]:
        run.keep(run.tag(other).labels, "attention is masked by it")
    queries, keys = (read_axis(run, each, each.ndim - 1, MEETS) for each in (query, key))
    pair(run, queries, keys)
    if call.argument("scale") is None:
        run.keep(torch.cat([queries, keys]), "attention divides by the root of how many there are of it")
    labels = read_axis(run, value, value.ndim - 1, MEETS)
    length = query.shape[-2] * key.shape[-2] * prod(query.shape[1:-2])
    name, _ = run.module
    run.costs += [Cost(name, length * query.shape[-1], (queries,)), Cost(name, length * value.shape[-1], (labels,))]
    return [Tag(spread_along(labels, value.ndim - 1, value.ndim)), *[None] * (len(list_outputs(call.outputs)) - 1)]

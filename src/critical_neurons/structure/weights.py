"""Weights: rules for multiplications with weights: convolutions, linear layers, embeddings."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from critical_neurons.structure.channels import MEETS, link, pair, read_axis
from critical_neurons.structure.labels import NONE
from critical_neurons.structure.products import multiply_values
from critical_neurons.structure.records import Cost, LeftAlone, Multiplication
from critical_neurons.structure.rules import Call, Tags, keep_all, list_outputs, rule
from critical_neurons.structure.tags import Tag, along, blank, spread_along

if TYPE_CHECKING:
    from critical_neurons.structure.parameters import Axis
    from critical_neurons.structure.run import LabelledRun

COMPUTED = "its weights are computed from others, as by a parametrisation; remove that first"
SEVERAL = "its weights are several matrices in one parameter, as of experts; make each a layer of its own"


@rule("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution")
def convolve(run: LabelledRun, call: Call) -> Tags:
    values, weight, bias = (call.argument(name) for name in ("input", "weight", "bias"))
    transposed, groups = bool(call.argument("transposed", False)), int(call.argument("groups", 1))
    output = call.output
    axis = values.ndim - weight.ndim + 1  # without a batch axis the channels come first
    labels = read_axis(run, values, axis, MEETS)
    read, given = run.parameters.locate(weight, 0), run.parameters.locate(weight, 1)
    if read is None or (given is None and weight.shape[1] > 1):
        return _leave(run, call, labels, axis)
    kernel, shape = prod(weight.shape[2:]), (values if transposed else output).shape
    positions = prod(shape[axis + 1 :])
    if groups > 1 and groups == len(labels):
        units = _filter(run, read, labels, output.shape[axis])
        axes: tuple[Tensor, ...] = (units,)
    else:
        per_group = labels.reshape(groups, -1) if groups > 1 else labels
        if transposed:
            assert given is not None or weight.shape[1] == 1
            pair(run, run.parameters.label_axis(read), labels)
            units = _label_outputs(run, given, weight.shape[1], groups)
        else:
            if given is not None:
                pair(run, run.parameters.label_axis(given, groups), per_group)
            units = run.parameters.label_axis(read)
        if groups > 1:
            run.blocks += [per_group, units.reshape(groups, -1)]
        axes = (labels, units)
    link(run, units, bias)
    padding = call.argument("padding", 0)
    padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
    constants = _read_constants(run, values, axis) if not (padded or transposed) else torch.zeros(len(labels))
    _record(run, read.tensor, labels, units, constants, kernel, positions, groups, bias is not None, axes)
    return [Tag(spread_along(units, axis, output.ndim))]


@rule("addmm", "mm", "linear", "bmm", "baddbmm", "matmul", "_addmm_activation")
def multiply(run: LabelledRun, call: Call) -> Tags:
    """A matrix product, possibly with a weight."""
    if call.name in ("addmm", "baddbmm", "_addmm_activation"):
        bias, one, other = call.args[:3]
    else:
        bias, (one, other) = None, call.args[:2]
    if run.is_value(one) and not run.is_value(other):
        return _multiply_weight(run, call, one, other, bias, behind=True)
    if run.is_value(other) and not run.is_value(one):
        return _multiply_weight(run, call, other, one, bias, behind=False)
    if not run.is_value(one):
        return keep_all(run, call)
    if run.is_value(bias):
        run.keep(run.tag(bias).labels, "it is added to a product of two values")
    return multiply_values(run, call, one, other)


def _multiply_weight(
    run: LabelledRun, call: Call, values: Tensor, weight: Tensor, bias: Tensor | None, *, behind: bool
) -> Tags:
    """x W if `behind`, else W x."""
    ndim = values.ndim
    joined, free = (ndim - 1, ndim - 2) if behind else (ndim - 2, ndim - 1)
    read = run.parameters.locate(weight, weight.ndim - 2 if behind else weight.ndim - 1)
    given = run.parameters.locate(weight, weight.ndim - 1 if behind else weight.ndim - 2)
    tag = run.tag(values)
    if free in tag.varying and joined not in tag.varying:
        run.keep(tag.labels, "a product of matrices runs along another axis than its channels")
    labels = read_axis(run, values, joined, MEETS)
    axis = call.output.ndim - (1 if behind else 2)
    single = weight.shape[weight.ndim - 1 if behind else weight.ndim - 2] == 1
    if read is None or (given is None and not single) or prod(weight.shape[:-2]) > 1 or (read == given):
        if len(labels) == 1 and given is not None:
            return _project_one(run, call, given, bias, axis)
        return _leave(run, call, labels, axis, SEVERAL if run.parameters.owns(weight) else COMPUTED)
    pair(run, run.parameters.label_axis(read), labels)
    units = _label_outputs(run, given, 1, 1)
    if isinstance(bias, Tensor):
        _link_bias(run, bias, units, axis, call.output.ndim)
    positions = call.output.numel() // (call.output.shape[axis] * run.rows)
    constants = _read_constants(run, values, joined)
    biased = isinstance(bias, Tensor)
    _record(run, read.tensor, labels, units, constants, 1, max(positions, 1), 1, biased, (labels, units))
    return [Tag(spread_along(units, axis, call.output.ndim))]


def _project_one(run: LabelledRun, call: Call, given: Axis, bias: Any, axis: int) -> Tags:
    """A single input channel, whose axis is irrelevant."""
    units = run.parameters.label_axis(given)
    if isinstance(bias, Tensor):
        _link_bias(run, bias, units, axis, call.output.ndim)
    none = torch.full((1,), float(NONE), dtype=torch.float64)
    positions = max(call.output.numel() // run.rows // len(units), 1)
    _record(run, given.tensor, none, units, torch.zeros(1), 1, positions, 1, bias is not None, (units,))
    return [Tag(spread_along(units, axis, call.output.ndim))]


@rule("embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm")
def embed(run: LabelledRun, call: Call) -> Tags:
    weight = call.args[0]
    given, rows = run.parameters.locate(weight, 1), run.parameters.locate(weight, 0)
    if given is None or rows is None or call.name == "embedding_renorm":
        return keep_all(run, call)
    for other in call.tensors[1:]:
        run.keep(run.tag(other).labels, "an embedding is looked up by it")
    units = run.parameters.label_axis(given)
    run.keep(run.parameters.label_axis(rows), "an embedding looks it up by its number")
    none = torch.full((1,), float(NONE), dtype=torch.float64)
    _record(run, given.tensor, none, units, torch.zeros(1), 1, 0, 1, True, ())
    axis = call.output.ndim - 1
    return [Tag(spread_along(units, axis, call.output.ndim)), *[None] * (len(list_outputs(call.outputs)) - 1)]


def _label_outputs(run: LabelledRun, given: Axis | None, size: int, groups: int) -> Tensor:
    """Labels of the outputs: those of an axis of the weight, for a transposed convolution once per group."""
    if given is None:
        return run.labels.fresh(size * groups)
    return run.parameters.label_axis(given, groups).flatten()


def _filter(run: LabelledRun, read: Axis, labels: Tensor, size: int) -> Tensor:
    """A depthwise convolution: outputs have the units of the inputs."""
    units = run.parameters.label_axis(read)
    repeated = labels.repeat_interleave(size // len(labels))
    if len(units) != size:  # transposed: the weight has one entry per input channel
        pair(run, units, labels)
        return repeated
    pair(run, units, repeated)
    return units


def _leave(run: LabelledRun, call: Call, labels: Tensor, axis: int, why: str = COMPUTED) -> Tags:
    """A weight that is not a parameter, or several in one: its inputs and outputs must stay."""
    run.keep(labels, f"it is read by a layer, and {why}")
    name, module = run.module
    if all(each.name != name for each in run.left_alone):
        run.left_alone.append(LeftAlone(name, type(module).__name__, call.output.shape[axis], why))
    return [blank(call.output.ndim)]


def _link_bias(run: LabelledRun, bias: Tensor, units: Tensor, axis: int, ndim: int) -> None:
    if bias.shape[-1] == len(units) and axis == ndim - 1 and bias.numel() == len(units):
        link(run, units, bias)
    elif run.is_value(bias):
        pair(run, read_axis(run, bias, bias.ndim - 1, MEETS), units)
    else:
        run.keep(units, "what is added to it has another shape")


def _read_constants(run: LabelledRun, values: Tensor, axis: int) -> Tensor:
    """The constants that removed channels leave, if they are the same at all positions."""
    rest = run.tag(values).rest
    size = values.shape[axis]
    if rest is None or any(at != axis for at, length in enumerate(rest.shape) if length > 1):
        return torch.zeros(size)
    return along(rest, axis, size)[:, 0]


def _record(
    run: LabelledRun,
    tensor: str,
    inputs: Tensor,
    outputs: Tensor,
    constants: Tensor,
    kernel: int,
    positions: int,
    groups: int,
    biased: bool,
    axes: tuple[Tensor, ...],
) -> None:
    owner = run.parameters.find_module(tensor)
    own = owner is not None
    module = run.model.get_submodule(owner or "")
    biased = biased or (own and getattr(module, "bias", None) is not None)  # the bias may be added by another call
    name = owner or tensor
    running, _ = run.module
    kind = type_before_parametrizations(module).__name__ if own else "Parameter"
    alone = own and running == owner and isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    macs = kernel * positions * len(inputs) * len(outputs) // groups
    run.multiplications.append(
        Multiplication(tensor, name, kind, inputs, outputs, constants, kernel, positions, groups, biased, alone)
    )
    if positions:
        run.costs.append(Cost(name, macs, axes))

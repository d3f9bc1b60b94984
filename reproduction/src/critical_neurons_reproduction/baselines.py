"""Baselines: plans that remove the same number of units per layer, ranked by weights, gradients or activations.

Random and critical removal are `Plan.random` and `Plan.critical`. A unit shared by several layers is ranked by the
sum over them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.core.batch import check_classes, gather_batch
from critical_neurons.core.network import Relu
from critical_neurons.core.structure import NO_UNIT, Floats, choose_highest
from critical_neurons.errors import InvalidInputError, InvalidSettingError, PlanMismatchError
from critical_neurons.readers import copy_for_reading, run_model
from critical_neurons.removal.metrics import count_parameters
from critical_neurons.structure import fingerprint, unwrap

BATCH_SIZE = 128
"""Batch size of forward and backward passes. Results do not depend on it."""

ROUNDING = 1e-9
"""Added to share x count before rounding down, so that 0.29 of 100 weights are 29."""


def plan_by_norm(plan: cn.Plan, model: nn.Module, *, norm: Literal[1, 2]) -> cn.Plan:
    """Magnitude pruning: remove the units whose incoming weights have the smallest L1 or L2 norm.

    Biases and the scaling by a batch norm are ignored.
    """
    if norm not in (1, 2):
        raise InvalidSettingError(f"plan_by_norm: norm={norm!r}. Accepted: 1 or 2.")
    source = _check_architecture(model, plan)
    return plan.preferred(
        _add_up(
            plan,
            {
                layer.name: torch.linalg.vector_norm(_incoming(source, layer.name).double(), ord=norm, dim=1)
                for layer in plan.structure.removable
            },
        ),
        f"smallest L{norm} norm of incoming weights removed",
    )


def plan_by_sensitivity(
    plan: cn.Plan, model: nn.Module, inputs: Any, labels: Any = None, *, kept: float | None = None
) -> cn.Plan:
    """SNIP by unit: remove the units whose incoming weights have the smallest summed connection sensitivity.

    Every layer keeps as many units as in the plan. With `kept`, this share of all units is kept instead, ranked
    globally as SNIP ranks connections; no layer loses all its units.
    """
    if kept is not None:
        _check_share("plan_by_sensitivity", kept)
    sensitivity = measure_sensitivity(_check_architecture(model, plan), inputs, labels)
    unknown = [layer.name for layer in plan.structure.removable if layer.name not in sensitivity]
    if unknown:
        raise PlanMismatchError(
            f"{', '.join(unknown)}: no weights to compute a sensitivity for. Accepted: linear layers, convolutions."
        )
    preference = _add_up(
        plan, {layer.name: sensitivity[layer.name].flatten(1).sum(1) for layer in plan.structure.removable}
    )
    if kept is not None:
        return _choose_over_layers(plan, preference, kept)
    return plan.preferred(preference, "smallest summed connection sensitivity removed")


def plan_by_activation(plan: cn.Plan, model: nn.Module, inputs: Any) -> cn.Plan:
    """Remove the units with the smallest mean activation after the ReLU, over data points and positions."""
    source = _check_architecture(model, plan)
    rows = gather_batch(inputs).inputs
    network = cn.read_network(source, torch.from_numpy(rows[:1]), start=plan.span.start, stop=plan.span.stop)
    read = rows if plan.span.whole else run_model(source, rows, plan.span).inputs
    means = np.zeros(network.unit_count + 1)  # the last entry collects NO_UNIT
    for at in range(0, len(read), BATCH_SIZE):
        values = network.evaluate(read[at : at + BATCH_SIZE])
        for op, value in zip(network.ops, values, strict=True):
            if isinstance(op, Relu):
                units = np.broadcast_to(op.units, op.shape)
                elements = np.bincount(units.ravel() - NO_UNIT)[units - NO_UNIT]
                # a clipped ReLU is read as two ReLUs of one name: the second one subtracts the excess
                sign = -1 if getattr(network.ops[op.source], "name", None) == op.name else 1
                np.add.at(means, units, sign * value.sum(axis=0) / elements / len(rows))
    preference = np.zeros(plan.structure.unit_count + 1)
    layers = {layer.name: layer.units for layer in network.layers}
    for layer in plan.structure.layers:  # matched by layer name: the network may number its units differently
        preference[layer.units] = means[layers[layer.name]]
    return plan.preferred(preference[:-1], "smallest mean activation removed")


def mask_connections(
    model: nn.Module, inputs: Any, labels: Any = None, *, kept: float = 0.45
) -> dict[tuple[str, str], Tensor]:
    """SNIP: masks that keep the share `kept` of all weights, those with the highest connection sensitivity globally.

    Keys are names of module and parameter, as in `plan.as_masks`, for `torch.nn.utils.prune`. Biases and batch norms
    are not masked and do not count.
    """
    _check_share("mask_connections", kept)
    source = unwrap(model)
    sensitivity = measure_sensitivity(source, inputs, labels)
    flat = torch.cat([values.flatten() for values in sensitivity.values()])
    chosen = choose_highest(flat.numpy(), math.floor(kept * len(flat) + ROUNDING))
    parts = torch.split(torch.from_numpy(chosen), [values.numel() for values in sensitivity.values()])
    masks = {}
    for (name, values), part in zip(sensitivity.items(), parts, strict=True):
        weight = source.get_submodule(name).get_parameter("weight")
        masks[name, "weight"] = part.reshape(values.shape).to(weight)
    return masks


def _put_outputs_first(module: nn.Module, values: Tensor) -> Tensor:
    """Transposed convolutions store weights as (inputs, outputs / groups, ...); reorder to (outputs, inputs, ...)."""
    if not isinstance(module, nn.modules.conv._ConvTransposeNd):
        return values
    dealt = values.reshape(module.groups, -1, *values.shape[1:])
    return dealt.movedim(2, 1).flatten(0, 1)


def measure_sensitivity(model: nn.Module, inputs: Any, labels: Any = None) -> dict[str, Tensor]:
    """Connection sensitivity, |gradient x weight| normalised to sum 1, of linear layers and convolutions; in float64.

    The loss is the mean cross-entropy over the labelled data points, in evaluation mode; the model's outputs are
    logits.
    """
    batch = gather_batch(inputs, labels)
    if batch.labels is None:
        raise InvalidInputError("labels: none given. Connection sensitivity needs the label of every data point.")
    exact = copy_for_reading(unwrap(model))
    weights = {
        name: module.weight.requires_grad_()
        for name, module in exact.named_modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    }
    if not weights:
        raise InvalidInputError("model: found no linear layer and no convolution, so no connections.")
    rows, targets = torch.from_numpy(batch.inputs).double(), torch.from_numpy(batch.labels)
    gradients = [torch.zeros_like(weight) for weight in weights.values()]
    with torch.enable_grad():
        for part, wanted in zip(torch.split(rows, BATCH_SIZE), torch.split(targets, BATCH_SIZE), strict=True):
            outputs = exact(part)
            check_classes(wanted.numpy(), outputs.shape[1])
            loss = functional.cross_entropy(outputs, wanted, reduction="sum") / len(rows)
            for total, further in zip(gradients, torch.autograd.grad(loss, list(weights.values())), strict=True):
                total += further
    products = [
        _put_outputs_first(exact.get_submodule(name), (gradient * weight.detach()).abs())
        for gradient, (name, weight) in zip(gradients, weights.items(), strict=True)
    ]
    whole = sum(float(product.sum()) for product in products)
    if not 0 < whole < math.inf:
        raise InvalidInputError(
            f"model: its summed connection sensitivity is {whole}. Accepted: a positive number; are all activations "
            "zero, or is the loss not finite?"
        )
    return {name: product / whole for name, product in zip(weights, products, strict=True)}


def share_of_units(plan: cn.Plan) -> float:
    """Share of the units that is removed. A unit shared by several layers counts once."""
    return float(1 - plan.stays[:-1].mean())


def share_as_published(model: nn.Module, plan: cn.Plan) -> float:
    """Parameters removed as the authors count them: incoming weights of removed units, as a share of all.

    Biases and outgoing weights of removed units do not count as removed.
    """
    source = _check_architecture(model, plan)
    removed = sum(
        len(layer.removed) * _incoming(source, layer.name).shape[1] for layer in plan.layers if len(layer.removed)
    )
    return removed / count_parameters(source)


def share_of_parameters(model: nn.Module, plan: cn.Plan, example: Any) -> float:
    """Share of the parameters that `cn.prune` actually removes."""
    return 1 - count_parameters(cn.prune(model, plan, example)) / count_parameters(unwrap(model))


def _choose_over_layers(plan: cn.Plan, preference: Floats, kept: float) -> cn.Plan:
    """Keep a share of all units, and at least `group.least` of every group; counts are rounded up to a multiple of
    the group's blocks."""
    groups = plan.structure.groups
    secured = np.concatenate([each.choose(preference[each.units], each.least) for each in groups])
    count = max(int(secured.sum()), math.floor(kept * len(preference) + ROUNDING))
    stays = np.append(choose_highest(np.where(secured, np.inf, preference), count), True)  # the last entry: NO_UNIT
    for each in groups:
        wanted = each.blocks * math.ceil(stays[each.units].sum() / each.blocks)
        stays[each.units] = each.choose(preference[each.units], wanted)
    rule = f"highest summed connection sensitivity, {kept:.4g} of the units kept, overall"
    reasons = {layer.name: rule for layer in plan.structure.removable}
    return replace(plan, stays=stays, reasons=reasons, rule=rule)


def _check_share(where: str, kept: float) -> None:
    if isinstance(kept, bool) or not isinstance(kept, Real) or not 0 < kept <= 1:
        raise InvalidSettingError(f"{where}: kept={kept!r}. Accepted: a share above 0 and up to 1.")


def _incoming(model: nn.Module, name: str) -> Tensor:
    """The weights of a layer, (channels, incoming weights per channel)."""
    weight: Tensor = model.get_submodule(name).get_parameter("weight").detach()
    return weight.flatten(1).cpu()


def _add_up(plan: cn.Plan, values: dict[str, Tensor]) -> Floats:
    """Sum values per channel to values per unit."""
    total = np.zeros(plan.structure.unit_count + 1)  # the last entry collects NO_UNIT
    for layer in plan.structure.removable:
        np.add.at(total, layer.units, values[layer.name].numpy())
    return total[:-1]


def _check_architecture(model: nn.Module, plan: cn.Plan) -> nn.Module:
    source = unwrap(model)
    if fingerprint(source).architecture != plan.architecture:
        raise PlanMismatchError(
            "the plan was made for another network: names or shapes of the parameters differ from this model's. "
            "Score this model and make a new plan."
        )
    return source

"""Removal: nn.Module and plan to a new, smaller module. The given module is left as it is."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.network import Bools, Floats, Layer, Network
from critical_neurons.core.plan import LayerPlan, Plan
from critical_neurons.errors import PlanMismatchError, PruningError

REMOVAL_TOLERANCE = 1e-9
"""Largest relative difference, in float64, between the outputs of the masked and of the smaller model."""


def remove_units(model: nn.Module, network: Network, plan: Plan) -> nn.Module:
    """A copy of `model` without the removed units: same class, names, dtype, device and mode."""
    stays = units_that_stay(network, plan)
    smaller = copy.deepcopy(model)
    for wiring in network.wirings:
        inputs, outputs = stays[wiring.inputs], stays[wiring.outputs]
        if not (inputs.all() and outputs.all()):
            module = smaller.get_submodule(wiring.module)
            if (wiring.shifted & ~inputs).any():
                _fold(module, np.where(inputs, 0.0, wiring.constants))
            _slice(module, _numbers(inputs), _numbers(outputs))
    return smaller


def check_removal(masked: nn.Module, smaller: nn.Module, example: Tensor) -> None:
    """Both models, in float64 on the CPU, must give the same outputs."""
    with torch.no_grad():
        expected = masked(example)
        try:
            found = smaller(example)
        except RuntimeError as error:
            raise PruningError(
                f"the smaller model does not run ({str(error).splitlines()[0]}). Is a size written into its forward?"
            ) from error
    difference = float((expected - found).abs().max())
    if not difference <= REMOVAL_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise PruningError(
            f"the smaller model gives other outputs than the masked one (difference {difference:.2e})."
        )


def units_that_stay(network: Network, plan: Plan) -> Bools:
    """One entry per unit of the network, and a last one, True, that answers for NO_UNIT.

    The network may number its units otherwise than the plan, which may leave layers out: names and channels count.
    """
    stays = np.ones(network.unit_count + 1, dtype=bool)
    layers = {layer.name: layer for layer in network.layers}
    for planned in plan.layers:
        layer = layers.get(planned.name)
        if len(planned.removed) and (layer is None or not layer.scored):
            reason = layer.reason if layer is not None else "there is no such layer"
            raise PlanMismatchError(f"{planned.name}: the plan removes units of it, but they must stay: {reason}.")
        if layer is not None:
            stays[layer.units[planned.removed]] = False
    for planned in plan.layers:
        if planned.name in layers:
            _check_layer(layers[planned.name], planned, stays)
    return stays


def _check_layer(layer: Layer, planned: LayerPlan, stays: Bools) -> None:
    """The layer loses what the plan says, and as much in every block."""
    if not np.array_equal(np.flatnonzero(stays[layer.units]), planned.kept):
        raise PlanMismatchError(f"{layer.name}: the plan keeps channels of it that it shares with removed ones.")
    if len(planned.removed) == 0:
        return
    counts = np.bincount(planned.kept * layer.blocks // layer.size, minlength=layer.blocks)
    if len(set(counts.tolist())) > 1:
        raise PlanMismatchError(
            f"{layer.name}: the plan keeps {', '.join(map(str, counts))} channels of its blocks; a grouped "
            "convolution needs as many of each."
        )


def _numbers(stays: Bools) -> Tensor:
    return torch.from_numpy(np.flatnonzero(stays))


def _fold(module: nn.Module, constants: Floats) -> None:
    """Add to the bias what the removed inputs still carry: the same number at every position."""
    weight = module.get_parameter("weight")
    exact = weight.detach().double()
    carried = torch.from_numpy(constants).to(exact)
    kernel = exact.flatten(2).sum(2) if exact.ndim > 2 else exact
    groups = getattr(module, "groups", 1)
    blocks = kernel.reshape(groups, -1, kernel.shape[1]) @ carried.reshape(groups, -1, 1)
    bias = blocks.reshape(-1)
    if module.bias is not None:
        bias = bias + module.get_parameter("bias").detach()
    module.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)


def _slice(module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
    """Keep only these input and output channels."""
    match module:
        case nn.Linear():
            _replace(module, "weight", outputs)
            _replace(module, "weight", inputs, axis=1)
            _replace(module, "bias", outputs)
            module.in_features, module.out_features = len(inputs), len(outputs)
        case nn.Conv1d() | nn.Conv2d():
            _slice_convolution(module, inputs, outputs)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            for name in ("weight", "bias", "running_mean", "running_var"):
                _replace(module, name, outputs)
            module.num_features = len(outputs)
        case _:
            raise PruningError(f"{type(module).__name__}: its channels cannot be removed.")


def _slice_convolution(module: nn.Conv1d | nn.Conv2d, inputs: Tensor, outputs: Tensor) -> None:
    """The weight of an output channel spans the input channels of its group only."""
    per_group = module.in_channels // module.groups
    group_of_output = outputs // (module.out_channels // module.groups)
    if per_group == 1:
        groups = len(inputs)
        _replace(module, "weight", outputs)
    else:
        groups = module.groups
        kept = (inputs % per_group).reshape(groups, -1)[group_of_output]
        weight = module.weight.detach()[outputs.to(module.weight.device)]
        index = kept.reshape(*kept.shape, *[1] * (weight.ndim - 2)).expand(-1, -1, *weight.shape[2:])
        sliced = weight.gather(1, index.to(weight.device))
        module.weight = nn.Parameter(sliced, requires_grad=module.weight.requires_grad)
    _replace(module, "bias", outputs)
    module.in_channels, module.out_channels, module.groups = len(inputs), len(outputs), groups


def _replace(module: nn.Module, name: str, numbers: Tensor, axis: int = 0) -> None:
    old = getattr(module, name)
    if old is None:
        return
    new = old.detach().index_select(axis, numbers.to(old.device)).clone()
    setattr(
        module, name, nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    )

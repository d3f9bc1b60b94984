"""Pruning: nn.Module and plan to a new module, smaller or masked. The given module is left as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.errors import PlanMismatchError, PruningError
from critical_neurons.network import NO_UNIT, Bools, Network
from critical_neurons.plans import Plan

REMOVAL_TOLERANCE = 1e-9
"""Largest relative difference, in float64, between the outputs of the masked and of the smaller model."""


def remove_units(model: nn.Module, network: Network, plan: Plan) -> nn.Module:
    """A copy of `model` without the removed units: same class, names, dtype, device and mode."""
    stays = _units_that_stay(network, plan)
    smaller = copy.deepcopy(model)
    for wiring in network.wirings:
        inputs, outputs = stays[wiring.inputs], stays[wiring.outputs]
        if not (inputs.all() and outputs.all()):
            _slice(smaller.get_submodule(wiring.module), _numbers(inputs), _numbers(outputs))
    return smaller


def hold_at_zero(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of `model` of the same size in which the activations of the removed units are zero.

    The pre-activations are set to zero where they were computed last, and a ReLU leaves zero as it is.
    """
    masked = copy.deepcopy(model)
    for layer in plan.layers:
        if len(layer.removed) and not layer.held_at:
            raise PlanMismatchError(
                f"{layer.name}: the plan removes units of it, but they must stay: {layer.reason}."
            )
        if len(layer.removed):
            masked.get_submodule(layer.held_at).register_forward_hook(_Hold(torch.from_numpy(layer.removed)))
    return masked


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


@dataclass(frozen=True)
class _Hold:
    """A forward hook that sets channels of the output to zero."""

    channels: Tensor

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.index_fill(1, self.channels.to(output.device), 0.0)


def _units_that_stay(network: Network, plan: Plan) -> Bools:
    """One entry per unit, and a last one, True, that answers for NO_UNIT."""
    stays: Mapping[str, Bools] = {layer.name: np.ones(layer.size, dtype=bool) for layer in network.scored}
    for name, removed in plan.removed.items():
        if name not in stays:
            reason = next((layer.reason for layer in network.layers if layer.name == name), "there is no such layer")
            raise PlanMismatchError(f"{name}: the plan removes units of it, but they must stay: {reason}.")
        stays[name][removed] = False
    assert NO_UNIT == -1
    return np.append(network.join(stays), True)


def _numbers(stays: Bools) -> Tensor:
    return torch.from_numpy(np.flatnonzero(stays))


def _slice(module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
    """Keep only these input and output channels."""
    match module:
        case nn.Linear():
            _slice_weights(module, inputs, outputs)
            module.in_features, module.out_features = len(inputs), len(outputs)
        case nn.Conv1d() | nn.Conv2d():
            _slice_weights(module, inputs, outputs)
            module.in_channels, module.out_channels = len(inputs), len(outputs)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            for name in ("weight", "bias", "running_mean", "running_var"):
                _replace(module, name, outputs)
            module.num_features = len(outputs)
        case _:
            raise PruningError(f"{type(module).__name__}: its channels cannot be removed.")


def _slice_weights(module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
    _replace(module, "weight", outputs)
    _replace(module, "weight", inputs, axis=1)
    _replace(module, "bias", outputs)


def _replace(module: nn.Module, name: str, numbers: Tensor, axis: int = 0) -> None:
    old = getattr(module, name)
    if old is None:
        return
    new = old.detach().index_select(axis, numbers.to(old.device)).clone()
    setattr(
        module, name, nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    )

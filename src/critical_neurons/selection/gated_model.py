"""Gated model: a model in which every unit is multiplied by a gate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from critical_neurons.core.structure import NO_UNIT, SIZE, Ints, Slice, Structure, Wiring
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.rows import Inputs, split_arguments
from critical_neurons.selection.distance import list_outputs


@dataclass(frozen=True, eq=False)
class _GatedParameter:
    """A parameter, and the units whose gates multiply it, broadcast to its shape."""

    name: str
    values: Tensor
    units: Tensor


class GatedModel:
    """A gate multiplies the weights of the layers that read its unit or, without such, the unit's own parameters.

    Gating weights instead of activations works for any model: shared modules, functions, attention. The constant that
    a removed unit leaves is added to the readers' biases, times 1 - gate.
    """

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        self.unit_count = structure.unit_count
        self.module = copy_whole(model).eval().requires_grad_(False)
        readers = [wiring for wiring in structure.wirings if wiring.kernel and not wiring.depthwise]
        self._leaving = [wiring for wiring in readers if wiring.constants.any()]
        for wiring in self._leaving:
            module = self.module.get_submodule(wiring.module)
            if module.bias is None:
                zeros = module.get_parameter("weight").new_zeros(len(wiring.outputs))
                module.bias = nn.Parameter(zeros, requires_grad=False)
        self._gated = [self._gate_weight(wiring) for wiring in readers if (wiring.inputs != NO_UNIT).any()]
        read = np.unique(np.concatenate([np.full(1, NO_UNIT), *(wiring.inputs for wiring in readers)]))
        unread = np.setdiff1d(np.arange(self.unit_count), read)
        named = dict(self.module.named_parameters())
        self._gated += [
            self._gate_slice(each, unread)
            for each in structure.slices
            if each.tensor in named
            and each.axis != SIZE
            and each.units.ndim == 1
            and np.isin(each.units, unread).any()
        ]

    def _gate_weight(self, wiring: Wiring) -> _GatedParameter:
        module = self.module.get_submodule(wiring.module)
        weight, units = module.get_parameter("weight"), torch.from_numpy(wiring.inputs)
        trailing = (1,) * (weight.ndim - 2)
        if getattr(module, "transposed", False):
            index = units.reshape(-1, 1, *trailing)
        else:
            grouped = units.reshape(wiring.groups, 1, -1).expand(-1, len(weight) // wiring.groups, -1)
            index = grouped.reshape(len(weight), -1, *trailing)
        return _GatedParameter(f"{wiring.module}.weight", weight, index.to(weight.device))

    def _gate_slice(self, each: Slice, unread: Ints) -> _GatedParameter:
        owner, _, key = each.tensor.rpartition(".")
        values: Tensor = getattr(self.module.get_submodule(owner), key)
        units = torch.from_numpy(np.where(np.isin(each.units, unread), each.units, NO_UNIT))
        shape = [1] * values.ndim
        shape[each.axis] = -1
        return _GatedParameter(each.tensor, values, units.reshape(shape).to(values.device))

    def run(self, inputs: Inputs, gates: Tensor) -> list[Tensor]:
        """The model's outputs with these gates."""
        factors = torch.cat([gates, gates.new_ones(1)])  # the last entry is that of NO_UNIT
        changed: dict[str, Tensor] = {}
        for each in self._gated:
            values = changed.get(each.name, each.values)
            changed[each.name] = values * factors[each.units].to(values)
        for wiring in self._leaving:
            changed[f"{wiring.module}.bias"] = self._leave(wiring, factors)
        return list_outputs(functional_call(self.module, changed, *split_arguments(inputs)))

    def _leave(self, wiring: Wiring, factors: Tensor) -> Tensor:
        """The bias plus the constants of closed gates."""
        module = self.module.get_submodule(wiring.module)
        weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
        shut = (1 - factors[torch.from_numpy(wiring.inputs)]) * torch.from_numpy(wiring.constants).to(factors)
        kernel = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
        blocks = kernel.reshape(wiring.groups, -1, kernel.shape[1]) @ shut.to(kernel).reshape(wiring.groups, -1, 1)
        return bias + blocks.reshape(-1)

"""Masks: nn.Module and plan to a new module of the same size. The given module is left as it is."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.plan import Plan


def hold_at_zero(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of `model` of the same size in which the activations of the removed units are zero.

    The pre-activations are set to zero where they were computed last, and a ReLU leaves zero as it is.
    """
    masked, stays = copy.deepcopy(model), plan.stays
    for hold in plan.holds:
        channels = np.flatnonzero(~stays[hold.units])
        if len(channels):
            masked.get_submodule(hold.module).register_forward_hook(_Hold(torch.from_numpy(channels)))
    return masked


@dataclass(frozen=True)
class _Hold:
    """A forward hook that sets channels of the output to zero."""

    channels: Tensor

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.index_fill(1, self.channels.to(output.device), 0.0)

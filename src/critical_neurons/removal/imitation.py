"""Imitation: how far what the smaller model gives, and what its last layer reads, is from the original's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Bools, Structure
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.refit.im2col import find_channel_axis
from critical_neurons.removal.refit.least_squares import is_refittable
from critical_neurons.removal.rows import Inputs, call_model, map_inputs

Loss: TypeAlias = Callable[[Any, Any], Tensor]

FEATURES = 0.5
"""The weight of what the last layer reads: squared differences relative to its variance."""


@dataclass(frozen=True)
class LastLayer:
    """The last module that multiplies with weights, and which of the original's input channels it still has."""

    module: str
    kept: Tensor


@dataclass(frozen=True)
class Aim:
    """Functions of what the smaller model and the original give: `loss` is followed downwards, `judge` decides which
    weights are taken. With `last`, what that layer reads is to agree as well."""

    loss: Loss
    judge: Callable[[Any, Any], float | Tensor]
    last: LastLayer | None = None


def find_last_layer(smaller: nn.Module, structure: Structure, stays: Bools) -> LastLayer | None:
    """None where hooks would not see what it reads, or nothing is to be seen."""
    wiring = next((each for each in reversed(structure.wirings) if each.kernel), None)
    if wiring is None or not wiring.alone or not is_refittable(smaller.get_submodule(wiring.module)):
        return None
    return LastLayer(wiring.module, torch.from_numpy(np.flatnonzero(stays[wiring.inputs])))


class Imitation:
    """Copies of both models, in evaluation mode; the weights of the smaller one are to be trained."""

    def __init__(self, original: nn.Module, smaller: nn.Module, aim: Aim) -> None:
        self.original, self.smaller = (_widen(copy_whole(each)).eval() for each in (original, smaller))
        self.original.requires_grad_(False)
        self.weights = [each for each in self.smaller.parameters() if each.is_floating_point()]
        for each in self.weights:
            each.requires_grad_(True)
        self._aim = aim
        self._read: dict[nn.Module, Tensor] = {}
        if aim.last is not None:
            for model in (self.original, self.smaller):
                model.get_submodule(aim.last.module).register_forward_pre_hook(self._remember, with_kwargs=True)

    def lay_out(self, layout: torch.memory_format) -> None:
        """Weights of convolutions, and so what these give."""
        for model in (self.original, self.smaller):
            model.to(memory_format=layout)  # type: ignore[call-overload]

    def miss(self, inputs: Inputs) -> Tensor:
        """What training makes small, the mean over inputs."""
        missed = self._aim.loss(*self._run(inputs))
        if self._aim.last is not None:
            wanted, found = (
                self._read.pop(model.get_submodule(self._aim.last.module), None)
                for model in (self.original, self.smaller)
            )
            if wanted is not None and found is not None:
                missed = missed + FEATURES * self._compare_features(wanted, found, self._aim.last)
        return missed

    def judge(self, inputs: Inputs) -> float:
        with torch.no_grad():
            worth = float(self._aim.judge(*self._run(inputs)))
        self._read.clear()
        return worth

    def _run(self, inputs: Inputs) -> tuple[Any, Any]:
        """What the smaller model gives, and the original. Both draw the same random numbers, if they draw any; both
        may change their inputs in place."""
        state = torch.get_rng_state()
        with torch.no_grad():
            wanted = call_model(self.original, map_inputs(inputs, Tensor.clone))
        torch.set_rng_state(state)
        return call_model(self.smaller, map_inputs(inputs, Tensor.clone)), wanted

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read[module] = args[0] if args else kwargs["input"]

    def _compare_features(self, wanted: Tensor, found: Tensor, last: LastLayer) -> Tensor:
        axis = find_channel_axis(self.smaller.get_submodule(last.module), wanted)
        wanted = wanted.index_select(axis, last.kept.to(wanted.device))
        if wanted.shape != found.shape:  # a model may go other ways when it is smaller
            return found.new_zeros(())
        return (found - wanted).square().mean() / wanted.var(correction=0).clamp(min=torch.finfo(wanted.dtype).tiny)


def _widen(model: nn.Module) -> nn.Module:
    """In single precision where it has less: small steps would be lost to rounding."""
    coarse = any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    return model.float() if coarse else model

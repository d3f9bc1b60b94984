"""Imitation: the distillation loss, on the outputs and on the inputs of some layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.core.structure import Bools, Structure
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.refit.least_squares import is_refittable
from critical_neurons.removal.rows import Inputs, call_model, map_inputs

OutputLoss: TypeAlias = Callable[[Any, Any], Tensor]

LAST_LAYER, STREAMS = 0.5, 10.0
"""Weights of the squared differences, relative to the variance, of the last layer's input and of those of other
layers on average."""


@dataclass(frozen=True)
class StreamReader:
    """A linear layer or convolution whose input is compared, and whether it is the last one."""

    module: str
    last: bool


@dataclass(frozen=True)
class Aim:
    """`loss`, of the outputs of both models, is minimised and decides which weights are returned. The inputs of the
    `readers` are matched as well."""

    loss: OutputLoss
    readers: tuple[StreamReader, ...] = ()


def find_readers(smaller: nn.Module, structure: Structure, stays: Bools) -> tuple[StreamReader, ...]:
    """The layers that lost none of their input channels, such as those that read a residual stream. Only layers whose
    input a forward hook sees."""
    wirings = [each for each in structure.wirings if each.kernel]
    return tuple(
        StreamReader(each.module, each is wirings[-1])
        for each in wirings
        if stays[each.inputs].all() and each.alone and is_refittable(smaller.get_submodule(each.module))
    )


class Imitation:
    """Copies of both models in evaluation mode; the weights of the smaller one are trained."""

    def __init__(self, original: nn.Module, smaller: nn.Module, aim: Aim) -> None:
        self.original, self.smaller = (_widen(copy_whole(each)).eval() for each in (original, smaller))
        self.original.requires_grad_(False)
        self.weights = [each for each in self.smaller.parameters() if each.is_floating_point()]
        for each in self.weights:
            each.requires_grad_(True)
        self._aim = aim
        self._read: dict[nn.Module, Tensor] = {}
        for reader in aim.readers:
            for model in (self.original, self.smaller):
                model.get_submodule(reader.module).register_forward_pre_hook(self._remember, with_kwargs=True)

    def lay_out(self, layout: torch.memory_format) -> None:
        """Set the memory format of both models' weights, and so of their feature maps."""
        for model in (self.original, self.smaller):
            model.to(memory_format=layout)  # type: ignore[call-overload]

    def compute_loss(self, inputs: Inputs) -> Tensor:
        """The training loss, averaged over inputs."""
        loss = self._aim.loss(*self._run(inputs))
        for weight, last in ((LAST_LAYER, True), (STREAMS, False)):
            found = [self._compare_read(reader) for reader in self._aim.readers if reader.last == last]
            differences = [each for each in found if each is not None]
            if differences:
                loss = loss + weight * torch.stack(differences).mean()
        self._read.clear()
        return loss

    def judge(self, inputs: Inputs) -> float:
        with torch.no_grad():
            loss = float(self._aim.loss(*self._run(inputs)))
        self._read.clear()
        return loss

    def _run(self, inputs: Inputs) -> tuple[Any, Any]:
        """The outputs of the smaller model and of the original, with the same random numbers. Each gets a copy of the
        inputs, which it may change in place."""
        state = torch.get_rng_state()
        with torch.no_grad():
            wanted = call_model(self.original, map_inputs(inputs, Tensor.clone))
        torch.set_rng_state(state)
        return call_model(self.smaller, map_inputs(inputs, Tensor.clone)), wanted

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read[module] = args[0] if args else kwargs["input"]

    def _compare_read(self, reader: StreamReader) -> Tensor | None:
        """None if no trained weight affects it (the model's input), or if the smaller model takes another path."""
        module = self.smaller.get_submodule(reader.module)
        wanted = self._read.get(self.original.get_submodule(reader.module))
        found = self._read.get(module)
        if wanted is None or found is None or not found.requires_grad:
            return None
        if wanted.shape != found.shape:
            return None
        variance = wanted.var(correction=0).clamp(min=torch.finfo(wanted.dtype).tiny)
        return functional.mse_loss(found, wanted) / variance


def _widen(model: nn.Module) -> nn.Module:
    """At least single precision: in half precision small steps would be rounded away."""
    coarse = any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    return model.float() if coarse else model

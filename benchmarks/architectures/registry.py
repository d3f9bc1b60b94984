"""Registry: the description of an architecture, and how it is built and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

SEED = 0
BATCH = 2

Inputs: TypeAlias = Tensor | tuple[Any, ...] | dict[str, Any]
"""One tensor, positional arguments, or keyword arguments."""


@dataclass(frozen=True)
class Architecture:
    """`outputs` names the layers (or parameters) that compute the model's outputs and must keep their size; `heads`
    the layers that compute queries, keys and values, with their number of attention heads."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    outputs: tuple[str, ...]
    heads: Mapping[str, int] = field(default_factory=dict)

    def builder(self) -> nn.Module:
        """An untrained model in evaluation mode, the same every time.

        Normalisation layers get random statistics and scales, as after training: with the initial, equal values, a
        mistake in slicing them would go unnoticed.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(SEED)
            model = self.make().eval()
            for module in model.modules():
                if "Norm" in type(module).__name__:
                    _shake(module)
        return model

    def example(self, seed: int = SEED) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.inputs()


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output: a tensor, or tuples, lists and dicts of tensors."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def find_output_layers(architecture: Architecture, model: nn.Module) -> list[nn.Module | nn.Parameter]:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    return [modules[name] if name in modules else parameters[name] for name in architecture.outputs]


def image(side: int, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, channels, side, side)


def vector(*sizes: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *sizes)


def tokens(vocabulary: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, vocabulary, (BATCH, length))


def _shake(norm: nn.Module) -> None:
    for name, values in [*norm.named_parameters(recurse=False), *norm.named_buffers(recurse=False)]:
        if name in ("weight", "running_var"):
            values.uniform_(0.5, 1.5)
        elif name in ("bias", "running_mean"):
            values.normal_(0, 0.1)

"""Trial weights: refitted weights put into a model for as long as a trial lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Fitted:
    """Refitted weights and bias of a module."""

    weight: Tensor
    bias: Tensor


@contextmanager
def put_weights(model: nn.Module, fitted: Mapping[str, Fitted]) -> Iterator[set[nn.Module]]:
    """Put weights and biases into modules while the context lasts. Yields the modules that changed."""
    modules = {name: model.get_submodule(name) for name in fitted}
    own = {name: (module.weight.data, module.bias) for name, module in modules.items()}
    weights = {id(module.weight) for module in modules.values()}  # other modules may share them
    try:
        for name, each in fitted.items():
            modules[name].weight.data = each.weight
            modules[name].bias = nn.Parameter(each.bias, requires_grad=False)
        yield {each for each in model.modules() if weights & {id(value) for value in each._parameters.values()}}
    finally:
        for name, (weight, bias) in own.items():
            modules[name].weight.data, modules[name].bias = weight, bias

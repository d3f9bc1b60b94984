"""Copies of a model: whole, or sharing its parameters."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def copy_whole(model: nn.Module) -> nn.Module:
    """With parameters of its own. Results of an earlier run that modules keep, as an old weight norm does, are copied
    without their history."""
    return copy.deepcopy(model, _detach_results(model))


def copy_sharing(model: nn.Module) -> nn.Module:
    """With the same parameters: what is not changed need not be copied. Buffers are: a forward may write to them."""
    shared: dict[int, object] = {id(values): values for values in model.parameters()}
    return copy.deepcopy(model, _detach_results(model) | shared)


def _detach_results(model: nn.Module) -> dict[int, object]:
    """What copying fails on, and copies of it."""
    kept = (value for module in model.modules() for key, value in vars(module).items() if not key.startswith("_"))
    results = (leaf for value in kept for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return {id(each): each.detach().clone() for each in results if each.grad_fn is not None}

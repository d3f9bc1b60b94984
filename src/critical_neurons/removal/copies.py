"""Copies: of a model, with its own parameters or sharing them."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def copy_whole(model: nn.Module) -> nn.Module:
    """A deep copy. Tensors with a gradient history that modules keep from an earlier run, which torch refuses to copy
    (a hook-based weight norm has some), are detached first."""
    return copy.deepcopy(model, _copy_common(model))


def copy_sharing(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters. Buffers are copied, since a forward pass may write to them."""
    shared: dict[int, object] = {id(values): values for values in model.parameters()}
    return copy.deepcopy(model, _copy_common(model) | shared)


def _copy_common(model: nn.Module) -> dict[int, object]:
    """Copies by identity, for `deepcopy`: of what it refuses, and of what takes most of its time, the empty dicts of
    hooks and the buffers."""
    copies: dict[int, object] = {}
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if each.layout == torch.strided}
    memories = Counter(each.untyped_storage().data_ptr() for each in tensors.values())
    for module in model.modules():
        for key, value in vars(module).items():
            if type(value) in (dict, OrderedDict) and not value:
                copies[id(value)] = type(value)()
            elif not key.startswith("_") and not isinstance(value, int | str | float | None):
                copies |= {id(each): each.detach().clone() for each in _find_results(value)}
        for buffer in module._buffers.values():
            if buffer is not None and buffer.grad_fn is not None:  # written to in a run with gradients
                copies[id(buffer)] = buffer.detach().clone()
            elif buffer is not None and _is_plain(buffer) and memories[buffer.data_ptr()] == 1:
                copies[id(buffer)] = buffer.clone()
    return copies


def _find_results(value: Any) -> list[Tensor]:
    """Tensors with a gradient history."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def _is_plain(values: Tensor) -> bool:
    """Whether it is a bare tensor with its own storage."""
    return (
        type(values) is Tensor
        and values.layout == torch.strided
        and not values.requires_grad
        and not values.__dict__
        and values.untyped_storage().nbytes() == values.nbytes
    )

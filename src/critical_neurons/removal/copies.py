"""Copies: of a model, with its own parameters or sharing them."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

FIXED = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of what never changes and needs no copy."""

SPECIAL = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__slots__")
"""What a class may define to be copied in another way."""


def copy_whole(model: nn.Module) -> nn.Module:
    """A deep copy. Tensors with a gradient history that modules keep from an earlier run, which torch refuses to copy
    (a hook-based weight norm has some), are detached first."""
    return _copy(model, lambda parameters: {})


def copy_sharing(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters. Buffers are copied, since a forward pass may write to them."""
    return _copy(model, lambda parameters: {id(each): each for each in parameters})


def copy_viewing(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own in the memory of the model's: other `data` can be put into them, but they
    must not be written to. Parameters of tensor classes with a way of their own are copied."""
    return _copy(
        model,
        lambda parameters: {
            id(each): keep_class(each, each.data) for each in parameters if issubclass(type(each), nn.Parameter)
        },
    )


def keep_class(old: Tensor, new: Tensor) -> Tensor:
    """New values with the class and attributes of a parameter or buffer."""
    if isinstance(old, nn.Parameter):
        kind = type(old) if issubclass(type(old), nn.Parameter) else nn.Parameter  # a tensor class has its own way
        new = Tensor._make_subclass(kind, new, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _copy(model: nn.Module, share: Callable[[list[nn.Parameter]], dict[int, Any]]) -> nn.Module:
    """What `deepcopy` does, in less time: plain modules are copied attribute by attribute. `share` gives what takes
    the place of parameters that are not copied, by the identity of these."""
    modules = [*model.modules()]
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    buffers = [each for module in modules for each in module._buffers.values() if each is not None]
    copies = share(parameters)
    copies |= _copy_alone(buffers, parameters)
    plain = [module for module in modules if _is_plain_class(type(module))]
    copies |= {id(module): type(module).__new__(type(module)) for module in plain}
    for module in modules:
        if id(module) not in copies:
            _detach([*vars(module).values()], copies)
    for module in plain:
        state: dict[str, Any] = module.__getstate__()  # type: ignore[no-untyped-call]
        copies[id(module)].__setstate__({key: _copy_value(value, copies) for key, value in state.items()})
    return copy.deepcopy(model, copies)


def _copy_value(value: Any, copies: dict[int, Any]) -> Any:
    """`copies`: those made so far, by the identity of the original."""
    kind = type(value)
    if kind in FIXED or (kind is tuple and all(type(part) in FIXED for part in value)):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind in (dict, OrderedDict, set, list) and not value:
        return copies.setdefault(id(value), kind())
    if kind is dict:
        made = copies[id(value)] = {}
        for key, part in value.items():
            made[_copy_value(key, copies)] = _copy_value(part, copies)
        return made
    _detach(value, copies)
    return copy.deepcopy(value, copies)


def _detach(value: Any, copies: dict[int, Any]) -> None:
    """Copy the tensors with a gradient history."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone()


def _is_plain_class(kind: type[nn.Module]) -> bool:
    """Whether nothing but `__setstate__` is special about copying its modules."""
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in SPECIAL)


def _copy_alone(buffers: list[Tensor], parameters: list[nn.Parameter]) -> dict[int, Tensor]:
    """Copies of the buffers that share no memory."""
    tensors = {id(each): each for each in (*parameters, *buffers) if each.layout == torch.strided}
    memories = Counter(each.untyped_storage().data_ptr() for each in tensors.values())
    return {id(each): each.clone() for each in buffers if _is_plain(each) and memories[each.data_ptr()] == 1}


def _is_plain(values: Tensor) -> bool:
    """Whether it is a bare tensor with its own storage."""
    return (
        type(values) is Tensor
        and values.layout == torch.strided
        and not values.requires_grad
        and not values.__dict__
        and values.untyped_storage().nbytes() == values.nbytes
    )

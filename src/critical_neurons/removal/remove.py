"""Remove: a new module with only some units, smaller or masked. The given module is not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import SIZE, Bools, Slice, Structure, Wiring
from critical_neurons.errors import PruningError
from critical_neurons.removal.attention import FewerHeads, convert_attention
from critical_neurons.removal.copies import copy_sharing, keep_class
from critical_neurons.removal.parametrised import Parametrised, find_parametrised, list_parametrised


def remove_units(model: nn.Module, structure: Structure, stays: Bools) -> nn.Module:
    """A copy of `model` without the removed units: same class, names, dtype, device and mode.

    Parameters that lose nothing are shared with the model; see `own_tensors`.
    """
    smaller = copy_sharing(model)
    added = _fold_constants(smaller, structure.wirings, stays)
    with _keeping_factors(smaller, structure.slices, stays):
        _change(smaller, (*structure.slices, *added), stays, _take)
    for each in structure.slices:
        if each.axis == SIZE:
            owner, _, name = each.tensor.rpartition(".")
            setattr(smaller.get_submodule(owner), name, int(stays[each.units].sum()))
    for module in reversed(list(smaller.modules())):  # what is inside comes first
        _resize(module)
    return smaller


def has_tensors(model: nn.Module, structure: Structure) -> bool:
    """Whether the model has all tensors that units are parts of, under their names."""
    known = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return all(each.axis == SIZE or each.tensor in known for each in structure.slices)


def zero_units(
    model: nn.Module, structure: Structure, stays: Bools, *, copy: Callable[[Tensor], Tensor] = Tensor.clone
) -> nn.Module:
    """A copy of `model` of the same size in which everything that belongs to removed units is zero, except variances,
    which are one.

    Parameters that lose nothing are shared with the model; see `own_tensors`. Of the others `copy` makes copies.
    """
    masked = copy_sharing(model)
    _fold_constants(masked, structure.wirings, stays)
    with _keeping_factors(masked, structure.slices, stays):
        _change(masked, structure.slices, stays, _zero, copy=copy)
    return masked


def own_tensors(model: nn.Module, other: nn.Module) -> nn.Module:
    """Replace, in place, parameters and buffers shared with another model by copies."""
    shared = {id(values) for values in (*other.parameters(), *other.buffers())}
    return _replace(model, lambda values: values.clone() if id(values) in shared else values)


def keep_attributes(model: nn.Module, other: nn.Module) -> nn.Module:
    """Copy `requires_grad` and attributes of tensors from another model, in place."""
    known = dict(chain(other.named_parameters(), other.named_buffers()))
    for name, values in chain(model.named_parameters(), model.named_buffers()):
        if (old := known.get(name)) is not None:
            values.__dict__.update(old.__dict__)
            if values.is_leaf and old.is_leaf:
                values.requires_grad_(old.requires_grad)
    return model


def double_tensors(model: nn.Module) -> nn.Module:
    """Convert to double precision, in place; models that share parameters with it are not changed."""
    return _replace(model, lambda values: values.double() if values.is_floating_point() else values)


@torch.no_grad()
def _replace(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Convert all tensors in place, one after the other to save memory."""
    places = _list_places(model)
    while places:
        values, where = places.popitem()
        if (converted := convert(values)) is not values:
            _put(values, converted, where)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # it keeps a list of its weights
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
    return model


def _fold_constants(model: nn.Module, wirings: tuple[Wiring, ...], stays: Bools) -> list[Slice]:
    """Add to biases the constants that removed inputs leave. Returns the slices of newly created biases."""
    added: list[Slice] = []
    for wiring in wirings:
        constants = np.where(stays[wiring.inputs], 0.0, wiring.constants)
        if not constants.any():
            continue
        module = model.get_submodule(wiring.module)
        computed = find_parametrised(module)
        weight = module.get_parameter("weight") if computed is None else computed.compute()
        exact = weight.detach().double()
        carried = torch.from_numpy(constants).to(exact)
        kernel = exact.flatten(2).sum(2) if exact.ndim > 2 else exact
        blocks = kernel.reshape(wiring.groups, -1, kernel.shape[1]) @ carried.reshape(wiring.groups, -1, 1)
        bias = blocks.reshape(-1)
        if module.bias is None:
            added.append(Slice(f"{wiring.module}.bias", 0, wiring.outputs))
        else:
            bias = bias + module.get_parameter("bias").detach()
        module.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)
    return added


@contextmanager
def _keeping_factors(model: nn.Module, slices: Iterable[Slice], stays: Bools) -> Iterator[None]:
    """Slice weights under weight or spectral norm so that the computed weight is sliced too."""
    changed = {each.tensor for each in slices if each.axis != SIZE and not stays[each.units].all()}
    held: list[Parametrised] = []
    for name, each in list_parametrised(model).items():
        prefix = f"{name}." if name else ""
        if any(prefix + tensor in changed for tensor in (each.original, *each.others)):
            each.hold()
            held.append(each)
    yield
    for each in held:
        each.settle()


def _take(values: Tensor, each: Slice, stays: Bools) -> Tensor:
    """Select the indices of an axis that stay, block by block if there are blocks."""
    if each.units.ndim == 1:
        return values.index_select(each.axis, _indices(stays[each.units], values))
    kept = [_indices(stays[units], values) for units in each.units]
    if len({len(indices) for indices in kept}) > 1:
        raise PruningError(f"{each.tensor}: its groups do not lose equally many channels.")
    blocks = zip(values.chunk(len(each.units)), kept, strict=True)
    return torch.cat([block.index_select(each.axis, indices) for block, indices in blocks])


def _zero(values: Tensor, each: Slice, stays: Bools) -> Tensor:
    """In place."""
    level = 1.0 if each.tensor.rpartition(".")[2] == "running_var" else 0.0  # a batch norm divides by it
    blocks = [values] if each.units.ndim == 1 else values.chunk(len(each.units))
    for block, units in zip(blocks, each.units.reshape(len(blocks), -1), strict=True):
        block.index_fill_(each.axis, _indices(~stays[units], values), level)
    return values


def _indices(chosen: Bools, values: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen)).to(values.device)


def _change(
    model: nn.Module,
    slices: Iterable[Slice],
    stays: Bools,
    change: Callable[[Tensor, Slice, Bools], Tensor],
    *,
    copy: Callable[[Tensor], Tensor] = lambda values: values,
) -> None:
    """Replace parameters and buffers that lose elements by what `change` makes of their copies."""
    by_tensor: dict[str, list[Slice]] = {}
    for each in slices:
        if each.axis != SIZE and not stays[each.units].all():
            by_tensor.setdefault(each.tensor, []).append(each)
    places = _list_places(model)
    for name, several in by_tensor.items():
        owner, _, key = name.rpartition(".")
        old = getattr(model.get_submodule(owner), key)
        new = copy(old.detach())
        several.sort(key=lambda each: (-each.units.ndim, each.axis))  # blocks first: they divide the whole axis
        for each in several:
            new = change(new, each, stays)
        _put(old, new, places[old])


def _list_places(model: nn.Module) -> dict[Tensor, list[tuple[dict[str, Any], str]]]:
    """All places of every parameter and buffer: a shared one has several."""
    places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, values in tensors.items():
                if values is not None:
                    places.setdefault(values, []).append((tensors, name))
    return places


def _put(old: Tensor, new: Tensor, places: list[tuple[dict[str, Any], str]]) -> None:
    """Replace a tensor everywhere, keeping its class and attributes."""
    new = keep_class(old, new)
    for tensors, name in places:
        tensors[name] = new


def _resize(module: nn.Module) -> None:
    """Update the size attributes of a module from its tensors."""
    match module:
        case nn.Linear():
            module.out_features, module.in_features = _read_shape(module)
        case nn.modules.conv._ConvNd():
            first, second = _read_shape(module)[:2]
            old = module.in_channels if module.transposed else module.out_channels
            if module.groups == module.in_channels > 1 and first != old:
                module.groups = module.groups * first // old
            module.in_channels = first if module.transposed else second * module.groups
            module.out_channels = second * module.groups if module.transposed else first
        case nn.modules.batchnorm._NormBase() if module.weight is not None or module.running_mean is not None:
            module.num_features = len(module.weight if module.weight is not None else module.running_mean)
        case nn.PReLU():
            module.num_parameters = module.weight.numel()
        case nn.MultiheadAttention() if module.num_heads * module.head_dim != module.embed_dim:
            convert_attention(module)
        case nn.TransformerEncoder() if any(isinstance(each, FewerHeads) for each in module.modules()):
            module.use_nested_tensor = False
        case nn.Embedding() | nn.EmbeddingBag():
            module.embedding_dim = module.weight.shape[1]


def _read_shape(module: nn.Module) -> torch.Size:
    computed = find_parametrised(module)
    weight = module.weight if computed is None else computed.get(computed.original)
    assert isinstance(weight, Tensor)
    return weight.shape

"""Collapse: two linear layers with only an always-active ReLU between them become one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from critical_neurons.removal.links import Link


def read_affine(model: nn.Module, link: Link) -> tuple[Tensor, Tensor]:
    """Weight and bias of every pre-activation, batch norm included, in float64."""
    maker = model.get_submodule(link.maker)
    weight = maker.get_parameter("weight").detach().double()
    bias = weight.new_zeros(len(weight)) if maker.bias is None else maker.get_parameter("bias").detach().double()
    if link.norm is None:
        return weight, bias
    norm = model.get_submodule(link.norm)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    shift = -norm.running_mean.double() * scale
    if norm.affine:
        factor = norm.weight.detach().double()
        scale, shift = scale * factor, shift * factor + norm.bias.detach().double()
    return weight * scale.reshape(-1, *[1] * (weight.ndim - 1)), bias * scale + shift


def collapse_link(model: nn.Module, link: Link) -> str:
    """Replace the reader by the product of both layers. Returns why not, or an empty text on success."""
    modules = dict(model.named_modules(remove_duplicate=False))
    maker, reader = modules[link.maker], modules[link.readers[0].name]
    if not (link.plain and isinstance(maker, nn.Linear) and isinstance(reader, nn.Linear)):
        return "only linear layers with nothing but a ReLU between them collapse"
    if link.relu is None or type(modules.get(link.relu)) is not nn.ReLU:
        return "its ReLU is no module of its own, which could be taken out"
    before = [values.numel() for each in (maker, reader) for values in each.parameters()]
    if reader.out_features * (maker.in_features + 1) > sum(before):
        return "one layer in place of the two would have more parameters"
    weight, bias = read_affine(model, link)
    second = reader.weight.detach().double()
    joined = nn.Linear(maker.in_features, reader.out_features, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        joined.weight.copy_(second @ weight)
        joined.bias.copy_(second @ bias + (0.0 if reader.bias is None else reader.bias.detach().double()))
    joined.requires_grad_(reader.weight.requires_grad).train(reader.training)
    for name in filter(None, (link.maker, link.norm, link.relu)):
        _replace(model, name, nn.Identity())
    _replace(model, link.readers[0].name, joined.to(reader.weight.dtype))
    return ""


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, key = name.rpartition(".")
    model.get_submodule(owner)._modules[key] = module

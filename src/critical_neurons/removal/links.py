"""Links: for every layer with units, the linear layer before its ReLU and the linear layers that read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from critical_neurons.core.network import Affine, Input, MaxPool, Network, Relu
from critical_neurons.core.structure import Floats, Ints

SAME = 1e-12
"""Relative difference up to which two numbers count as equal, in float64."""

MAKERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Reader:
    """A layer that reads the ReLU, possibly through operations that treat all channels alike. `ones` is what they
    make of a channel of ones: (positions,), or one number if all are equal. With max pooling it is not `linear`."""

    name: str
    ones: Floats
    linear: bool


@dataclass(frozen=True)
class Link:
    """The layer `maker`, its batch norm if any, the ReLU unless it is called elsewhere too, and all readers.

    `units` are those of the maker's channels. `plain`: only the ReLU stands between the maker, or its batch norm, and
    a single reader."""

    maker: str
    norm: str | None
    relu: str | None
    units: Ints
    readers: tuple[Reader, ...]
    plain: bool


def find_links(model: nn.Module, network: Network) -> dict[str, Link | str]:
    """For every layer with units its link, or the reason why there is none."""
    return {layer.name: _find_link(model, network, layer.name, layer.units) for layer in network.removable}


def _find_link(model: nn.Module, network: Network, name: str, units: Ints) -> Link | str:
    consumers: dict[int, list[int]] = {}
    for index, op in enumerate(network.ops):
        for source in op.sources:
            consumers.setdefault(source, []).append(index)
    own = [index for index, op in enumerate(network.ops) if isinstance(op, Affine) and op.name == name]
    group = next(group for group in network.structure.groups if name in group.layers)
    if len(own) != 1 or group.blocks > 1 or len(group.layers) > 1 or len(np.unique(units)) < len(units):
        return "it shares its units with other layers, or has groups"
    if type(_find(model, name)) not in MAKERS:
        return f"{name} is no linear layer or convolution"
    if _is_repeated(model, network, own[0]):
        return f"{name} is a linear layer on several axes"
    at, norm = own[0], None
    while len(consumers.get(at, ())) == 1:
        at = consumers[at][0]
        op = network.ops[at]
        assert not isinstance(op, Input)
        if isinstance(op, Relu):
            break
        is_norm = isinstance(op, Affine) and isinstance(_find(model, op.name), nn.modules.batchnorm._BatchNorm)
        if norm is not None or not is_norm:
            return f"{op.name} stands between it and its ReLU"
        norm = op.name
    op = network.ops[at]
    if not isinstance(op, Relu):
        return "several values are made of what it gives"
    readers = _find_readers(model, network, at, consumers)
    if isinstance(readers, str):
        return readers
    following = [network.ops[index] for index in consumers[at]]
    plain = [op.name for op in following if isinstance(op, Affine)] == [reader.name for reader in readers][:1]
    calls = sum(isinstance(other, Relu) and other.name == op.name for other in network.ops)
    return Link(name, norm, op.name if calls == 1 else None, units, readers, plain and len(readers) == 1)


def _find_readers(
    model: nn.Module, network: Network, relu: int, consumers: dict[int, list[int]]
) -> tuple[Reader, ...] | str:
    shape = network.ops[relu].shape
    readers, waiting = [], [(relu, np.ones((1, *shape)), True)]
    while waiting:
        at, ones, linear = waiting.pop()
        if at == len(network.ops) - 1:
            return "it gives the output"
        for index in consumers.get(at, ()):
            op = network.ops[index]
            assert not isinstance(op, Input)
            if isinstance(op, MaxPool):
                waiting.append((index, np.ones((1, *op.shape)), False))
            elif isinstance(op, Affine) and not op.keeps_channels:
                module = _find(model, op.name)
                plain = type(module) in MAKERS and getattr(module, "groups", 1) == 1
                if not plain or _is_repeated(model, network, index):
                    return f"it is read by {op.name}, which is no linear layer of one axis or plain convolution"
                passed = ones.reshape(shape[0], -1)[0]
                same = np.abs(passed - passed[0]).max() <= SAME
                readers.append(Reader(op.name, passed[:1] if same else passed, linear))
            elif isinstance(op, Affine) and _treats_alike(op, network.ops[at].shape, shape[0]):
                waiting.append((index, op.map.apply(ones), linear))
            else:
                return f"{op.name} stands behind its ReLU" if not isinstance(op, Relu) else "a second ReLU reads it"
    return tuple(readers)


def _is_repeated(model: nn.Module, network: Network, index: int) -> bool:
    """A linear layer that is applied at every position."""
    op = network.ops[index]
    return isinstance(op, Affine) and isinstance(_find(model, op.name), nn.Linear) and len(op.shape) > 1


def _treats_alike(op: Affine, shape: tuple[int, ...], channels: int) -> bool:
    """Whether it applies the same linear map to every channel and adds nothing, so that it commutes with sums of
    channels. Tested on the product u_c v of a channel and a position factor, whose image must be u_c w."""
    generator = np.random.default_rng(0)
    u, v = (
        generator.uniform(1.0, 2.0, (channels, 1)),
        generator.uniform(1.0, 2.0, (1, int(np.prod(shape)) // channels)),
    )
    if int(np.prod(op.shape)) % channels or op.map.apply(np.zeros((1, *shape))).any():
        return False
    result = op.map.apply((u * v).reshape(1, *shape)).reshape(channels, -1)
    w = result[0] / u[0]
    return bool(np.abs(result - u * w).max() <= SAME * np.abs(result).max())


def _find(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules(remove_duplicate=False)).get(name)

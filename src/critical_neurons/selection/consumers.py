"""Consumers: the modules that read units and can be refitted, in parts that are linear maps of columns of units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Group, Ints, Structure, Wiring
from critical_neurons.removal.refit.im2col import Weighted, to_matrix

MOST_COLUMNS = 2304
"""Of a part. A wider module is split into parts, and a unit's part is taken over by others of the same part alone:
the work grows with the cube of the columns. 256 units of a 3x3 convolution."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some columns of a group of a convolution, or of another module: weights (columns, outputs) in double
    precision, the outputs, and the unit of every column."""

    group: int
    columns: slice
    weight: Tensor
    outputs: Tensor
    units: Ints


def list_consumers(structure: Structure, model: nn.Module) -> list[Wiring]:
    """In the order of the calls."""
    return [
        wiring
        for wiring in structure.wirings
        if wiring.reads_units and isinstance(model.get_submodule(wiring.module), Weighted)
    ]


def group_is_read(structure: Structure, group: Group, model: nn.Module) -> bool:
    """Whether modules that can be refitted read every unit of the group."""
    read = [wiring.inputs for wiring in list_consumers(structure, model)]
    return bool(read) and bool(np.isin(group.units, np.concatenate(read)).all())


def split_module(module: nn.Module, wiring: Wiring) -> list[Part]:
    assert isinstance(module, Weighted)
    weight = to_matrix(module, module.weight.detach().double())
    inputs = wiring.inputs.reshape(wiring.groups, -1)
    outputs = torch.arange(len(wiring.outputs)).reshape(wiring.groups, -1)
    kernel = weight.shape[1] // inputs.shape[1]
    parts = []
    for group, units in enumerate(inputs):
        count = -(-len(units) * kernel // MOST_COLUMNS)
        for some in np.array_split(np.arange(len(units)), count):
            columns = slice(int(some[0]) * kernel, (int(some[-1]) + 1) * kernel)
            parts.append(Part(group, columns, weight[group, columns], outputs[group], np.repeat(units[some], kernel)))
    return parts

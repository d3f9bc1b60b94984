"""Consumers: the layers that read units and can be refitted, split into linear maps of limited width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Group, Ints, Structure, Wiring
from critical_neurons.removal.refit.im2col import Weighted, to_matrix

MOST_COLUMNS = 2304
"""Widest part. Work grows with the cube of the columns, so wider layers are split; a removed unit is then compensated
by units of the same part only. 2304 columns are 256 channels of a 3x3 convolution."""


@dataclass(frozen=True, eq=False)
class ColumnBlock:
    """Some im2col columns of one convolution group or of a linear layer: a view of the model's weights (columns,
    outputs), the numbers of the outputs, and the unit of every column."""

    group: int
    columns: slice
    own: Tensor
    outputs: Tensor
    units: Ints

    @property
    def weight(self) -> Tensor:
        """The weights in double precision, which would take twice the memory of the model if they were held."""
        return self.own.double()


def list_consumers(structure: Structure, model: nn.Module) -> list[Wiring]:
    """The refittable layers that read units, in the order of their calls."""
    return [
        wiring
        for wiring in structure.wirings
        if wiring.reads_units and isinstance(model.get_submodule(wiring.module), Weighted)
    ]


def group_is_read(structure: Structure, group: Group, model: nn.Module) -> bool:
    """Whether every unit of the group is read by a layer that can be refitted."""
    read = [wiring.inputs for wiring in list_consumers(structure, model)]
    return bool(read) and bool(np.isin(group.units, np.concatenate(read)).all())


def split_module(module: nn.Module, wiring: Wiring) -> list[ColumnBlock]:
    assert isinstance(module, Weighted)
    weight = to_matrix(module, module.weight.detach())
    inputs = wiring.inputs.reshape(wiring.groups, -1)
    outputs = torch.arange(len(wiring.outputs)).reshape(wiring.groups, -1)
    kernel = weight.shape[1] // inputs.shape[1]
    parts = []
    for group, units in enumerate(inputs):
        count = -(-len(units) * kernel // MOST_COLUMNS)
        for some in np.array_split(np.arange(len(units)), count):
            columns = slice(int(some[0]) * kernel, (int(some[-1]) + 1) * kernel)
            parts.append(
                ColumnBlock(group, columns, weight[group, columns], outputs[group], np.repeat(units[some], kernel))
            )
    return parts

"""What the tests of structures share: plans drawn at random, and masked against smaller."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Bools, Structure
from critical_neurons.removal.remove import remove_units, zero_units
from critical_neurons.removal.rows import Inputs
from critical_neurons.removal.same_outputs import run_evenly
from critical_neurons.structure import find_structure

SAME = 1e-9
"""Largest relative difference of outputs in float64."""


def draw_stays(structure: Structure, seed: int) -> Bools:
    """Between one unit and all of every group, at random; as many of every block."""
    generator = np.random.default_rng(seed)
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    for group in structure.groups:
        dealt = group.units.reshape(group.blocks, -1)
        count = generator.integers(1, dealt.shape[1] + 1)
        for block in dealt:
            stays[generator.permutation(block)[count:]] = False
    return stays


def remove_alone(structure: Structure, unit: int) -> Bools:
    """All stay but one unit, or one of every block: that at its place."""
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    group = next(group for group in structure.groups if unit in group.units)
    dealt = group.units.reshape(group.blocks, -1)
    stays[dealt[:, (unit - group.units[0]) % dealt.shape[1]]] = False
    return stays


def assert_alike(left: list[Tensor], right: list[Tensor], tolerance: float = SAME) -> None:
    assert [each.shape for each in left] == [each.shape for each in right]
    for one, other in zip(left, right, strict=True):
        scale = max([1.0, *one[one.isfinite()].abs().tolist()])
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale, equal_nan=True)


def assert_removable(model: nn.Module, structure: Structure, stays: Bools, inputs: Inputs) -> nn.Module:
    """The smaller model gives what the masked one does."""
    smaller = remove_units(model, structure, stays)
    assert_alike(run_evenly(zero_units(model, structure, stays), inputs), run_evenly(smaller, inputs))
    return smaller


def inspect_twice(model: nn.Module, inputs: Inputs, seeds: int = 4) -> Structure:
    """The structure of a model, tried on plans that are not those of the trial."""
    structure = find_structure(model, inputs)
    for seed in range(seeds):
        assert_removable(model, structure, draw_stays(structure, seed), inputs)
    for group in structure.groups:
        assert_removable(model, structure, remove_alone(structure, int(group.units[-1])), inputs)
    return structure


def train_looks(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64 and evaluation mode; parameters and statistics unequal and not zero, as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if not values.is_floating_point():
                continue
            noise = torch.rand(values.shape, generator=generator, dtype=torch.float64)
            if values.ndim <= 1 and name.endswith(("weight", "running_var", "weight_g")):
                values.copy_(0.5 + noise)
            elif values.ndim <= 1:
                values.copy_(noise - 0.5)
    return model

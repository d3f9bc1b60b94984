"""Trial removal: test that smaller and masked model agree, and find the groups to blame if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.deadline import check_time
from critical_neurons.core.structure import Bools, Group, Structure
from critical_neurons.errors import PruningError
from critical_neurons.removal.copies import copy_sharing
from critical_neurons.removal.parametrised import list_parametrised
from critical_neurons.removal.remove import double_tensors, remove_units, zero_units
from critical_neurons.removal.rows import Inputs, count_rows, find_tensors, map_inputs, take_rows
from critical_neurons.removal.same_outputs import FAILURES, require_same, run_evenly, run_smaller
from critical_neurons.structure.user_code import find_failing_line

ROUNDS = 3
"""Different removals: a random number of units of all groups; then of some groups, which separates groups that must
lose equally many; then half of all units, so that nearly every unit is removed once."""

SOME, HALF = 1, 2
"""The second and the third removal."""

SHAKE = 0.1
"""Relative noise on the parameters of the trial, absolute for zeros: equal or zero parameters, as in a new model,
would hide mistakes."""

FEW = 2**14
"""Larger weights get no noise, unless their first numbers are all equal."""

LAST = 2
"""How many of the last layers before a failure are suspected."""

SIDES = (64, 96)
"""Larger images are cropped to this side, if the model runs on them: the structure is the same at all positions."""

TOGETHER = "removed along with others it gives other outputs than masked"


@dataclass(frozen=True)
class Failure:
    """Why a trial failed, and the last layers that ran."""

    reason: str
    last: tuple[str, ...] = ()


class Trial:
    """Removes random units of a model, the same ones every time.

    Runs in double precision, on one row and on a crop of large images, if the model allows it: a forward pass may
    create other types, need more rows, or have fixed image sizes. `model` is changed.
    """

    def __init__(self, model: nn.Module, rows: Inputs) -> None:
        one = take_rows(rows, torch.arange(1)) if count_rows(rows) > 1 else rows
        self._ways = [(one, True), (rows, True), (rows, False)]
        sizes = [values.shape[2:] for values in find_tensors(rows) if values.ndim > 3]
        for side in reversed(SIDES):
            if any(max(size) > side for size in sizes):
                self._ways.insert(0, (map_inputs(one, partial(_cut, side=side)), True))
        self._model, self._verified = model, False
        self._copies: dict[tuple[int, torch.Size], Tensor] = {}
        _shake(model)
        self._choose_way()

    def find_failing(self, structure: Structure) -> list[tuple[Group, str]]:
        """Groups whose removal differs from masking, and why."""
        for draw in range(ROUNDS):
            groups = structure.groups
            if draw == SOME:
                chosen = np.random.default_rng(draw).random(len(groups)) < 0.5
                groups = tuple(group for group, taken in zip(groups, chosen.tolist(), strict=True) if taken)
            failure = self._try(structure, groups, draw)
            while failure is not None and not self._verify():
                failure = self._try(structure, groups, draw)
            if failure is not None:
                return self._blame(structure, groups, draw, failure)
        return []

    def _choose_way(self) -> None:
        self._rows, self._exact = self._ways[0]
        self._tried = self._model
        if self._exact and list_parametrised(self._model):  # factors of norms are recomputed
            self._tried = double_tensors(copy_sharing(self._model))
        if self._exact:
            self._rows = map_inputs(
                self._rows, lambda values: values.double() if values.is_floating_point() else values
            )

    def _copy_double(self, values: Tensor) -> Tensor:
        """Of a large parameter in the memory of its last copy: new memory takes longer than the numbers."""
        if not values.is_floating_point():
            return values.clone()
        if values.numel() <= FEW:
            return values.to(torch.float64, copy=True)
        key = values.data_ptr(), values.shape
        if key not in self._copies:
            self._copies[key] = torch.empty_like(values, dtype=torch.float64)
        return self._copies[key].copy_(values)

    def _as_tried(self, model: nn.Module) -> nn.Module:
        return double_tensors(model) if self._exact else model

    def _verify(self) -> bool:
        """Whether the model itself runs under the trial's conditions; if not, switch to the next ones."""
        if self._verified:
            return True
        try:
            run_evenly(self._as_tried(copy_sharing(self._model)), self._rows)
        except FAILURES:
            if len(self._ways) > 1:
                del self._ways[0]
                self._choose_way()
                return False
        self._verified = True
        return True

    def _try(self, structure: Structure, groups: Sequence[Group], draw: int) -> Failure | None:
        """Remove some units of the groups. Returns why that fails, or None."""
        if not groups:
            return None
        check_time()
        stays: Bools = np.ones(structure.unit_count + 1, dtype=bool)
        for group in groups:
            stays[group.units] = _draw_kept(group, draw)
        smaller = self._as_tried(remove_units(self._tried, structure, stays))
        try:
            with _noting_layers(smaller, structure) as entered:
                found = run_smaller(smaller, self._rows)
            del smaller  # large models take much memory
            copy = self._copy_double if self._exact else Tensor.clone
            masked = self._as_tried(zero_units(self._tried, structure, stays, copy=copy))
            require_same(run_evenly(masked, self._rows), found)
        except PruningError as error:
            failed = error.__cause__ is not None
            reason = f"its removal fails: {error}{find_failing_line(error.__cause__)}"
            return Failure(reason, tuple(reversed(entered[-LAST:])) if failed else ())
        return None

    def _blame(
        self, structure: Structure, groups: Sequence[Group], draw: int, failure: Failure
    ) -> list[tuple[Group, str]]:
        """The groups that fail. Those near the failure are tried first, then halves of all."""
        if len(groups) == 1:
            return [(groups[0], failure.reason)]
        for group in _list_suspects(structure, groups, failure):
            if (alone := self._try(structure, [group], draw)) is not None:
                return [(group, alone.reason)]
        middle = len(groups) // 2
        halves = groups[:middle], groups[middle:]
        found = []
        for half in halves:
            if (failed := self._try(structure, half, draw)) is not None:
                found += self._blame(structure, half, draw, failed)
        return found or [(self._find_last(structure, *halves, draw), TOGETHER)]

    def _find_last(self, structure: Structure, first: Sequence[Group], second: Sequence[Group], draw: int) -> Group:
        """Both halves pass, but not together: the first group of the second half with which the first one fails."""
        low, high = 0, len(second)
        while high - low > 1:
            middle = (low + high) // 2
            fails = self._try(structure, [*first, *second[:middle]], draw) is not None
            low, high = (low, middle) if fails else (middle, high)
        return second[high - 1]


def _draw_kept(group: Group, draw: int) -> Bools:
    """The units of a group that a trial keeps: a random number, or half."""
    generator = np.random.default_rng((draw, int(group.units[0]), len(group)))
    least, size = group.least // group.blocks, len(group) // group.blocks
    drawn = (least + size) // 2 if draw == HALF else int(generator.integers(least, max(size, least + 1)))
    count = group.blocks * drawn
    return group.choose(generator.random(len(group)), count)


def _cut(values: Tensor, side: int) -> Tensor:
    return values[:, :, *[slice(side)] * (values.ndim - 2)] if values.ndim > 3 else values


def _shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    values: list[Tensor] = [*model.parameters()]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            values += [*module.buffers(recurse=False)]
    with torch.no_grad():
        for each in values:
            few = each.flatten()[:FEW]
            if each.is_floating_point() and (each.numel() <= FEW or bool((few == few[0]).all())):
                noise = torch.rand(each.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).mul_(SHAKE)
                noise = noise.to(each)
                each.add_(torch.where(each == 0, noise, each * noise))


@contextmanager
def _noting_layers(model: nn.Module, structure: Structure) -> Iterator[list[str]]:
    """Collects the names of layers as they start to run."""
    entered: list[str] = []

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: entered.append(name)

    names = [wiring.module for wiring in structure.wirings]
    handles = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()


def _list_suspects(structure: Structure, groups: Sequence[Group], failure: Failure) -> list[Group]:
    """The groups of the outputs and inputs of the last layers, where a fixed size in the forward pass fails."""
    wirings = {wiring.module: wiring for wiring in structure.wirings}
    axes = [axis for name in failure.last for axis in (wirings[name].outputs, wirings[name].inputs)]
    found = [group for axis in axes for group in groups if np.isin(group.units, axis).any()]
    return list({id(group): group for group in found}.values())

"""Trial removal: test that smaller and masked model agree, and find the groups to blame if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.deadline import check_time
from critical_neurons.core.structure import Bools, Group, Ints, Slice, Structure
from critical_neurons.errors import PruningError
from critical_neurons.removal.copies import copy_sharing
from critical_neurons.removal.parametrised import list_parametrised
from critical_neurons.removal.remove import double_tensors, remove_units, zero_units
from critical_neurons.removal.rows import Inputs, count_rows, find_tensors, map_inputs, take_rows
from critical_neurons.removal.same_outputs import FAILURES, require_same, run_evenly, run_smaller
from critical_neurons.structure.user_code import find_failing_line

STEPS = (0.618034, 0.754878)
"""There are two removals: of a quarter to three quarters of every group; then, from what that leaves, of most of the
rest, so that nearly every unit is removed once. The share that stays grows by these steps, modulo 1, from group to
group: groups of the same size lose different numbers, which separates those that must lose equally many."""

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


Attempt: TypeAlias = Callable[[tuple[Group, ...]], Failure | None]
"""Removes units of these groups only. Returns why that fails, or None."""


class Trial:
    """Removes random units of a model, the same ones every time.

    Runs in double precision, on one row and on a crop of large images, if the model allows it: a forward pass may
    create other types, need more rows, or have fixed image sizes. `draws`: whether the model draws random numbers,
    which are then made equal. `model` is changed.
    """

    def __init__(self, model: nn.Module, rows: Inputs, *, draws: bool) -> None:
        one = take_rows(rows, torch.arange(1)) if count_rows(rows) > 1 else rows
        self._ways = [(one, True), (rows, True), (rows, False)]
        sizes = [values.shape[2:] for values in find_tensors(rows) if values.ndim > 3]
        for side in reversed(SIDES):
            if any(max(size) > side for size in sizes):
                self._ways.insert(0, (map_inputs(one, partial(_cut, side=side)), True))
        self._model, self._verified, self._draws = model, False, draws
        _shake(model)
        self._choose_way()

    def find_failing(self, structure: Structure) -> list[tuple[Group, str]]:
        """Groups whose removal differs from masking, and why."""
        if not structure.groups:
            return []
        stays, more = _draw_removals(structure)
        tried = self._try(self._tried, structure, stays)
        if isinstance(tried, nn.Module):
            tried, stays = self._try(tried, _shrink(structure, stays), more), more
            if isinstance(tried, Failure):  # it counts only if the model itself fails as well
                tried = self._try(self._tried, structure, stays)
        if isinstance(tried, nn.Module):
            return []
        if not self._verify():
            return self.find_failing(structure)

        @cache
        def attempt(groups: tuple[Group, ...]) -> Failure | None:
            chosen: Bools = np.ones_like(stays)
            for group in groups:
                chosen[group.units] = stays[group.units]
            found = self._try(self._tried, structure, chosen)
            return found if isinstance(found, Failure) else None

        return _blame(structure, structure.groups, attempt, tried)

    def _choose_way(self) -> None:
        self._rows, self._exact = self._ways[0]
        self._tried = self._model
        if self._exact and list_parametrised(self._model):  # factors of norms are recomputed
            self._tried = double_tensors(copy_sharing(self._model))
        if self._exact:
            self._rows = map_inputs(
                self._rows, lambda values: values.double() if values.is_floating_point() else values
            )

    def _as_tried(self, model: nn.Module) -> nn.Module:
        return double_tensors(model) if self._exact else model

    def _verify(self) -> bool:
        """Whether the model itself runs under the trial's conditions; if not, switch to the next ones."""
        if not self._verified and len(self._ways) > 1:
            try:
                run_evenly(self._as_tried(copy_sharing(self._model)), self._rows, draws=self._draws)
            except FAILURES:
                del self._ways[0]
                self._choose_way()
                return False
        self._verified = True
        return True

    def _try(self, model: nn.Module, structure: Structure, stays: Bools) -> Failure | nn.Module:
        """Remove units. Returns why that fails, or else the smaller model."""
        check_time()
        smaller = self._as_tried(remove_units(model, structure, stays))
        try:
            with _noting_layers(smaller, structure) as entered:
                found = run_smaller(smaller, self._rows, draws=self._draws)
            masked = zero_units(model, structure, stays, copy=_copy_double if self._exact else Tensor.clone)
            require_same(run_evenly(self._as_tried(masked), self._rows, draws=self._draws), found)
        except PruningError as error:
            failed = error.__cause__ is not None
            reason = f"its removal fails: {error}{find_failing_line(error.__cause__)}"
            return Failure(reason, tuple(reversed(entered[-LAST:])) if failed else ())
        return smaller


def _copy_double(values: Tensor) -> Tensor:
    return values.to(torch.float64 if values.is_floating_point() else values.dtype, copy=True)


def _blame(
    structure: Structure, groups: tuple[Group, ...], attempt: Attempt, failure: Failure
) -> list[tuple[Group, str]]:
    """The groups that fail. Those near the failure are tried first, then halves of all."""
    if len(groups) == 1:
        return [(groups[0], failure.reason)]
    for group in _list_suspects(structure, groups, failure):
        if (alone := attempt((group,))) is not None:
            return [(group, alone.reason)]
    middle = len(groups) // 2
    halves = groups[:middle], groups[middle:]
    found = []
    for half in halves:
        if (failed := attempt(half)) is not None:
            found += _blame(structure, half, attempt, failed)
    return found or [(_find_last(*halves, attempt), TOGETHER)]


def _find_last(first: tuple[Group, ...], second: tuple[Group, ...], attempt: Attempt) -> Group:
    """Both halves pass, but not together: the first group of the second half with which the first one fails."""
    low, high = 0, len(second)
    while high - low > 1:
        middle = (low + high) // 2
        fails = attempt((*first, *second[:middle])) is not None
        low, high = (low, middle) if fails else (middle, high)
    return second[high - 1]


def _draw_removals(structure: Structure) -> tuple[Bools, Bools]:
    """Which units stay in both removals; the second includes the first."""
    values = np.random.default_rng(0).random(structure.unit_count)
    first, second = np.ones((2, structure.unit_count + 1), dtype=bool)
    for place, group in enumerate(structure.groups):
        size = len(group) // group.blocks
        shares = [place * step % 1 for step in STEPS]
        many = (size + 3) // 4 + int(shares[0] * (size // 2 + 1))
        many = (
            max(many, min(size, 2)) if group.blocks > 1 else many
        )  # with one each, a convolution would be depthwise
        few = 1 + int(shares[1] * ((many + 1) // 2))
        for stays, count in ((first, many), (second, few)):
            stays[group.units] = group.choose(values[group.units], count * group.blocks)
    return first, second


def _shrink(structure: Structure, stays: Bools) -> Structure:
    """What to slice in the smaller model, with the same numbers for units."""

    def take(units: Ints) -> Ints:
        return units[stays[units]] if units.ndim == 1 else np.stack([take(block) for block in units])

    slices = [replace(each, units=take(each.units)) for each in structure.slices]
    wirings = []
    for each in structure.wirings:
        inputs, outputs, kept = take(each.inputs), take(each.outputs), stays[each.inputs]
        if not each.biased and each.constants[~kept].any():  # removal added a bias
            slices.append(Slice(f"{each.module}.bias", 0, outputs))
        groups = len(inputs) if each.depthwise else each.groups
        wirings.append(replace(each, inputs=inputs, outputs=outputs, constants=each.constants[kept], groups=groups))
    return replace(structure, slices=tuple(slices), wirings=tuple(wirings))


def _cut(values: Tensor, side: int) -> Tensor:
    return values[:, :, *[slice(side)] * (values.ndim - 2)] if values.ndim > 3 else values


def _shake(model: nn.Module) -> None:
    values: list[Tensor] = [*model.parameters()]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            values += [*module.buffers(recurse=False)]
    generator = torch.Generator().manual_seed(0)
    for each in values:
        if not each.is_floating_point() or (
            each.numel() > FEW and bool((each.flatten()[:FEW] != each.flatten()[0]).any())
        ):
            continue
        noise = torch.empty(each.shape, dtype=torch.float64).uniform_(-SHAKE, SHAKE, generator=generator).to(each)
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

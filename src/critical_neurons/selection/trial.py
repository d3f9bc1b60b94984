"""What is left of a small network with some units alone, every module behind them refitted: quickly, to try many.

A run of the model in full size in which removed units count nothing. Each consumer is refitted, as it is reached, on
what then reaches it, as `cn.prune` will do; here on a sample and with a ridge that is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Bools, Wiring
from critical_neurons.removal.refit.im2col import (
    Weighted,
    by_group,
    channels_first,
    find_channel_axis,
    from_matrix,
    to_matrix,
    unroll,
)
from critical_neurons.removal.rows import Inputs, call_model, count_rows, take_rows
from critical_neurons.selection.distance import Distance, list_outputs
from critical_neurons.selection.prefix_cache import Front

Hook: TypeAlias = Callable[[nn.Module, tuple[Tensor, ...]], None]

CARRIED_INPUTS = 1000
FOLDS = 3
"""Outputs are compared for one input of so many, on which nothing is refitted; then for the others."""

RIDGE = 1e-2
"""Relative to the mean square of the inputs."""

ROWS_PER_COLUMN, LEAST_ROWS = 10, 8_000
"""Positions beyond so many for every column, and beyond so many in all, are left out."""


def draw_carried(inputs: Inputs, seed: int) -> Inputs:
    """So many of the inputs, in random order."""
    order = torch.randperm(count_rows(inputs), generator=torch.Generator().manual_seed(seed))
    return take_rows(inputs, order[:CARRIED_INPUTS])


class Carrier:
    """`consumers` are modules that read units; `model` is left as it is."""

    def __init__(
        self, model: nn.Module, consumers: Sequence[Wiring], inputs: Inputs, distance: Distance, seed: int = 0
    ) -> None:
        inputs = draw_carried(inputs, seed)
        rows = torch.arange(count_rows(inputs))
        held_out = max(len(rows) // FOLDS, 1)
        self._folds = [
            _Fold(model, consumers, take_rows(inputs, rows.roll(number * held_out)), distance, held_out, seed)
            for number in range(FOLDS)
        ]

    def miss(self, stays: Bools, *, folds: int = FOLDS) -> float:
        """See `Distance.miss`. `stays` (units); `folds`: the first of them."""
        return fmean(fold.miss(stays) for fold in self._folds[:folds])


class _Fold:
    """Refitted on all inputs but the last `held_out`, and judged by these."""

    def __init__(
        self,
        model: nn.Module,
        consumers: Sequence[Wiring],
        inputs: Inputs,
        distance: Distance,
        held_out: int,
        seed: int,
    ) -> None:
        fitted = max(count_rows(inputs) - held_out, 1)  # inputs that cannot be taken apart serve for both
        self._draft, self._held_out = Draft(model, consumers, inputs, fitted, seed), held_out
        self._distance, self._wanted = distance, [each[-held_out:] for each in self._draft.outputs]
        self._known: dict[bytes, float] = {}

    def miss(self, stays: Bools) -> float:
        key = stays.tobytes()
        if key not in self._known:
            found = [each[-self._held_out :] for each in self._draft.run(np.append(stays, True))]
            self._known[key] = self._distance.miss(found, self._wanted)
        return self._known[key]


@dataclass(frozen=True)
class Reached:
    """What reaches a module by columns that stay (groups, rows, columns), then perhaps columns of zeros, and what it
    gave in the whole model (groups, rows, outputs), but for its bias."""

    rows: Tensor
    wanted: Tensor


class Draft:
    """A copy of the model in full size whose consumers are refitted on the first `fitted` of the inputs.

    `outputs`: what the whole model gives for the inputs.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, consumers: Sequence[Wiring], inputs: Inputs, fitted: int, seed: int) -> None:
        self._inputs, self.model = inputs, copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        self._consumers = {
            wiring.module: _Consumer(self.model.get_submodule(wiring.module), wiring, fitted, generator)
            for wiring in consumers
        }
        self._front = Front(self.model, self._probe, count_rows(inputs))
        with self._front.learn():
            self.outputs = self._run({name: consumer.remember for name, consumer in self._consumers.items()})

    @torch.no_grad()
    def run(self, stays: Bools) -> list[Tensor]:
        """What is given for the inputs with these units alone; `stays` has a last entry for NO_UNIT."""
        return self._recall({name: consumer.refit_to(stays) for name, consumer in self._consumers.items()})

    @torch.no_grad()
    def reach(self, stays: Bools, modules: Collection[str]) -> dict[str, Reached]:
        """What reaches these modules with these units alone."""
        rows: dict[str, Tensor] = {}
        hooks = {}
        for name, consumer in self._consumers.items():
            hooks[name] = consumer.refit_to(stays, partial(rows.__setitem__, name) if name in modules else None)
        self._recall(hooks)
        return {name: Reached(found, self._consumers[name].wanted) for name, found in rows.items()}

    def _probe(self) -> None:
        """Run the model on two inputs, the weights that are refitted taking part in gradients."""
        weights = [
            self.model.get_submodule(name).get_parameter("weight").requires_grad_() for name in self._consumers
        ]
        call_model(self.model, take_rows(self._inputs, torch.arange(2)))
        for weight in weights:
            weight.requires_grad_(False)

    def _recall(self, hooks: Mapping[str, Hook]) -> list[Tensor]:
        with self._front.recall(torch.arange(count_rows(self._inputs))):
            return self._run(hooks)

    def _run(self, hooks: Mapping[str, Hook]) -> list[Tensor]:
        handles = [self.model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
        try:
            return list_outputs(call_model(self.model, self._inputs))
        finally:
            for handle in handles:
                handle.remove()


class _Consumer:
    """A module of the draft, its weights as they were, and what it then gave at some positions."""

    def __init__(self, module: nn.Module, wiring: Wiring, fitted: int, generator: torch.Generator) -> None:
        assert isinstance(module, Weighted)
        self._module, self._inputs, self._groups = module, wiring.inputs, wiring.groups
        self._fitted, self._generator = fitted, generator
        self._weight = to_matrix(module, module.weight.detach()).double()
        self._bias = None if module.bias is None else module.bias.detach()
        self._kernel = self._weight.shape[1] * wiring.groups // len(wiring.inputs)
        rows = max(ROWS_PER_COLUMN * self._weight.shape[1], LEAST_ROWS)
        self._rows_per_input = -(-rows // fitted)

    def remember(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        given = self._module.forward(args[0][:1])  # not a call: this runs before each
        count = channels_first(self._module, given).shape[2]
        self._positions = torch.randperm(count, generator=self._generator)[: self._rows_per_input]
        self.wanted = self._unroll(args[0]) @ self._weight  # but for the bias, which the mean answers for

    def refit_to(self, stays: Bools, tell: Callable[[Tensor], None] | None = None) -> Hook:
        """`tell` is given the rows that reach the module."""
        kept = _list_kept(torch.from_numpy(stays[self._inputs]), self._groups, self._kernel)

        def refit(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            axis = find_channel_axis(self._module, args[0])
            read = args[0][: self._fitted].index_select(axis, kept.inputs)
            rows = self._unroll(read) * kept.mask[:, None]
            if tell is not None:
                tell(rows)
            weight, shift = self._fit(rows, kept)
            self._module.weight.data = from_matrix(self._module, weight).to(self._module.weight)
            old = 0.0 if self._bias is None else self._bias
            self._module.bias = nn.Parameter((old + shift.flatten()).to(self._module.weight), requires_grad=False)

        return refit

    def _fit(self, rows: Tensor, kept: _Kept) -> tuple[Tensor, Tensor]:
        """Weights (groups, columns, outputs), and what the bias rises by."""
        columns = kept.columns[:, :, None].expand(-1, -1, self._weight.shape[2])
        weight = self._weight.gather(1, columns) * kept.mask[:, :, None]
        mean = rows.mean(1, keepdim=True)
        rows = rows - mean
        squares = rows.mT @ rows
        middle = self.wanted.mean(1, keepdim=True)
        missing = rows.mT @ (self.wanted - middle) - squares @ weight
        diagonal = squares.diagonal(dim1=1, dim2=2)
        ridge = RIDGE * diagonal.sum(1) / self._weight.shape[1]
        diagonal.add_(ridge.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
        weight += torch.linalg.solve(squares, missing)
        shift = middle - mean @ weight
        return torch.zeros_like(self._weight).scatter_(1, columns, weight), shift

    def _unroll(self, read: Tensor) -> Tensor:
        return by_group(unroll(self._module, read[: self._fitted], self._positions), self._groups).double()


@dataclass(frozen=True)
class _Kept:
    """Inputs of a module (inputs) that stay, as many of every group, their columns (groups, columns), and a mask of
    these that is 0 for those of inputs that do not stay: groups may keep fewer than others."""

    inputs: Tensor
    columns: Tensor
    mask: Tensor


def _list_kept(left: Tensor, groups: int, kernel: int) -> _Kept:
    left = left.reshape(groups, -1)
    order = left.int().argsort(dim=1, descending=True, stable=True)[:, : int(left.sum(1).max())]
    first = torch.arange(groups)[:, None] * left.shape[1]
    columns = (order[:, :, None] * kernel + torch.arange(kernel)).flatten(1)
    mask = left.gather(1, order).repeat_interleave(kernel, 1).double()
    return _Kept((first + order).flatten(), columns, mask)

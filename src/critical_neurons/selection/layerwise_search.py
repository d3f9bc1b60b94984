"""Which units stay when the modules that read them are refitted: groups of units from the last to the first.

The consumers of a group are to give what they give in the whole model, as far as what follows them needs it: what
follows is already without its own removed units, and refitted. A draft of the model in full size carries that along.

What comes before them is still whole then. Once all is chosen, other things reach the consumers, and a choice can be
revised: groups from the first to the last, each from all of its units, the other groups as they were left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Bools, Group, Ints, Structure, Wiring
from critical_neurons.removal.refit.im2col import Weighted, from_matrix, to_matrix
from critical_neurons.removal.rows import Inputs, call_model, count_rows, take_rows
from critical_neurons.selection.distance import Distance, list_outputs
from critical_neurons.selection.elimination import NONE, Consumer, Elimination, eliminate, refit
from critical_neurons.selection.group_choice import Chosen, Decisions, keep_last
from critical_neurons.selection.statistics import add_ridge, gather_metrics, gather_moments
from critical_neurons.selection.trial import Carrier, Draft, Reached, draw_carried

METRIC_INPUTS = 256
"""Inputs from which it is known how the loss feels errors, and what they are worth."""

TEMPERATURES: tuple[float | None, ...] = (4.0, 8.0, 2.0, 1.0, None)
"""At which outputs are taken to find how the loss feels errors; None: all errors of a module count alike. Large
networks have the first alone; which is best differs from one network to the next."""

TRIED_SHARES = (0.5, 0.75)
"""Of the units of a group removed, to see what the errors are worth in terms of the loss."""

PASS_SIZE = 64


@dataclass(frozen=True, eq=False)
class _Runs:
    """Inputs, and what the model gives for them."""

    inputs: Inputs
    outputs: list[Tensor]
    distance: Distance

    @torch.no_grad()
    def diverge(self, draft: nn.Module) -> float:
        """How far the outputs of the draft are from the model's."""
        total, count = 0.0, count_rows(self.inputs)
        for rows in torch.split(torch.arange(count), PASS_SIZE):
            found = list_outputs(call_model(draft, take_rows(self.inputs, rows)))
            total += float(self.distance.measure(found, [each[rows] for each in self.outputs])) * len(rows)
        return total / count


class Choice:
    """`model` is on the CPU in evaluation mode and is left as it is."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        inputs: Inputs,
        distance: Distance,
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._model, self._groups, self._seed, self._distance = model, structure.groups, seed, distance
        self._unit_count = structure.unit_count
        self._consumers = list_consumers(structure, model)
        names = [wiring.module for wiring in self._consumers]
        self._moments, outputs = gather_moments(model, names, inputs, progress)
        self._all = _Runs(inputs, outputs, distance)
        self._sample = self._draw(0)

    @cached_property
    def carrier(self) -> Carrier:
        return Carrier(self._model, self._consumers, self._all.inputs, self._distance, self._seed)

    @cached_property
    def _carried(self) -> Draft:
        inputs = draw_carried(self._all.inputs, self._seed)
        return Draft(self._model, self._consumers, inputs, count_rows(inputs), self._seed)

    def trace(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Elimination]:
        """Every group by itself in the whole model: the order in which its units go, and what each costs.

        The errors are scaled by what they are worth: the divergence of the model's outputs.
        """
        names = [each.module for each in self._consumers]
        metrics = self._weigh(self._model, names, TEMPERATURES[0])
        whole = np.ones(self._unit_count + 1, dtype=bool)
        found = []
        for done, group in enumerate(self._groups):
            progress(done, len(self._groups))
            traced = eliminate(self._find_maps(group, whole, metrics, self._know), len(group.units), group.blocks)
            worths = []
            for share in TRIED_SHARES:
                count = int(share * len(group.units)) // group.blocks * group.blocks
                error = float(traced.errors[count - 1]) if count else 0.0
                if error > 0:
                    stays = whole.copy()
                    stays[group.units[traced.order[:count].numpy()]] = False
                    worths.append(self._sample.diverge(self._draft(stays)) / error)
            worth = float(np.mean(worths)) if worths else 0.0
            found.append(Elimination(traced.order, traced.errors * worth))
        progress(len(self._groups), len(self._groups))
        return found

    def choose(
        self,
        counts: Sequence[int],
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        temperature: float | None = TEMPERATURES[0],
        draw: int = 0,
        orders: Sequence[Ints] | None = None,
        bounded: bool = True,
    ) -> Chosen:
        """So many units of every group: the last in the orders, which are looked for unless they are given.

        `draw`: which sample of the inputs tells how the loss feels errors.
        """
        stays = np.ones(self._unit_count + 1, dtype=bool)  # the last entry answers for NO_UNIT
        draft = copy.deepcopy(self._model)
        decisions = Decisions(self._groups, counts, orders, bounded)
        places = sorted(range(len(self._groups)), key=self._find_last, reverse=True)
        for done, place in enumerate(places):
            progress(done, len(places))
            group = self._groups[place]
            metrics = self._weigh(draft, self._modules_of(group), temperature, draw)
            decisions.make(place, self._find_maps(group, stays, metrics, self._know), stays)
            self._refit(draft, self._consumers_of(group), stays)
        progress(len(places), len(places))
        return decisions.tell(draft)

    def revise(
        self,
        counts: Sequence[int],
        orders: Sequence[Ints],
        *,
        temperature: float | None = TEMPERATURES[0],
        draw: int = 0,
        settled: bool = False,
    ) -> Chosen:
        """With the last so many of the orders, every group chosen again by what then reaches its consumers.

        `settled`: orders stay as they are, and errors and bounds are told: beyond what the other groups cost already.
        """
        stays = np.ones(self._unit_count + 1, dtype=bool)
        for group, count, order in zip(self._groups, counts, orders, strict=True):
            stays[group.units] = keep_last(order, count)
        decisions = Decisions(self._groups, counts, orders if settled else None, settled)
        for place in sorted(range(len(self._groups)), key=self._find_last):
            group = self._groups[place]
            stays[group.units] = True
            reached = self._carried.reach(stays, self._modules_of(group))
            metrics = self._weigh(self._carried.model, self._modules_of(group), temperature, draw)
            decisions.make(place, self._find_maps(group, stays, metrics, partial(_learn, reached)), stays)
        return decisions.tell()

    def measure(self, stays: Bools) -> float:
        """By how much the outputs diverge from the model's with these units alone and their consumers refitted."""
        return self.diverge(self._draft(np.append(stays, True)))

    def diverge(self, other: nn.Module) -> float:
        """By how much the outputs of another model diverge from the model's."""
        return self._all.diverge(other)

    def _draw(self, number: int) -> _Runs:
        """A sample of the inputs: data sets come in the order of their classes."""
        generator = torch.Generator().manual_seed(self._seed + number)
        drawn = torch.randperm(count_rows(self._all.inputs), generator=generator)[:METRIC_INPUTS]
        outputs = [each[drawn] for each in self._all.outputs]
        return _Runs(take_rows(self._all.inputs, drawn), outputs, self._distance)

    def _weigh(
        self, model: nn.Module, modules: Sequence[str], temperature: float | None, draw: int = 0
    ) -> dict[str, Tensor]:
        if temperature is not None and modules:
            inputs = self._draw(draw).inputs
            return gather_metrics(
                model, modules, inputs, self._distance, temperature=temperature, seed=self._seed + draw
            )
        sizes = {wiring.module: len(wiring.outputs) for wiring in self._consumers}
        return {name: torch.eye(sizes[name], dtype=torch.float64) for name in modules}

    def _find_last(self, place: int) -> int:
        """Where the last module stands that reads the group."""
        readers = self._consumers_of(self._groups[place])
        return max((self._consumers.index(reader) for reader in readers), default=len(self._consumers))

    def _consumers_of(self, group: Group) -> list[Wiring]:
        return [wiring for wiring in self._consumers if np.isin(wiring.inputs, group.units).any()]

    def _modules_of(self, group: Group) -> list[str]:
        return [wiring.module for wiring in self._consumers_of(group)]

    def _find_maps(self, group: Group, stays: Bools, metrics: Mapping[str, Tensor], source: Source) -> list[Consumer]:
        """What reads the group, as linear maps of what stays."""
        numbers = np.full(self._unit_count + 1, NONE)
        numbers[group.units] = np.arange(len(group.units))
        consumers = []
        for wiring in self._consumers_of(group):
            for part in _split(self._model, wiring):
                left = torch.from_numpy(stays[part.units])
                units = torch.from_numpy(numbers[part.units])[left]
                if (units != NONE).any():
                    squares, weight = source(wiring.module, part, left)
                    metric = metrics[wiring.module][part.outputs][:, part.outputs]
                    consumers.append(Consumer(squares, weight, metric, units))
        return consumers

    def _know(self, module: str, part: _Part, left: Tensor) -> tuple[Tensor, Tensor]:
        """By what reaches the module in the whole model."""
        squares = self._moments[module].regularise(part.number)
        if left.all():
            return squares, part.weight
        return squares[left][:, left], refit(squares, part.weight, left)[left]

    def _draft(self, stays: Bools) -> nn.Module:
        draft = copy.deepcopy(self._model)
        self._refit(draft, [each for each in self._consumers if not stays[each.inputs].all()], stays)
        return draft

    @torch.no_grad()
    def _refit(self, draft: nn.Module, consumers: Sequence[Wiring], stays: Bools) -> None:
        """Weights of zero for what does not stay, and the others with it."""
        for wiring in consumers:
            module, moments = draft.get_submodule(wiring.module), self._moments[wiring.module]
            assert isinstance(module, Weighted)
            old = self._model.get_submodule(wiring.module).bias
            bias = old.detach().clone() if isinstance(old, Tensor) else module.weight.new_zeros(len(wiring.outputs))
            fitted = []
            for part in _split(self._model, wiring):
                fitted.append(
                    refit(moments.regularise(part.number), part.weight, torch.from_numpy(stays[part.units]))
                )
                bias[part.outputs] += (moments.mean[part.number].double() @ (part.weight - fitted[-1])).to(bias)
            module.weight.data = from_matrix(module, torch.stack(fitted)).to(module.weight)
            module.bias = nn.Parameter(bias, requires_grad=False)


def _learn(reached: Mapping[str, Reached], module: str, part: _Part, left: Tensor) -> tuple[Tensor, Tensor]:
    """By what reaches the module when other groups have lost units: the weights that then come nearest to what it
    gave in the whole model."""
    rows, wanted = (each[part.number] for each in (reached[module].rows, reached[module].wanted))
    rows = rows[:, : int(left.sum())]
    rows, wanted = rows - rows.mean(0), wanted - wanted.mean(0)
    squares = rows.T @ rows / len(rows)
    ridge = add_ridge(squares)
    weight = torch.linalg.solve(squares, rows.T @ wanted / len(rows) + ridge * part.weight[left])
    return squares, weight


def list_consumers(structure: Structure, model: nn.Module) -> list[Wiring]:
    """The modules that read units and can be refitted, in the order of the calls."""
    return [
        wiring
        for wiring in structure.wirings
        if wiring.reads_units and isinstance(model.get_submodule(wiring.module), Weighted)
    ]


def group_is_read(structure: Structure, group: Group, model: nn.Module) -> bool:
    """Whether modules that can be refitted read every unit of the group."""
    read = [wiring.inputs for wiring in list_consumers(structure, model)]
    return bool(read) and bool(np.isin(group.units, np.concatenate(read)).all())


@dataclass(frozen=True)
class _Part:
    """One group of a convolution, or all of another module: weights (columns, outputs), the unit of every column."""

    number: int
    weight: Tensor
    outputs: Tensor
    units: Ints


Source: TypeAlias = Callable[[str, _Part, Tensor], tuple[Tensor, Tensor]]
"""From a module, a part of it and which of its columns stay, to the covariance of these and the weights on them."""


def _split(model: nn.Module, wiring: Wiring) -> list[_Part]:
    module = model.get_submodule(wiring.module)
    assert isinstance(module, Weighted)
    weight = to_matrix(module, module.weight.detach().double())
    inputs = wiring.inputs.reshape(wiring.groups, -1)
    outputs = torch.arange(len(wiring.outputs)).reshape(wiring.groups, -1)
    kernel = weight.shape[1] // inputs.shape[1]
    return [
        _Part(number, weight[number], rows, np.repeat(units, kernel))
        for number, (rows, units) in enumerate(zip(outputs, inputs, strict=True))
    ]

"""Searching: model and inputs to scores under a budget, the public `search`: what the smaller model needs most."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.batch import digest_rows, gather_batch
from critical_neurons.compensating import MOST_COLUMNS, Choice, Group, check_inputs, reads_units
from critical_neurons.costs import Measure, count_cost, count_new_biases, differentiate_cost
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.gating import GatedModel, GateSearch, Limit
from critical_neurons.network import Bools, Floats, Ints, Network
from critical_neurons.pipeline import Compensation, check_compensation
from critical_neurons.plans import group_units
from critical_neurons.reading import read_network, unwrap
from critical_neurons.scores import LayerChoice, Scores
from critical_neurons.selecting import Scope, select_units
from critical_neurons.settings import BUDGETS, Settings, as_names
from critical_neurons.sharing import share_budget
from critical_neurons.solution import Status
from critical_neurons.surroundings import describe_versions

REMOVED_BELOW = 0.5
"""Scores of the units that stay are at least this."""

UNCERTIFIED = "searched: good units for this budget, nothing is certified of the network's loss"


def search(
    model: nn.Module,
    inputs: Any,
    *,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    scope: Scope = "layer",
    compensate: Compensation = "least_squares",
    seed: int = 0,
    ignore: Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Scores:
    """Scores from a search for the smaller model, of a given size, whose outputs are nearest to the model's own.

    Give one of `units`, `params`, `macs`, the share kept at most; `units` of every layer, or with `scope="global"` of
    all together. `cn.plan(scores)` keeps to that budget: what stays has a score of at least 0.5. Labels are not
    needed. `inputs` are a thousand typical ones, or more; a tensor, an array or an iterable of batches.

    `compensate` is what `cn.prune` will be told. With "least_squares" the units of a layer go one after the other,
    always the one whose part the others take over best, judged by the error of what reads them and by how the loss
    feels it; layers from the last to the first. Else gates on all units follow the gradient of the loss until they
    are open or shut, and are then exchanged as long as that helps.

    Nothing is certified of the network: `objective` is the Kullback-Leibler divergence of the outputs, and there is
    no bound. With "least_squares" each layer's choice by itself has one in `layer_choices`: a least-squares error,
    and what no choice of as many units of that layer falls below.
    `ignore`, `start` and `stop` as for `score`. `progress` is told how far the search has come.
    """
    started = time.monotonic()
    check_compensation(compensate)
    given = {"units": units, "params": params, "macs": macs}
    budget: dict[str, Any] = {name: share for name, share in given.items() if share is not None}
    if len(budget) != 1:
        raise InvalidSettingError("search: give one of units=, params= and macs=.")
    if scope != "layer":
        budget["scope"] = scope
    settings = Settings(budget=budget, seed=seed, ignore=as_names(ignore), start=start, stop=stop)
    batch = gather_batch(inputs)
    check_inputs(len(batch))
    network = read_network(model, torch.from_numpy(batch.inputs[:4]), ignore=settings.ignore, start=start, stop=stop)
    if not network.scored:
        raise InvalidInputError(f"the network has nothing to score:\n{network}")
    source = copy.deepcopy(unwrap(model)).cpu().eval().requires_grad_(False)
    rows = torch.from_numpy(batch.inputs).to(next(source.parameters()).dtype)
    task = _Task(network, source, rows, budget, seed, progress, biases_added=compensate != "none")
    wide = _find_wide(network, source)
    notes = [*network.notes, UNCERTIFIED]
    by_elimination = compensate == "least_squares" and not wide
    if compensate == "least_squares" and wide:
        notes.append(f"{', '.join(wide)}: too many weights for a unit to be refitted; units chosen as if none were")
    per_unit, loss, layer_choices = task.eliminate() if by_elimination else (*task.descend(), ())
    return replace(
        task.frame(per_unit),
        objective=loss,
        layer_choices=layer_choices,
        seconds=time.monotonic() - started,
        settings={
            "method": "elimination" if by_elimination else "gates",
            "compensate": compensate,
            "budget": budget,
            "seed": seed,
            "ignore": list(settings.ignore),
            "start": start,
            "stop": stop,
            "inputs": digest_rows(batch.inputs),
            "input_shape": list(batch.inputs.shape[1:]),
            "versions": describe_versions("torch", "numpy"),
        },
        notes=(*notes, *map(str, layer_choices)),
    )


def _find_wide(network: Network, model: nn.Module) -> list[str]:
    """Modules that refitting leaves as they are, but for their bias."""
    names = [wiring.module for wiring in network.wirings if reads_units(wiring)]
    return [name for name in names if model.get_submodule(name).get_parameter("weight")[0].numel() > MOST_COLUMNS]


@dataclass(frozen=True)
class _Task:
    network: Network
    model: nn.Module
    inputs: Tensor
    budget: dict[str, Any]
    seed: int
    tell: Callable[[str], None]
    biases_added: bool

    @property
    def groups(self) -> list[tuple[Ints, int]]:
        return group_units(self.network.scored, self.network.groups)

    @property
    def measure(self) -> Measure:
        return next(name for name in BUDGETS if name in self.budget)

    @property
    def by_layer(self) -> bool:
        return self.measure == "units" and "scope" not in self.budget

    def eliminate(self) -> tuple[Floats, float, tuple[LayerChoice, ...]]:
        """Scores by the order in which units go, the loss of what is left, and what is known of each choice."""
        choice = Choice(
            self.model,
            self.network.wirings,
            [Group(units, blocks) for units, blocks in self.groups],
            self.inputs,
            seed=self.seed,
            progress=self._report("gathering what layers read"),
        )
        if self.by_layer:
            stays = self._select(np.zeros(self.network.unit_count))
            counts = [int(stays[units].sum()) for units, _ in self.groups]
        else:
            traced = choice.trace(self._report("layers tried"))
            losses = [each.errors.numpy() for each in traced]
            counts = share_budget(self.groups, losses, self._cost, self._slope, self._limit(1.0))
        chosen = choice.choose(counts, self._report("layers chosen from"))
        per_unit = np.zeros(self.network.unit_count)
        for (units, _), count, order in zip(self.groups, counts, chosen.orders, strict=True):
            per_unit[units[order]] = _grade(len(units), count)
        stays = self._select(per_unit)
        if np.array_equal(stays, per_unit >= REMOVED_BELOW):
            errors = zip(self.groups, chosen.errors, chosen.bounds, strict=True)
            return (
                per_unit,
                chosen.loss,
                tuple(LayerChoice(self._name_layers(units), error, bound) for (units, _), error, bound in errors),
            )
        return _rank(per_unit, stays), choice.measure(stays), ()  # units of one group may differ in what they cost

    def descend(self) -> tuple[Floats, float]:
        """Scores by gates, what stays chosen again by exchanges, and the loss of what is left."""
        network = self.network
        size = sum(math.prod(op.shape) for op in network.ops)
        gated = GatedModel(self.model, network.holds, network.unit_count, size)
        found = GateSearch(gated, self.inputs, self.seed)
        gates = found.descend(self._limit_gates, progress=self._report("steps"))
        stays = self._select(gates)
        within = [part for units, blocks in self.groups for part in units.reshape(blocks, -1)]
        self.tell("exchanging units")
        stays, _ = found.exchange(stays, within)
        worth = -found.differentiate(stays)  # to first order, what the loss rises by without the unit
        per_unit = _rank(worth, stays)
        stays = self._select(per_unit)  # what was exchanged may differ in what it costs
        return _rank(per_unit, stays), found.measure(stays, temperature=1.0)

    def _name_layers(self, units: Ints) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.network.scored if np.isin(layer.units, units).any())

    def frame(self, per_unit: Floats) -> Scores:
        """Scores with these values and nothing else to say."""
        network = self.network
        return Scores(
            values_by_layer={layer.name: per_unit[layer.units] for layer in network.scored},
            layers=network.layers,
            groups=network.groups,
            holds=network.holds,
            wirings=network.wirings,
            fingerprint=network.fingerprint,
            status=Status.FEASIBLE,
            objective=None,
            bound=None,
            gap=None,
            seconds=0.0,
            settings={"budget": self.budget, "start": network.span.start, "stop": network.span.stop},
            history=(),
            sizes={},
            logit_error=0.0,  # the model itself is run
        )

    def _select(self, values: Floats) -> Bools:
        """What the budget leaves of the highest-valued units."""
        low, high = values.min(), values.max()
        scores = self.frame((values - low) / (high - low) if high > low else values)
        return select_units(scores, biases_added=self.biases_added).stays[:-1]

    def _limit_gates(self, gates: Floats, way: float) -> list[Limit]:
        if self.by_layer:
            share = self.budget["units"]
            return [
                Limit(units, np.ones(len(units)), len(units) * (1 - way * (1 - share))) for units, _ in self.groups
            ]
        kept = np.append(gates, 1.0)
        slope = np.maximum(self._slope(kept)[:-1], np.finfo(float).tiny)
        room = slope @ gates + self._limit(way) - self._cost(kept)  # the cost to first order
        scale = slope.mean()
        return [Limit(np.arange(len(gates)), slope / scale, max(room / scale, 0.0))]

    def _limit(self, way: float) -> float:
        """What may be left once so much of the way down to the budget has been gone."""
        everything = np.ones(self.network.unit_count + 1)
        whole = everything[:-1].sum() if self.measure == "units" else self._count(everything)
        return float(whole * (1 - way * (1 - self.budget[self.measure])))

    def _cost(self, kept: Floats) -> float:
        if self.measure == "units":
            return float(kept[:-1].sum())
        added = self.biases_added and self.measure == "params"
        return self._count(kept) + (count_new_biases(self.network.wirings, kept, everywhere=True) if added else 0.0)

    def _count(self, kept: Floats) -> float:
        return count_cost(self.network.wirings, kept, self.measure)

    def _slope(self, kept: Floats) -> Floats:
        if self.measure == "units":
            return np.append(np.ones(len(kept) - 1), 0.0)
        return differentiate_cost(self.network.wirings, kept, self.measure)

    def _report(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.tell(f"{done} of {total} {what}")


def _rank(values: Floats, stays: Bools) -> Floats:
    """Scores that rise with the values, those of the units that stay above all others."""
    per_unit = np.zeros(len(values))
    per_unit[np.lexsort((values, stays))] = _grade(len(values), int(stays.sum()))
    return per_unit


def _grade(count: int, kept: int) -> Floats:
    """Ascending scores for so many units in the order in which they go, those that stay at least `REMOVED_BELOW`."""
    gone = count - kept
    below = REMOVED_BELOW * np.arange(gone) / max(gone, 1)
    above = REMOVED_BELOW + (1 - REMOVED_BELOW) * (np.arange(kept) + 1) / max(kept, 1)
    return np.concatenate([below, above])

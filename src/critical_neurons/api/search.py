"""Search: model and inputs to scores under a budget, the public `search`: what the smaller model needs most."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from critical_neurons.core.budget import Budget, Scope
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.distillation import Distillation, split_compensation
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.scores import LayerChoice, Scores, spread_scores
from critical_neurons.core.settings import (
    Compensation,
    DistanceName,
    EffortName,
    OutputDistance,
    as_names,
    check_seed,
)
from critical_neurons.core.solution import Status
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Bools, Floats, Ints, Structure
from critical_neurons.errors import InvalidInputError
from critical_neurons.readers import isolated
from critical_neurons.removal.parametrised import make_plain
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.removal.rows import (
    call_model,
    count_numbers,
    count_rows,
    digest_inputs,
    gather_inputs,
    match_model,
    take_rows,
)
from critical_neurons.selection.budget_counts import Spending
from critical_neurons.selection.consumers import group_is_read
from critical_neurons.selection.distance import choose_distance
from critical_neurons.selection.effort import choose_effort
from critical_neurons.selection.elimination import Elimination
from critical_neurons.selection.gate_descent import GateSearch
from critical_neurons.selection.gated_model import GatedModel
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons.selection.plan_rules import keep_within
from critical_neurons.structure import copy_model, find_structure, join_rows, select_span, unwrap

REMOVED_BELOW = 0.5
"""Scores of the units that stay are at least this."""

FEW_ROWS = 64
"""Inputs whose outputs tell how outputs are compared."""

NUMBERS_PER_OUTPUT = 3
"""Numbers for each output of a layer: it is normalised and activated as well."""

UNCERTIFIED = "searched: good units for this budget, nothing is certified of the network's loss"
SKETCHED = "sketched: the units of every layer chosen as if the other layers lost none"
HALFWAY = "sketched: units chosen for a budget halfway down"
UNFITTED = "not all units are read by layers that could be refitted; units chosen as if none were"


@isolated
def search(
    model: nn.Module,
    inputs: Any,
    *,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    scope: Scope = "layer",
    compensate: Compensation | Distillation = "least_squares",
    effort: EffortName = "standard",
    distance: DistanceName | OutputDistance = "auto",
    seed: int = 0,
    ignore: Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Scores:
    """Scores from a search for the smaller model, of a given size, whose outputs are nearest to the model's own.

    Give one of `units`, `params`, `macs`, the share kept at most; `units` of every layer, or with `scope="global"` of
    all together. `cn.plan(scores)` keeps to that budget: what stays has a score of at least 0.5. Labels are not
    needed. `inputs` are a thousand typical ones, or more: a tensor or array, a tuple or dict of them for a model of
    several inputs, or an iterable of batches. The model may be anything that runs on them.

    * `compensate` is what `cn.prune` will be told. With "least_squares" or "distil" the units of a layer go one after
      the other, always the one whose part the others take over best: judged by the error of what reads them, weighted
      by the Fisher matrix. Else gates on all units follow the gradient of the loss until they are open or shut.
    * `effort`: "quick" chooses from every layer as if the others stayed whole; "standard" revises that once by what
      reaches each layer with the others smaller and refitted; "thorough" several times. What decides most often as
      the model does is taken.
    * `distance`: how outputs are compared. "divergence", of class probabilities, for one output (batch, classes);
      "squares", mean squared differences relative to the variance, summed over outputs, for everything else; "auto"
      takes the divergence for a single output (batch, columns) of at most ten columns, or much smaller than an input:
      give "squares" for regression. Or a function of
      your own, `distance(outputs, wanted)`, of what the smaller model and the model give, tuples and dicts as they
      are, to a tensor with one number or one for every input, differentiable by the first.
    * `ignore`: layers that lose nothing. `start`, `stop`: names of the first and of the last layer that may lose
      units, or of modules that contain them; the budget is then a share of what lies between.

    Nothing is certified of the network: `objective` is the distance of the outputs, and there is no bound. With
    "least_squares" each layer's choice by itself has one in `layer_choices`: a least-squares error, beyond what the
    other layers cost, and what no choice of as many units of that layer falls below. `progress` is told how far the
    search has come.

    >>> scores = cn.search(model, inputs, units=0.5, effort="quick")
    >>> smaller = cn.prune(model, cn.plan(scores), inputs, compensate="least_squares")
    >>> smaller[0].out_channels
    2
    """
    budget = Budget(units=units, params=params, macs=macs, scope=scope)
    return Search(
        model,
        inputs,
        compensate=compensate,
        effort=effort,
        distance=distance,
        seed=seed,
        ignore=ignore,
        start=start,
        stop=stop,
        progress=progress,
    ).find(budget)


class Search:
    """A model and inputs, read and looked into once, and scores for one budget after another.

    Settings as for `search`; a budget as for `score`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        compensate: Compensation | Distillation = "least_squares",
        effort: EffortName = "standard",
        distance: DistanceName | OutputDistance = "auto",
        seed: int = 0,
        ignore: Collection[str] = (),
        start: str | None = None,
        stop: str | None = None,
        progress: Callable[[str], None] = lambda text: None,
        structure: Structure | None = None,
    ) -> None:
        self._seed, self._ignore, self._span = check_seed(seed), as_names(ignore), Span(start, stop)
        self._compensate, self.tell = split_compensation(compensate)[0], progress
        source = unwrap(model)
        rows = gather_inputs(inputs)
        check_inputs(rows)
        found = find_structure(source, rows, ignore=self._ignore) if structure is None else structure
        self.structure = select_span(found, start, stop)
        self._model = make_plain(copy_model(source).requires_grad_(False))
        self._rows = join_rows(self._model, match_model(rows, self._model))
        with torch.no_grad():
            few = take_rows(self._rows, torch.arange(min(FEW_ROWS, count_rows(self._rows))))
            outputs = call_model(self._model, few)
        self._distance = choose_distance(outputs, distance, count_numbers(self._rows))
        if not self.structure.groups:
            raise InvalidInputError(f"the network has nothing that could be removed:\n{self.structure}")
        self.refits = all(group_is_read(self.structure, group, self._model) for group in self.structure.groups)
        self._eliminates = self._compensate == "least_squares" and self.refits
        self.effort = choose_effort(effort)

    def find(self, budget: Budget) -> Scores:
        """The units to keep under the budget, and the loss of what is left as `objective`."""
        task = self._begin(budget)
        return self._finish(task, task.eliminate() if self._eliminates else task.descend())

    def sketch(self, budget: Budget) -> Scores:
        """Scores to look for the right budget with: from what was done for all budgets, and not as good."""
        if self._eliminates:
            task = self._begin(budget)
            return self._finish(task, _Found(task.trace(), None), SKETCHED)
        return replace(self._halfway, notes=(*self._halfway.notes, HALFWAY))

    @cached_property
    def layers(self) -> LayerwiseSearch:
        return LayerwiseSearch(
            self._model,
            self.structure,
            self._rows,
            self._distance,
            seed=self._seed,
            fisher_share=self.effort.fisher_share,
            progress=self.report("gathering what layers read"),
        )

    @cached_property
    def traced(self) -> list[Elimination]:
        """Every group by itself in the whole model, for all budgets."""
        found = self.layers.order(self.layers.whole, self.report("layers tried"))
        return self.layers.price(found, self.effort.passes, self.report("layers priced"))

    @cached_property
    def gates(self) -> GateSearch:
        numbers = sum(NUMBERS_PER_OUTPUT * len(each.outputs) * each.positions for each in self.structure.wirings)
        numbers = max(numbers, 1)  # weights may be parameters of no layer
        gated = GatedModel(self._model, self.structure)
        return GateSearch(gated, self._rows, self._distance, self._seed, size=numbers, steps=self.effort.steps)

    @cached_property
    def _halfway(self) -> Scores:
        """Of the multiply-adds that can go one half gone."""
        return self.find(Budget(macs=halve_macs(self.structure)))

    def report(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.tell(f"{done} of {total} {what}")

    def _begin(self, budget: Budget) -> _Task:
        spending = Spending(self.structure, budget, self._compensate != "none")
        spending.check()
        return _Task(self, spending, time.monotonic())

    def _finish(self, task: _Task, found: _Found, *notes: str) -> Scores:
        if self._compensate == "least_squares" and not self.refits:
            notes = (UNFITTED, *notes)
        return Scores(
            values_by_layer=spread_scores(self.structure, found.per_unit),
            structure=self.structure,
            status=Status.FEASIBLE,
            objective=found.loss,
            bound=None,
            gap=None,
            seconds=time.monotonic() - task.started,
            settings={
                "method": "elimination" if self._eliminates else "gates",
                "seed": self._seed,
                "ignore": list(self._ignore),
                "versions": describe_versions("torch", "numpy"),
            },
            history=(),
            sizes={},
            logit_error=0.0,  # the model itself is run
            notes=(*self.structure.notes, UNCERTIFIED, *notes, *map(str, found.choices)),
            layer_choices=found.choices,
            budget=task.budget,
            compensate=self._compensate,
            span=self._span,
            inputs=tuple(digest_inputs(self._rows)),
        )


@dataclass(frozen=True)
class _Task:
    """One budget, and the search it belongs to."""

    search: Search
    spending: Spending
    started: float

    @property
    def structure(self) -> Structure:
        return self.search.structure

    @property
    def budget(self) -> Budget:
        return self.spending.budget

    def eliminate(self) -> _Found:
        """Scores by the order in which units go, revised in rounds as long as that helps."""
        layers, rounds = self.search.layers, self.search.effort.rounds
        counts, view = self._count(), layers.whole
        per_unit = self._grade(counts, layers.exchange(view, self.search.traced, counts))
        stays = self._keep_best(per_unit)
        if not rounds:
            return _Found(per_unit, layers.measure(stays), layers.describe(view, stays))
        after = layers.carry_out(stays)
        best, least = (per_unit, view, after), after.miss
        try:
            for done in range(rounds):
                self.search.tell(f"{done} of {rounds} rounds")
                view = after
                per_unit = self._grade(counts, layers.exchange(view, layers.order(view), counts))
                after = layers.carry_out(self._keep_best(per_unit))
                if after.miss < least:
                    best, least = (per_unit, view, after), after.miss
        except KeyboardInterrupt:
            self.search.tell("interrupted: the best so far is kept")
        per_unit, view, after = best
        return _Found(per_unit, after.loss, layers.describe(view, after.stays))

    def trace(self) -> Floats:
        """Scores by the order in which units of a layer go when all others stay."""
        return self._grade(self._count(), [each.order.numpy() for each in self.search.traced])

    def _count(self) -> list[int]:
        """How many stay of every group: what is given, or as is best by what the units of each cost the loss."""
        if self.spending.by_layer:
            stays = self._keep_best(np.zeros(self.structure.unit_count))
            return [int(stays[group.units].sum()) for group in self.structure.groups]
        return self.spending.share([each.errors.numpy() for each in self.search.traced])

    def _grade(self, counts: Sequence[int], orders: Sequence[Ints]) -> Floats:
        """As they are, unless a plan keeps others: units of one group may differ in what they cost."""
        per_unit = np.zeros(self.structure.unit_count)
        for group, count, order in zip(self.structure.groups, counts, orders, strict=True):
            per_unit[group.units[order]] = _grade(len(group), count)
        stays = self._keep_best(per_unit)[:-1]
        return per_unit if np.array_equal(stays, per_unit >= REMOVED_BELOW) else _rank(per_unit, stays)

    def descend(self) -> _Found:
        """Scores by gates."""
        gates = self.search.gates.descend(self.spending.limit_gates, self.search.report("steps"))
        stays = self._keep_best(gates)[:-1]
        return _Found(_rank(gates, stays), self.search.gates.measure(stays))

    def _keep_best(self, values: Floats) -> Bools:
        """What the budget leaves of the highest-valued units, with a last entry for NO_UNIT."""
        return keep_within(self.structure, values, self.budget, biases_added=self.spending.biases_added)


@dataclass(frozen=True, eq=False)
class _Found:
    """Scores, the loss of what is left, and what is known of every layer's choice."""

    per_unit: Floats
    loss: float | None
    choices: tuple[LayerChoice, ...] = ()


def _rank(values: Floats, stays: Bools) -> Floats:
    """Scores that rise with the values, those of the units that stay above all others."""
    per_unit = np.zeros(len(values))
    per_unit[np.lexsort((values, stays))] = _grade(len(values), int(stays.sum()))
    return per_unit


def _grade(count: int, kept: int) -> Floats:
    """Ascending scores for `count` units in the order in which they go, those that stay at least `REMOVED_BELOW`."""
    gone = count - kept
    below = REMOVED_BELOW * np.arange(gone) / max(gone, 1)
    above = REMOVED_BELOW + (1 - REMOVED_BELOW) * (np.arange(kept) + 1) / max(kept, 1)
    return np.concatenate([below, above])

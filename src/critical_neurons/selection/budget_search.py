"""Budget search: a model and inputs, analysed once, and scores for one budget after another.

With refitting, units are eliminated layer by layer (`layerwise_search`) and the budget is allocated to layers by what
their removals cost the loss; without it, gates on all units follow the gradient (`gate_descent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from critical_neurons.core.budget import Budget
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
from critical_neurons.removal.parametrised import make_plain
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.removal.rows import digest_inputs, gather_inputs, match_model
from critical_neurons.selection.budget_counts import Spending
from critical_neurons.selection.consumers import group_is_read
from critical_neurons.selection.distance import try_distance
from critical_neurons.selection.effort import choose_effort
from critical_neurons.selection.elimination import Elimination
from critical_neurons.selection.gate_descent import GateSearch
from critical_neurons.selection.gated_model import GatedModel
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons.selection.plan_rules import check_counts, keep_within
from critical_neurons.structure import copy_model, find_structure, join_rows, select_span, unwrap

REMOVED_BELOW = 0.5
"""Units that stay have at least this score."""

NUMBERS_PER_OUTPUT = 3
"""Numbers computed per output of a layer, since it is normalised and activated as well."""

UNCERTIFIED = "searched: good units for this budget, nothing is certified of the network's loss"
SKETCHED = "sketched: the units of every layer chosen as if the other layers lost none"
HALFWAY = "sketched: units chosen for a budget halfway down"
UNFITTED = "not all units are read by layers that could be refitted; units chosen as if none were"


@dataclass(frozen=True)
class SearchSettings:
    """How units are searched for; `critical_neurons.search` explains each setting."""

    compensate: Compensation | Distillation = "least_squares"
    effort: EffortName = "standard"
    distance: DistanceName | OutputDistance = "auto"
    seed: int = 0
    ignore: str | Collection[str] = ()
    start: str | None = None
    stop: str | None = None
    round_to: int = 1

    def __post_init__(self) -> None:
        split_compensation(self.compensate)
        object.__setattr__(self, "seed", check_seed(self.seed))
        object.__setattr__(self, "ignore", as_names(self.ignore))
        check_counts(round_to=self.round_to)

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)

    @property
    def read(self) -> dict[str, Any]:
        """The settings that `score` shares with `search`."""
        return {"ignore": self.ignore, "start": self.start, "stop": self.stop}


class Search:
    """A model and inputs, analysed once, and scores for any number of budgets. `tell` receives progress."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        settings: SearchSettings,
        *,
        progress: Callable[[str], None] = lambda text: None,
        structure: Structure | None = None,
    ) -> None:
        self._settings, self.tell = settings, progress
        self._compensate, self.effort = split_compensation(settings.compensate)[0], choose_effort(settings.effort)
        source, rows = unwrap(model), gather_inputs(inputs)
        check_inputs(rows)
        found = find_structure(source, rows, ignore=settings.ignore) if structure is None else structure
        self.structure = select_span(found, settings.start, settings.stop)
        self._model = make_plain(copy_model(source).requires_grad_(False))
        self._rows = join_rows(self._model, match_model(rows, self._model))
        self._distance, _ = try_distance(self._model, self._rows, settings.distance)
        if not self.structure.groups:
            raise InvalidInputError(f"the network has nothing that could be removed:\n{self.structure}")
        self.refits = all(group_is_read(self.structure, group, self._model) for group in self.structure.groups)
        self._eliminates = self._compensate == "least_squares" and self.refits

    def find(self, budget: Budget) -> Scores:
        """Scores for the budget, with the distance of the smaller model's outputs as `objective`."""
        task = self._begin(budget)
        return self._finish(task, task.eliminate() if self._eliminates else task.descend())

    def sketch(self, budget: Budget) -> Scores:
        """Cheap and rougher scores for the budget, from what was computed for all budgets, to find the right one."""
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
            seed=self._settings.seed,
            fisher_share=self.effort.fisher_share,
            progress=self.report("gathering what layers read"),
        )

    @cached_property
    def traced(self) -> list[Elimination]:
        """The order of removal in every group, with all other groups whole, for all budgets."""
        found = self.layers.order(self.layers.whole, self.report("layers tried"))
        return self.layers.price(found, self.effort.passes, self.report("layers priced"))

    @cached_property
    def gates(self) -> GateSearch:
        numbers = sum(NUMBERS_PER_OUTPUT * len(each.outputs) * each.positions for each in self.structure.wirings)
        numbers = max(numbers, 1)  # without layers weights may be bare parameters
        gated = GatedModel(self._model, self.structure)
        return GateSearch(
            gated, self._rows, self._distance, self._settings.seed, size=numbers, steps=self.effort.steps
        )

    @cached_property
    def _halfway(self) -> Scores:
        """Scores for removing half of the removable multiply-adds."""
        return self.find(Budget(macs=halve_macs(self.structure)))

    def report(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.tell(f"{done} of {total} {what}")

    def _begin(self, budget: Budget) -> _Task:
        spending = Spending(self.structure, budget, self._compensate != "none", self._settings.round_to)
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
                "seed": self._settings.seed,
                "ignore": list(self._settings.ignore),
                "versions": describe_versions("torch", "numpy"),
            },
            history=(),
            sizes={},
            logit_error=0.0,  # the model itself is run
            notes=(*self.structure.notes, UNCERTIFIED, *notes, *map(str, found.choices)),
            layer_choices=found.choices,
            budget=task.budget,
            compensate=self._compensate,
            span=self._settings.span,
            inputs=tuple(digest_inputs(self._rows)),
        )


@dataclass(frozen=True)
class _Task:
    """The search for one budget."""

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
        """Scores by the order of elimination; revised in rounds, of which the best is returned."""
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
        """Scores by the order of elimination in each layer, with all other layers whole."""
        return self._grade(self._count(), [each.order.numpy() for each in self.search.traced])

    def _count(self) -> list[int]:
        """How many units every group keeps: as the budget says, or allocated by what removals cost the loss."""
        if self.spending.by_layer:
            stays = self._keep_best(np.zeros(self.structure.unit_count))
            return [int(stays[group.units].sum()) for group in self.structure.groups]
        return self.spending.share([each.errors.numpy() for each in self.search.traced])

    def _grade(self, counts: Sequence[int], orders: Sequence[Ints]) -> Floats:
        """Scores from orders of removal. Adjusted if a plan would keep other units, as their costs may differ."""
        per_unit = np.zeros(self.structure.unit_count)
        for group, count, order in zip(self.structure.groups, counts, orders, strict=True):
            per_unit[group.units[order]] = _grade(len(group), count)
        stays = self._keep_best(per_unit)[:-1]
        return per_unit if np.array_equal(stays, per_unit >= REMOVED_BELOW) else _rank(per_unit, stays)

    def descend(self) -> _Found:
        """Scores by gate descent."""
        gates = self.search.gates.descend(self.spending.limit_gates, self.search.report("steps"))
        stays = self._keep_best(gates)[:-1]
        return _Found(_rank(gates, stays), self.search.gates.measure(stays))

    def _keep_best(self, values: Floats) -> Bools:
        """The highest-valued units within the budget, with a last entry for NO_UNIT."""
        return keep_within(
            self.structure,
            values,
            self.budget,
            biases_added=self.spending.biases_added,
            round_to=self.spending.round_to,
        )


@dataclass(frozen=True, eq=False)
class _Found:
    """Scores, the loss of the smaller model, and the choice in every layer."""

    per_unit: Floats
    loss: float | None
    choices: tuple[LayerChoice, ...] = ()


def _rank(values: Floats, stays: Bools) -> Floats:
    """Scores that rise with the values, higher for all units that stay than for the others."""
    per_unit = np.zeros(len(values))
    per_unit[np.lexsort((values, stays))] = _grade(len(values), int(stays.sum()))
    return per_unit


def _grade(count: int, kept: int) -> Floats:
    """Ascending scores for `count` units in the order of removal; the `kept` last are at least `REMOVED_BELOW`."""
    gone = count - kept
    below = REMOVED_BELOW * np.arange(gone) / max(gone, 1)
    above = REMOVED_BELOW + (1 - REMOVED_BELOW) * (np.arange(kept) + 1) / max(kept, 1)
    return np.concatenate([below, above])

"""Search: model and inputs to scores under a budget, the public `search`: what the smaller model needs most."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

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
    as_names,
    check_seed,
)
from critical_neurons.core.solution import Status
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Bools, Floats, Group, Ints, Structure
from critical_neurons.errors import InvalidInputError
from critical_neurons.readers import on_cpu
from critical_neurons.removal.refit.behind import refit_behind
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.removal.remove import remove_units
from critical_neurons.removal.rows import (
    call_model,
    count_numbers,
    count_rows,
    digest_inputs,
    gather_inputs,
    match_model,
    take_rows,
)
from critical_neurons.selection import gate_descent
from critical_neurons.selection.allocation import shift_shares
from critical_neurons.selection.budget import Spending
from critical_neurons.selection.distance import choose_distance, list_outputs
from critical_neurons.selection.effort import choose_effort
from critical_neurons.selection.elimination import Elimination
from critical_neurons.selection.gate_descent import GateSearch, Limit
from critical_neurons.selection.gated_model import GatedModel
from critical_neurons.selection.group_choice import Chosen
from critical_neurons.selection.layerwise_search import TEMPERATURES, Choice, group_is_read, list_consumers
from critical_neurons.selection.rules import keep_within
from critical_neurons.structure import copy_model, find_structure, join_rows, select_span, unwrap

LimitGates: TypeAlias = Callable[[Floats, float], Sequence[Limit]]

REMOVED_BELOW = 0.5
"""Scores of the units that stay are at least this."""

FEW_ROWS = 64
"""Inputs whose outputs tell how outputs are compared."""

NUMBERS_PER_OUTPUT = 3
"""What a layer gives is normalised and activated: so many numbers for each of its outputs."""

UNCERTIFIED = "searched: good units for this budget, nothing is certified of the network's loss"
SKETCHED = "sketched: the units of every layer chosen as if the other layers lost none"
HALFWAY = "sketched: units chosen for a budget halfway down"
UNFITTED = "not all units are read by layers that could be refitted; units chosen as if none were"


@on_cpu
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
    distance: DistanceName = "auto",
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
      by the Fisher matrix; layers from the last to the first, and with more effort again from the first to the last.
      Else gates on all units follow the gradient of the loss until they are open or shut, and are then exchanged as
      long as that helps.
    * `effort`: "quick" makes one choice; "standard" tries several ways where the network is small enough, and takes
      the smaller network that decides most often as the model does; "thorough" does so for a network of any size.
    * `distance`: how outputs are compared. "divergence", of class probabilities, for one output (batch, classes);
      "squares", mean squared differences relative to the variance, summed over outputs, for everything else; "auto"
      takes the divergence for a single output (batch, classes) that is much smaller than an input.
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

    Settings as for `search`; a budget as for `score`. Gradients are needed, so that inference mode is left meanwhile.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        compensate: Compensation | Distillation = "least_squares",
        effort: EffortName = "standard",
        distance: DistanceName = "auto",
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
        self._model = copy_model(source).requires_grad_(False)
        self._rows = join_rows(self._model, match_model(rows, self._model))
        with torch.no_grad():
            few = take_rows(self._rows, torch.arange(min(FEW_ROWS, count_rows(self._rows))))
            outputs = list_outputs(call_model(self._model, few))
        self._distance = choose_distance(outputs, distance, count_numbers(self._rows))
        if not self.structure.groups:
            raise InvalidInputError(f"the network has nothing that could be removed:\n{self.structure}")
        self.refits = all(group_is_read(self.structure, group, self._model) for group in self.structure.groups)
        self._eliminates = self._compensate == "least_squares" and self.refits
        readers = list_consumers(self.structure, self._model)
        columns = max((each.kernel * len(each.inputs) // each.groups for each in readers), default=0)
        self.effort = choose_effort(effort, self._numbers * count_rows(self._rows), columns)

    @torch.inference_mode(False)
    def find(self, budget: Budget) -> Scores:
        """The units to keep under the budget, and the loss of what is left as `objective`."""
        task = self._begin(budget)
        per_unit, loss, layer_choices = task.eliminate() if self._eliminates else (*task.descend(), ())
        found = self._finish(task, per_unit, loss, *map(str, layer_choices))
        return replace(found, layer_choices=layer_choices)

    @torch.inference_mode(False)
    def sketch(self, budget: Budget) -> Scores:
        """Scores to look for the right budget with: from what was done for all budgets, and not as good."""
        if self._eliminates:
            task = self._begin(budget)
            return self._finish(task, task.trace(), None, SKETCHED)
        return replace(self._halfway, notes=(*self._halfway.notes, HALFWAY))

    @cached_property
    def choice(self) -> Choice:
        return Choice(
            self._model,
            self.structure,
            self._rows,
            self._distance,
            seed=self._seed,
            progress=self.report("gathering what layers read"),
        )

    @cached_property
    def traced(self) -> list[Elimination]:
        return self.choice.trace(self.report("layers tried"))

    @cached_property
    def gates(self) -> GateSearch:
        return GateSearch(
            GatedModel(self._model, self.structure),
            self._rows,
            self._distance,
            self._seed,
            size=self._numbers,
            effort=self.effort.steps,
        )

    @cached_property
    def _numbers(self) -> int:
        """In a forward pass of one input, about: a product is followed by a norm and an activation."""
        numbers = sum(NUMBERS_PER_OUTPUT * len(each.outputs) * each.positions for each in self.structure.wirings)
        return max(numbers, 1)  # weights may be parameters of no layer

    def carry_out(self, stays: Bools) -> float:
        """How far the outputs of the smaller, refitted model are from the model's."""
        smaller = remove_units(self._model, self.structure, stays)
        fitted = refit_behind(self._model, smaller, self.structure, stays, self._rows, "least_squares")
        return self.choice.diverge(fitted)

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

    def _finish(self, task: _Task, per_unit: Floats, loss: float | None, *notes: str) -> Scores:
        if self._compensate == "least_squares" and not self.refits:
            notes = (UNFITTED, *notes)
        return Scores(
            values_by_layer=spread_scores(self.structure, per_unit),
            structure=self.structure,
            status=Status.FEASIBLE,
            objective=loss,
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
            notes=(*self.structure.notes, UNCERTIFIED, *notes),
            budget=task.budget,
            compensate=self._compensate,
            span=self._span,
            inputs=tuple(digest_inputs(self._rows)),
        )


@dataclass(frozen=True, eq=False)
class _Way:
    """Scores found by gates under a limit, the share of decisions that then change, and the loss."""

    limit: LimitGates
    per_unit: Floats
    changed: float
    loss: float

    @property
    def rank(self) -> tuple[float, float]:
        return self.changed, self.loss


@dataclass(frozen=True, eq=False)
class _Course:
    """How elimination went: so many units of every group, at a temperature, by a sample; and the orders found."""

    counts: list[int]
    temperature: float | None
    draw: int
    orders: Sequence[Ints]
    revised: bool = False

    def tell(self, choice: Choice) -> Chosen:
        """The orders, with errors and bounds."""
        counts, orders, temperature, draw = self.counts, self.orders, self.temperature, self.draw
        if self.revised:
            return choice.revise(counts, orders, temperature=temperature, draw=draw, settled=True)
        return choice.choose(counts, temperature=temperature, draw=draw, orders=orders)


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
    def groups(self) -> tuple[Group, ...]:
        return self.structure.groups

    @property
    def budget(self) -> Budget:
        return self.spending.budget

    def eliminate(self) -> tuple[Floats, float, tuple[LayerChoice, ...]]:
        """Scores by the order in which units go, the loss of what is left, and what is known of each choice."""
        choice = self.search.choice
        if self.search.effort.single:
            counts = self._list_counts()[0]
            chosen = choice.choose(counts, self.search.report("layers chosen from"))
        else:
            course = self._try_ways()
            counts, chosen = course.counts, course.tell(choice)
        graded = self._grade(counts, chosen.orders)
        per_unit = self._settle(graded)
        as_chosen = np.array_equal(per_unit, graded)
        if not self.search.effort.single:
            loss = self.search.carry_out(self._keep_best(per_unit))
        elif as_chosen and chosen.draft is not None:
            loss = choice.diverge(chosen.draft)
        else:
            loss = choice.measure(per_unit >= REMOVED_BELOW)
        errors = zip(self.groups, chosen.errors, chosen.bounds, strict=True)
        choices = tuple(LayerChoice(group.layers, error, bound) for group, error, bound in errors)
        return per_unit, loss, choices if as_chosen else ()

    def _try_ways(self) -> _Course:
        """The course after which the fewest decisions change."""
        effort, counts = self.search.effort, self._list_counts()
        tried, rounds = TEMPERATURES[: effort.temperatures], effort.rounds
        then: list[tuple[float | None, int]]  # with the best counts
        if effort.shifts:
            counts, first = self._shift_counts(counts), tried
            then = [(felt, draw) for draw in range(1, effort.draws) for felt in tried if felt is not None]
        else:
            first, then = tried[:1], [(felt, 0) for felt in tried[1:]]
        done, total = itertools.count(), len(counts) * len(first) + len(then) + len(TEMPERATURES) * rounds
        report = self.search.report("eliminations tried")

        def take(counts: list[int], temperature: float | None, draw: int) -> _Course:
            report(next(done), total)
            chosen = self.search.choice.choose(counts, temperature=temperature, draw=draw, bounded=False)
            return _Course(counts, temperature, draw, chosen.orders)

        def revise(course: _Course) -> _Course:
            report(next(done), total)
            counts, orders, temperature, draw = course.counts, course.orders, course.temperature, course.draw
            chosen = self.search.choice.revise(counts, orders, temperature=temperature, draw=draw)
            return replace(course, orders=chosen.orders, revised=True)

        courses = [take(each, temperature, 0) for each in counts for temperature in first]
        best = min(courses, key=self._miss)
        courses += [take(best.counts, temperature, draw) for temperature, draw in then]
        by_rank = sorted(courses, key=self._miss)
        latest = list({course.temperature: course for course in reversed(by_rank)}.values())
        for _ in range(rounds):
            latest = [revise(course) for course in latest]
            courses += latest
        return min(courses, key=self._miss)

    def _shift_counts(self, found: list[list[int]]) -> list[list[int]]:
        """Where the budget leaves the counts open, also those after which the fewest decisions change."""
        if self.spending.by_layer:
            return found
        orders = [each.order.numpy() for each in self.search.traced]

        def miss(counts: Sequence[int]) -> float:
            return self.search.choice.carrier.miss(self._keep(counts, orders), folds=1)

        self.search.tell("shifting shares of layers")
        shifted = shift_shares(self.groups, min(found, key=miss), lambda counts: self._share(start=counts), miss)
        return found if shifted in found else [*found, shifted]

    def _miss(self, course: _Course) -> float:
        return self.search.choice.carrier.miss(self._keep(course.counts, course.orders))

    def _keep(self, counts: Sequence[int], orders: Sequence[Ints]) -> Bools:
        return self._settle(self._grade(counts, orders)) >= REMOVED_BELOW

    @property
    def _within(self) -> list[Ints]:
        """Units that can be exchanged for each other."""
        return [part for group in self.groups for part in group.units.reshape(group.blocks, -1)]

    def trace(self) -> Floats:
        """Scores by the order in which units of a layer go when all others stay."""
        orders = [each.order.numpy() for each in self.search.traced]
        return self._settle(self._grade(self._list_counts()[0], orders))

    def _list_counts(self) -> list[list[int]]:
        """How many units every group may keep: what is given, or as is best by what the units of each cost the loss;
        unless networks are large also as large a share of every group as can be."""
        if self.spending.by_layer:
            stays = self._select(np.zeros(self.structure.unit_count))
            return [[int(stays[group.units].sum()) for group in self.groups]]
        counts = [self._share()]
        if self.search.effort.even and (even := self._share(start=self.spending.share_evenly())) not in counts:
            counts.append(even)
        return counts

    def _share(self, start: Sequence[int] | None = None) -> list[int]:
        return self.spending.share([each.errors.numpy() for each in self.search.traced], start)

    def _grade(self, counts: Sequence[int], orders: Sequence[Ints]) -> Floats:
        per_unit = np.zeros(self.structure.unit_count)
        for group, count, order in zip(self.groups, counts, orders, strict=True):
            per_unit[group.units[order]] = _grade(len(group), count)
        return per_unit

    def _settle(self, per_unit: Floats) -> Floats:
        """As they are, unless a plan keeps others: units of one group may differ in what they cost."""
        stays = self._select(per_unit)
        return per_unit if np.array_equal(stays, per_unit >= REMOVED_BELOW) else _rank(per_unit, stays)

    def descend(self) -> tuple[Floats, float]:
        """Scores by gates, what stays chosen again by exchanges, and the loss of what is left.

        On small networks in several ways, with several shares of the layers and at several temperatures: the one that
        changes the fewest decisions is taken.
        """
        effort = self.search.effort
        first, *others = gate_descent.TEMPERATURES[: effort.gate_temperatures]
        limits: list[LimitGates] = [self.spending.limit_gates]
        if effort.shifts and self.search.refits and not self.spending.by_layer:
            limits += [partial(self.spending.limit_counts, counts) for counts in self._list_counts()]
        ways = [self._descend(limit, first) for limit in limits]
        best = min(ways, key=lambda way: way.rank)
        ways = [best, *(self._descend(best.limit, other) for other in others)]
        best = min(ways, key=lambda way: way.rank)
        return best.per_unit, best.loss

    def _descend(self, limit: LimitGates, temperature: float) -> _Way:
        found = self.search.gates
        gates = found.descend(limit, temperature, self.search.report("steps"))
        stays = self._select(gates)
        self.search.tell("exchanging units")
        stays, _ = found.exchange(stays, self._within, temperature)
        worth = -found.differentiate(stays)  # to first order, what the loss rises by without the unit
        per_unit = _rank(worth, stays)
        stays = self._select(per_unit)  # what was exchanged may differ in what it costs
        return _Way(limit, _rank(per_unit, stays), found.count_changed(stays), found.measure(stays))

    def _select(self, values: Floats) -> Bools:
        """What the budget leaves of the highest-valued units."""
        return self._keep_best(values)[:-1]

    def _keep_best(self, values: Floats) -> Bools:
        return keep_within(self.structure, values, self.budget, biases_added=self.spending.biases_added)


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

"""Search: model and inputs to scores under a budget, the public `search`: what the smaller model needs most."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from critical_neurons.api.prune import prune
from critical_neurons.core.batch import digest_rows, gather_batch
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.network import Bools, Floats, Ints, Network
from critical_neurons.core.plan import Plan, group_units
from critical_neurons.core.scores import LayerChoice, Scores
from critical_neurons.core.settings import Compensation, Settings, as_names, check_compensation
from critical_neurons.core.solution import Status
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.readers import are_probabilities, on_cpu, read_network, take_logarithms, unwrap
from critical_neurons.removal.refit.least_squares import can_refit
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.selection import gate_descent
from critical_neurons.selection.allocation import shift_shares
from critical_neurons.selection.budget import Spending
from critical_neurons.selection.elimination import Elimination
from critical_neurons.selection.gate_descent import GatedModel, GateSearch, Limit
from critical_neurons.selection.group_choice import Chosen, Group
from critical_neurons.selection.layerwise_search import TEMPERATURES, Choice, reads_units
from critical_neurons.selection.rules import Scope, select_units

LimitGates: TypeAlias = Callable[[Floats, float], Sequence[Limit]]

REMOVED_BELOW = 0.5
"""Scores of the units that stay are at least this."""

SMALL_NUMBERS, MEDIUM_NUMBERS = 10**8, 10**9
"""Numbers in a forward pass of all inputs, up to which many choices are carried out to see which is best, or some."""

MEDIUM_COLUMNS = 1024
"""Weights of a unit, of any module that is refitted, up to which some are: the work grows with their cube."""

DRAWS = 6
"""Samples by which it is found how the loss feels errors, on small networks."""

ROUNDS = 2
"""In which the best choice at every temperature is revised, on small networks."""

UNCERTIFIED = "searched: good units for this budget, nothing is certified of the network's loss"
SKETCHED = "sketched: the units of every layer chosen as if the other layers lost none"
HALFWAY = "sketched: units chosen for a budget halfway down"
UNFITTED = "too many weights for a unit to be refitted; units chosen as if none were"


@on_cpu
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
    feels it; layers from the last to the first, and on small networks again from the first to the last, by what then
    reaches each. Else gates on all units follow the gradient of the loss until they are open or shut, and are then
    exchanged as long as that helps. Unless the network is large, this is done in several ways, and with several
    shares of the layers, and the smaller network is taken that decides most often as the model does.

    Nothing is certified of the network: `objective` is the Kullback-Leibler divergence of the outputs, and there is
    no bound. With "least_squares" each layer's choice by itself has one in `layer_choices`: a least-squares error,
    beyond what the other layers cost, and what no choice of as many units of that layer falls below.
    `ignore`, `start` and `stop` as for `score`. `progress` is told how far the search has come.
    """
    given = {"units": units, "params": params, "macs": macs}
    budget: dict[str, Any] = {name: share for name, share in given.items() if share is not None}
    if len(budget) != 1:
        raise InvalidSettingError("search: give one of units=, params= and macs=.")
    if scope != "layer":
        budget["scope"] = scope
    Settings(budget=budget)
    return Search(
        model,
        inputs,
        compensate=compensate,
        seed=seed,
        ignore=ignore,
        start=start,
        stop=stop,
        progress=progress,
    ).find(budget)


class Search:
    """A model and inputs, read and looked into once, and scores for one budget after another.

    Settings as for `search`; a budget as for `score`. Slopes are needed, so that inference mode is left meanwhile.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        compensate: Compensation = "least_squares",
        seed: int = 0,
        ignore: Collection[str] = (),
        start: str | None = None,
        stop: str | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        check_compensation(compensate)
        self._settings = Settings(seed=seed, ignore=as_names(ignore), start=start, stop=stop)
        self._compensate, self.tell = compensate, progress
        self._batch = gather_batch(inputs)
        check_inputs(len(self._batch))
        rows = torch.from_numpy(self._batch.inputs)
        self.network = read_network(model, rows[:4], ignore=self._settings.ignore, start=start, stop=stop)
        if not self.network.scored:
            raise InvalidInputError(f"the network has nothing to score:\n{self.network}")
        self._source = copy.deepcopy(unwrap(model)).cpu().eval().requires_grad_(False)
        self._rows = rows.to(next(self._source.parameters()).dtype)
        self._model = self._give_logits(copy.deepcopy(self._source))
        self._fixed = _find_fixed(self.network, self._model)
        self.refits = not self._fixed
        self._eliminates = compensate == "least_squares" and self.refits

    @torch.inference_mode(False)
    def find(self, budget: Mapping[str, Any]) -> Scores:
        """The units to keep under the budget, and the loss of what is left as `objective`."""
        task = self._begin(budget)
        per_unit, loss, layer_choices = task.eliminate() if self._eliminates else (*task.descend(), ())
        found = self._finish(task, per_unit, loss, *map(str, layer_choices))
        return replace(found, layer_choices=layer_choices)

    @torch.inference_mode(False)
    def sketch(self, budget: Mapping[str, Any]) -> Scores:
        """Scores to look for the right budget with: from what was done for all budgets, and not as good."""
        if self._eliminates:
            task = self._begin(budget)
            return self._finish(task, task.trace(), None, SKETCHED)
        return replace(self._halfway, notes=(*self._halfway.notes, HALFWAY))

    @property
    def groups(self) -> list[tuple[Ints, int]]:
        return group_units(self.network.scored, self.network.groups)

    @cached_property
    def choice(self) -> Choice:
        return Choice(
            self._model,
            self.network.wirings,
            [Group(units, blocks) for units, blocks in self.groups],
            self._rows,
            seed=self._settings.seed,
            progress=self.report("gathering what layers read"),
        )

    @cached_property
    def traced(self) -> list[Elimination]:
        return self.choice.trace(self.report("layers tried"))

    @cached_property
    def gates(self) -> GateSearch:
        gated = GatedModel(self._model, self.network.holds, self.network.unit_count, self._numbers)
        return GateSearch(gated, self._rows, self._settings.seed)

    @property
    def small(self) -> bool:
        """Whether all ways are tried."""
        return self._numbers * len(self._rows) <= SMALL_NUMBERS

    @property
    def medium(self) -> bool:
        """Whether some ways to eliminate are tried, or all."""
        readers = [wiring for wiring in self.network.wirings if reads_units(wiring)]
        widest = max((reader.kernel * len(reader.inputs) // reader.groups for reader in readers), default=0)
        return self.small or (self._numbers * len(self._rows) <= MEDIUM_NUMBERS and widest <= MEDIUM_COLUMNS)

    @cached_property
    def _numbers(self) -> int:
        """In a forward pass of one input."""
        return sum(math.prod(op.shape) for op in self.network.ops)

    def carry_out(self, plan: Plan) -> float:
        """By how much the outputs of the smaller, refitted model diverge from the model's."""
        smaller = prune(self._source, plan, self._rows, compensate="least_squares")
        return self.choice.diverge(self._give_logits(smaller))

    def _give_logits(self, model: nn.Module) -> nn.Module:
        """The same module, made to give logits where the model ends in a softmax: outputs are compared by them."""
        if self._softmax_ends:
            model.register_forward_hook(lambda module, args, outputs: take_logarithms(outputs))
        return model

    @cached_property
    def _softmax_ends(self) -> bool:
        with torch.no_grad():
            return are_probabilities(self._source(self._rows[:4]))

    @cached_property
    def _halfway(self) -> Scores:
        """Of the multiply-adds that can go one half gone."""
        return self.find({"macs": halve_macs(self.network.wirings, self.groups)})

    def report(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.tell(f"{done} of {total} {what}")

    def _begin(self, budget: Mapping[str, Any]) -> _Task:
        checked, biases_added = Settings(budget=budget).budget or {}, self._compensate != "none"
        spending = Spending(self.network, self.groups, dict(checked), biases_added)
        spending.check()
        return _Task(self, spending, time.monotonic())

    def _finish(self, task: _Task, per_unit: Floats, loss: float | None, *notes: str) -> Scores:
        settings = self._settings
        if self._compensate == "least_squares" and self._fixed:
            notes = (f"{', '.join(self._fixed)}: {UNFITTED}", *notes)
        return replace(
            task.frame(per_unit),
            objective=loss,
            seconds=time.monotonic() - task.started,
            settings={
                "method": "elimination" if self._eliminates else "gates",
                "compensate": self._compensate,
                "budget": task.budget,
                "seed": settings.seed,
                "ignore": list(settings.ignore),
                "start": settings.start,
                "stop": settings.stop,
                "inputs": digest_rows(self._batch.inputs),
                "input_shape": list(self._batch.inputs.shape[1:]),
                "versions": describe_versions("torch", "numpy"),
            },
            notes=(*self.network.notes, UNCERTIFIED, *notes),
        )


def _find_fixed(network: Network, model: nn.Module) -> list[str]:
    """Modules that refitting leaves as they are, but for their bias."""
    names = [wiring.module for wiring in network.wirings if reads_units(wiring)]
    return [name for name in names if not can_refit(model.get_submodule(name))]


@dataclass(frozen=True, eq=False)
class _Way:
    """Scores found by gates under a limit, for how many inputs another output is then the largest, and the loss."""

    limit: LimitGates
    per_unit: Floats
    changed: int
    loss: float

    @property
    def rank(self) -> tuple[int, float]:
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
    def network(self) -> Network:
        return self.search.network

    @property
    def groups(self) -> list[tuple[Ints, int]]:
        return self.spending.groups

    @property
    def budget(self) -> dict[str, Any]:
        return self.spending.budget

    def eliminate(self) -> tuple[Floats, float, tuple[LayerChoice, ...]]:
        """Scores by the order in which units go, the loss of what is left, and what is known of each choice."""
        choice = self.search.choice
        if self.search.medium:
            course = self._try_ways()
            counts, chosen = course.counts, course.tell(choice)
        else:
            counts = self._list_counts()[0]
            chosen = choice.choose(counts, self.search.report("layers chosen from"))
        graded = self._grade(counts, chosen.orders)
        per_unit = self._settle(graded)
        as_chosen = np.array_equal(per_unit, graded)
        if self.search.medium:
            loss = self.search.carry_out(self._plan(per_unit))
        elif as_chosen and chosen.draft is not None:
            loss = choice.diverge(chosen.draft)
        else:
            loss = choice.measure(per_unit >= REMOVED_BELOW)
        errors = zip(self.groups, chosen.errors, chosen.bounds, strict=True)
        choices = tuple(LayerChoice(self._name_layers(units), error, bound) for (units, _), error, bound in errors)
        return per_unit, loss, choices if as_chosen else ()

    def _try_ways(self) -> _Course:
        """The course after which the fewest decisions change."""
        counts = self._list_counts()
        then: list[tuple[float | None, int]]  # with the best counts
        if self.search.small:
            counts, first = self._shift_counts(counts), TEMPERATURES
            then = [(felt, draw) for draw in range(1, DRAWS) for felt in TEMPERATURES if felt is not None]
        else:
            first, then = TEMPERATURES[:1], [(felt, 0) for felt in TEMPERATURES[1:]]
        rounds = ROUNDS if self.search.small else 0
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
        return [part for units, blocks in self.groups for part in units.reshape(blocks, -1)]

    def trace(self) -> Floats:
        """Scores by the order in which units of a layer go when all others stay."""
        orders = [each.order.numpy() for each in self.search.traced]
        return self._settle(self._grade(self._list_counts()[0], orders))

    def _list_counts(self) -> list[list[int]]:
        """How many units every group may keep: what is given, or as is best by what the units of each cost the loss;
        unless networks are large also as large a share of every group as can be."""
        if self.spending.by_layer:
            stays = self._select(np.zeros(self.network.unit_count))
            return [[int(stays[units].sum()) for units, _ in self.groups]]
        counts = [self._share()]
        if self.search.medium and (even := self._share(start=self.spending.share_evenly())) not in counts:
            counts.append(even)
        return counts

    def _share(self, start: Sequence[int] | None = None) -> list[int]:
        return self.spending.share([each.errors.numpy() for each in self.search.traced], start)

    def _grade(self, counts: Sequence[int], orders: Sequence[Ints]) -> Floats:
        per_unit = np.zeros(self.network.unit_count)
        for (units, _), count, order in zip(self.groups, counts, orders, strict=True):
            per_unit[units[order]] = _grade(len(units), count)
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
        first, *others = gate_descent.TEMPERATURES if self.search.small else gate_descent.TEMPERATURES[:1]
        limits: list[LimitGates] = [self.spending.limit_gates]
        if self.search.small and self.search.refits and not self.spending.by_layer:
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
        return self._plan((values - low) / (high - low) if high > low else values).stays[:-1]

    def _plan(self, per_unit: Floats) -> Plan:
        return select_units(self.frame(per_unit), biases_added=self.spending.biases_added)


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

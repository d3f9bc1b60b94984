"""Budget search: a model and inputs, analysed once, and scores for one budget after another.

With refitting, units are eliminated layer by layer (`layerwise_search`) and the budget is allocated to layers by what
their removals cost the loss; without it, gates on all units follow the gradient (`gate_descent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from critical_neurons.core.budget import Budget
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.distillation import Distillation, split_compensation
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.freed_memory import return_freed_memory
from critical_neurons.core.progress import Progress, Stage
from critical_neurons.core.scores import Scores, spread_scores
from critical_neurons.core.search_history import SearchHistory, SearchStage
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
from critical_neurons.core.structure import Structure
from critical_neurons.errors import InvalidInputError
from critical_neurons.parallel import SERIAL, Executor
from critical_neurons.removal.parametrised import make_plain
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.removal.rows import digest_inputs, gather_inputs, match_model
from critical_neurons.selection.budget_counts import Spending
from critical_neurons.selection.budget_task import BudgetTask, Found
from critical_neurons.selection.consumers import group_is_read
from critical_neurons.selection.distance import try_distance
from critical_neurons.selection.effort import choose_effort
from critical_neurons.selection.elimination import Elimination
from critical_neurons.selection.gate_descent import GateSearch
from critical_neurons.selection.gated_model import GatedModel
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons.selection.plan_rules import check_counts
from critical_neurons.structure import copy_model, find_structure, join_rows, select_span, unwrap

NUMBERS_PER_OUTPUT = 3
"""Numbers computed per output of a layer, since it is normalised and activated as well."""

UNCERTIFIED = "searched: good units for this budget, nothing is certified of the network's loss"
ESTIMATED = "estimated: the units of every layer chosen as if the other layers lost none"
HALFWAY = "estimated: units chosen for removing half of the removable multiply-adds"
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
    """A model and inputs, analysed once, and scores for any number of budgets. `on_progress` receives progress."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        settings: SearchSettings,
        *,
        progress: Callable[[Progress], None] = lambda progress: None,
        structure: Structure | None = None,
        executor: Executor = SERIAL,
    ) -> None:
        self._settings, self.on_progress, self._executor = settings, progress, executor
        self._compensate, distillation = split_compensation(settings.compensate)
        self.effort = choose_effort(settings.effort)
        source, rows = unwrap(model), gather_inputs(inputs)
        check_inputs(rows, held_out=int(distillation is not None))
        found = find_structure(source, rows, ignore=settings.ignore) if structure is None else structure
        self.structure = select_span(found, settings.start, settings.stop)
        self._model = make_plain(copy_model(source).requires_grad_(False))
        self._rows = join_rows(self._model, match_model(rows, self._model))
        self._distance, _ = try_distance(self._model, self._rows, settings.distance)
        if not self.structure.groups:
            raise InvalidInputError(f"the network has nothing that could be removed:\n{self.structure}")
        self.refits = all(group_is_read(self.structure, group, self._model) for group in self.structure.groups)
        self._eliminates = self._compensate == "least_squares" and self.refits
        self._stages: list[tuple[str, float]] = []

    def find(self, budget: Budget) -> Scores:
        """Scores for the budget, with the distance of the smaller model's outputs as `objective`."""
        task = self._begin(budget)
        return self._finish(task, task.eliminate() if self._eliminates else task.descend())

    def estimate(self, budget: Budget) -> Scores:
        """Cheaper, less accurate scores, from what was computed for all budgets. Used to find the right budget."""
        if self._eliminates:
            task = self._begin(budget)
            return self._finish(task, Found(task.trace(), None), ESTIMATED)
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
            executor=self._executor,
        )

    @cached_property
    def ordered(self) -> list[Elimination]:
        """The order of removal in every group, with all other groups whole, for all budgets."""
        return self.layers.order(self.layers.whole, self.report("ordering units"))

    @cached_property
    def traced(self) -> list[Elimination]:
        """The same, with errors scaled to what they cost the loss."""
        return self.layers.price(self.ordered, self.effort.passes, self.report("pricing layers"))

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

    def report(self, stage: str) -> Stage:
        """Begin a stage. The returned object is called with its progress."""
        return_freed_memory()
        self._stages.append((stage, time.monotonic()))
        self.on_progress(Progress(stage))
        return Stage(lambda progress: self.on_progress(progress), stage)

    def _begin(self, budget: Budget) -> BudgetTask:
        self._stages.clear()
        spending = Spending(self.structure, budget, self._compensate != "none", self._settings.round_to)
        spending.check()
        return BudgetTask(self, spending, time.monotonic())

    def _finish(self, task: BudgetTask, found: Found, *notes: str) -> Scores:
        if self._compensate == "least_squares" and not self.refits:
            notes = (UNFITTED, *notes)
        ended = time.monotonic()
        began = [*(at for _, at in self._stages), ended]
        stages = (SearchStage(name, began[at + 1] - began[at]) for at, (name, _) in enumerate(self._stages))
        distance = self._settings.distance
        named = distance if isinstance(distance, str) else getattr(distance, "__name__", type(distance).__name__)
        return Scores(
            values_by_layer=spread_scores(self.structure, found.per_unit),
            structure=self.structure,
            status=Status.FEASIBLE,
            objective=found.loss,
            bound=None,
            gap=None,
            seconds=ended - task.started,
            settings={
                "method": "elimination" if self._eliminates else "gates",
                "effort": self._settings.effort,
                "distance": named,
                "seed": self._settings.seed,
                "ignore": list(self._settings.ignore),
                "round_to": self._settings.round_to,
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
            search_history=SearchHistory(tuple(stages), found.drafts, found.taken, found.costs),
        )

"""Compress task: the steps of `compress` after its arguments are checked; `sweep` shares some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from critical_neurons.api.calibration import Data, choose_one_per_class
from critical_neurons.api.plan import find_most, plan
from critical_neurons.api.prune import prune
from critical_neurons.api.score import score
from critical_neurons.core.batch import choose_evenly
from critical_neurons.core.budget import Budget
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.formulation import Formulation, Paper
from critical_neurons.core.plan import Plan
from critical_neurons.core.progress import Progress
from critical_neurons.core.scores import Scores
from critical_neurons.core.solver import Solver
from critical_neurons.core.structure import Structure
from critical_neurons.core.workers import Workers
from critical_neurons.io.latency import Stopwatch, meet_latency
from critical_neurons.parallel import open_executor_for_parts
from critical_neurons.removal.metrics import predict
from critical_neurons.removal.rows import Inputs, take_rows
from critical_neurons.selection.budget_search import Search, SearchSettings

PAPER = Paper(loss_weight=5.0, objective="authors", integer=False, input_radius=1e-5)
"""As in the authors' code: relaxed gates, a small box around the inputs, their objective."""

FEWEST_SCORED, MOST_SCORED = 10, 100
"""Limits on the data points that scores of other programs come from."""

SCORED_NUMBERS = 10**7
"""Fewer data points are scored if their forward pass would have more numbers: deep networks would take minutes."""

LOOKING = "Looking for the smallest network within max_drop"


@dataclass(frozen=True)
class CompressTask:
    """A model, data and settings on the way to a smaller model.

    Without a `budget` as many multiply-adds as possible are removed within `max_drop`, judged by `evaluate`, whose
    inputs are `judged_on`. `planned` are settings of `plan`.
    """

    model: nn.Module
    structure: Structure
    data: Data
    budget: Budget | None
    settings: SearchSettings
    planned: dict[str, Any]
    max_drop: float | None
    evaluate: Callable[[nn.Module], float] | None
    judged_on: Inputs | None
    stopwatch: Stopwatch | None
    workers: Workers
    progress: Callable[[str], None]
    detail: Callable[[Progress], None]

    def search(self) -> tuple[Plan, Scores]:
        self.progress("Searching" if self.budget else LOOKING)
        settings, structure = self.settings, self.structure
        if self.planned["keep"]:  # layers to keep take no part in the search
            settings = replace(settings, ignore=(*settings.ignore, *self.planned["keep"]))
            structure, _ = structure.restrict(dict.fromkeys(self.planned["keep"], "kept, as asked"))
        if self.stopwatch is not None:
            self.detail(Progress("timing layers"))
            structure = self.stopwatch.add_table(structure)
        with open_executor_for_parts(self.workers) as executor:
            search = Search(
                self.model, self.data.inputs, settings, progress=self.detail, structure=structure, executor=executor
            )
            if self.budget is None:
                return self._find_most(search)
            if self.stopwatch is not None:
                return self._meet_latency(search, self.budget, self.stopwatch)
            return self._plan(search.find(self.budget))

    def _find_most(self, search: Search) -> tuple[Plan, Scores]:
        assert self.max_drop is not None
        assert self.evaluate is not None

        def choose(find: Callable[[Budget], Scores], share: float) -> tuple[Plan, Scores]:
            scores = find(Budget(macs=share))
            return plan(scores, macs=share, compensate=self.settings.compensate, **self.planned), scores

        return find_most(
            partial(choose, search.estimate),
            finer=partial(choose, search.find),
            model=self.model,
            make=self.carry_out,
            max_drop=self.max_drop,
            evaluate=self.evaluate,
            judged_on=self.judged_on,
            progress=lambda text: self.detail(Progress(text)),
        )

    def _meet_latency(self, search: Search, budget: Budget, stopwatch: Stopwatch) -> tuple[Plan, Scores]:
        def choose(find: Callable[[Budget], Scores], share: float) -> tuple[Plan, Scores]:
            scores = find(budget.with_share(share))
            return plan(scores, compensate=self.settings.compensate, **self.planned), scores

        def measure(found: tuple[Plan, Scores]) -> float:
            taken = stopwatch.compare(prune(self.model, found[0]))
            self.detail(Progress(f"{taken:.3f} of the time in {stopwatch.runtime}"))
            return taken

        return meet_latency(budget.share, partial(choose, search.estimate), partial(choose, search.find), measure)

    def score(self, program: Formulation, solver: Solver, *, paper: bool) -> tuple[Plan, Scores]:
        """By the scores of a program: as in the paper, or under the budget."""
        self.progress("Scoring")
        if paper:
            return self._plan(score_one_per_class(self.model, self.data, self.settings, program, solver, self.detail))
        assert self.data.labels is not None
        chosen = choose_evenly(self.data.labels, _count_scored(self.structure), self.settings.seed)
        scores = score(
            self.model,
            take_rows(self.data.inputs, torch.from_numpy(chosen)),
            self.data.labels[chosen],
            formulation=program,
            budget=self.budget or Budget(macs=halve_macs(self.structure)),
            solver=solver,
            progress=lambda step: self.detail(Progress(str(step))),
            **self.settings.read,
        )
        return self._plan(scores)

    def carry_out(self, found: Plan) -> nn.Module:
        return carry_out(self.model, self.data, self.settings, found, self.detail)

    def _plan(self, scores: Scores) -> tuple[Plan, Scores]:
        self.progress("Planning" if self.budget else LOOKING)
        found = plan(
            scores,
            **(self.budget.to_dict() if self.budget else {}),
            **self.planned,
            max_drop=self.max_drop,
            evaluate=self.evaluate,
            judged_on=self.judged_on,
            model=self.model,
            calibration=self.data.inputs,
            compensate=self.settings.compensate,
            progress=lambda text: self.detail(Progress(text)),
        )
        return found, scores


def carry_out(
    model: nn.Module, data: Data, settings: SearchSettings, found: Plan, detail: Callable[[Progress], None]
) -> nn.Module:
    return prune(
        model,
        found,
        data.inputs,
        compensate=settings.compensate,
        distance=settings.distance,
        seed=settings.seed,
        progress=detail,
    )


def score_one_per_class(
    model: nn.Module,
    data: Data,
    settings: SearchSettings,
    program: Formulation,
    solver: Solver,
    detail: Callable[[Progress], None],
) -> Scores:
    """The paper's scores: from one input per class, correctly classified if possible."""
    assert data.labels is not None
    correct = predict(model, data.inputs).numpy() == data.labels
    few = data.take(choose_one_per_class(data.labels, correct, settings.seed))
    return score(
        model,
        few.inputs,
        few.labels,
        formulation=program,
        solver=solver,
        progress=lambda step: detail(Progress(str(step))),
        **settings.read,
    )


def _count_scored(structure: Structure) -> int:
    """More data points make better scores, but the work grows with the size of the network."""
    size = sum(3 * len(each.outputs) * each.positions for each in structure.wirings)
    return int(min(MOST_SCORED, max(FEWEST_SCORED, SCORED_NUMBERS // max(size, 1))))

"""Compress: the whole way from a model and inputs to a smaller model and what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from critical_neurons.api.calibration import Data, choose_one_per_class, gather_data, gather_test
from critical_neurons.api.compare import compare
from critical_neurons.api.compression import Compression, write_call
from critical_neurons.api.plan import check_drop, find_most, plan
from critical_neurons.api.prune import prune
from critical_neurons.api.score import score
from critical_neurons.api.search import Search
from critical_neurons.core.batch import check_classes, choose_evenly
from critical_neurons.core.budget import Budget
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.distillation import Distillation, split_compensation
from critical_neurons.core.formulation import Formulation, FormulationName, Paper, as_formulation, check_together
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.settings import Compensation, DistanceName, EffortName, OutputDistance, as_names
from critical_neurons.core.solver import Solver, as_solver
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Structure
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.io.latency import Stopwatch, meet_latency
from critical_neurons.readers import isolated
from critical_neurons.removal.metrics import count_classes, predict
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.removal.rows import take_rows
from critical_neurons.selection.plan_rules import check_counts, check_keep
from critical_neurons.structure import find_structure

PAPER = Paper(loss_weight=5.0, objective="authors", integer=False, input_radius=1e-5)
"""As the authors' code has it: gates relaxed, a small box around the inputs, its objective."""

FEWEST_SCORED, MOST_SCORED = 10, 100
"""Data points that scores of other programs come from."""

SCORED_NUMBERS = 10**7
"""Numbers in a forward pass of all of them, beyond which fewer are taken: a deep network needs minutes else."""

LOOKING = "Looking for the most that can go"


@isolated
def compress(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    latency: float | None = None,
    max_drop: float | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    compensate: Compensation | Distillation | None = None,
    effort: EffortName = "standard",
    distance: DistanceName | OutputDistance = "auto",
    test: tuple[Any, Any] | None = None,
    keep: str | Collection[str] = (),
    min_units: int = 1,
    round_to: int = 1,
    paper: bool = False,
    formulation: Formulation | FormulationName | None = None,
    solver: Solver | str | None = None,
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    seed: int = 0,
    onnx: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
) -> Compression:
    """Search, plan, prune, compensate and compare in one call, for any model.

    `inputs` are a tensor or array, a tuple or dict of them for a model of several inputs, or an iterable of batches,
    with labels beside or in them if there are any: regression, segmentation, detection and autoencoders need none.

    Give one of `units`, `params`, `macs`, `latency`, the share kept at most, and `max_drop`, the accuracy that may be
    lost: then as many multiply-adds as possible go. `latency` is the time of one input on one thread, in onnxruntime
    where the model can be exported, unless `onnx=False`, else in torch: layers are timed at several widths, and the
    smaller model is timed beside the model until it meets the share. A drop is judged by `evaluate`, a function of a
    model, or by the accuracy on a part of the inputs that is held out for it.

    The units to keep come from `search`, and the refitted weights from `compensate="least_squares"`, both on all of
    the inputs, with `effort` and `distance` as for `search`. `compensate="distil"` then trains the smaller model for
    some minutes, as `prune` says; with `max_drop`, every one that is judged. It is the default with
    `effort="thorough"`, unless there is a `max_drop`. Two other ways to choose units:

    * `paper=True`: by the paper's scores, `score` with gates relaxed, input_radius=1e-5, the authors' objective and
      λ = 5, on one input of every class, one that the model classifies correctly where there is one. The best-scored
      units that the share allows stay, and nothing is refitted unless `compensate` is given.
    * `formulation`, as for `score`: by the scores of that program under the budget asked for, on a few inputs, evenly
      from all classes; `max_drop` begins with half of the multiply-adds that can go. With `paper` it takes the place
      of the paper's, and there is no budget.

    `solver`, as for `score`, solves the program of either.

    `keep`, `min_units` and `round_to` as for `plan`; `ignore`, `start` and `stop` as for `score`.

    The comparison is on `test`, a pair (inputs, labels) that should have had no part in anything; without it on the
    inputs, and labelled so. Labels are needed for accuracies, for a drop that no `evaluate` judges, and for programs.
    `progress` is told what is about to be done, `detail` how far that has come. Ctrl-C while the solver works
    or the most that can go is looked for leaves the best so far, and the rest is done with it; so does Ctrl-C while
    the smaller model is trained.

    >>> test = test_inputs, test_labels
    >>> found = cn.compress(model, inputs, labels, macs=0.5, test=test, effort="quick", onnx=False)
    >>> found.comparison.after.macs <= 0.5 * found.comparison.before.macs
    True
    """
    given = dict(locals())  # before anything is added to it
    if sum(value is not None for value in (units, params, macs, latency, max_drop)) != 1:
        raise InvalidSettingError("compress: give one of units=, params=, macs=, latency= and max_drop=.")
    budget = None
    if max_drop is None:
        budget = Budget(units=units, params=params, macs=macs, latency=latency)
    else:
        check_drop(max_drop)
    if compensate is None:
        distilled = effort == "thorough" and max_drop is None
        compensate = "none" if paper else "distil" if distilled else "least_squares"
    split_compensation(compensate)
    check_counts(min_units, round_to)
    program = _choose_program(formulation, paper=paper)
    if program is None and solver is not None:
        raise InvalidSettingError(
            "solver: of a program, but units are searched for. Give paper=True or a formulation, or leave it out."
        )
    if program is not None and latency is not None:
        raise InvalidSettingError(
            "latency: units are searched for then. Leave out paper= and formulation=, or give macs=."
        )
    if program is not None:
        check_together(program, None if paper else budget, Span(start, stop))
    solved_by = Solver(seed=seed) if solver is None else as_solver(solver)
    data = gather_data(inputs, labels)
    if data.labels is None and (program is not None or (max_drop is not None and evaluate is None)):
        raise InvalidInputError(
            "labels: none. Give the index of the right class of every input. They can be left out where units are "
            "searched for and max_drop= is judged by evaluate=."
        )
    tested = None if test is None else gather_test(test, data)
    used, judge, judged_on = data, evaluate, None
    if max_drop is not None and evaluate is None:
        used, held_out = data.hold_out(seed)
        judge, judged_on = held_out.measure_accuracy, held_out.inputs
    if program is None or compensate != "none":
        check_inputs(used.inputs)
    read: dict[str, Any] = {"ignore": as_names(ignore), "start": start, "stop": stop}
    structure = find_structure(model, used.inputs, ignore=read["ignore"])
    for each in (data, tested):
        if each is not None and each.labels is not None:
            check_classes(each.labels, count_classes(model, each.inputs))
    stopwatch = None if latency is None else Stopwatch(model, used.inputs, onnx=onnx)
    task = _Task(
        model,
        structure,
        used,
        budget=budget,
        read=read,
        planned={"keep": check_keep(keep, structure.layers), "min_units": min_units, "round_to": round_to},
        compensate=compensate,
        drop={"max_drop": max_drop, "evaluate": judge, "judged_on": judged_on},
        seed=seed,
        looked={"effort": effort, "distance": distance},
        stopwatch=stopwatch,
        progress=progress,
        detail=detail,
    )
    found, scores = task.search() if program is None else task.score(program, solved_by, paper=paper)
    progress("Removing and refitting" if compensate != "none" else "Removing")
    smaller = task.carry_out(found)
    progress("Comparing")
    measure = partial(compare, model, smaller, onnx=onnx, progress=lambda what: detail(f"Measuring {what}"))
    if tested is None:
        comparison = measure(data.inputs, data.labels, data="calibration")
    else:
        comparison = measure(tested.inputs, tested.labels, calibration=data.inputs)
    compared_on = data.inputs if tested is None else tested.inputs
    return Compression(smaller, found, scores, comparison, compared_on, write_call(compress, given))


@dataclass(frozen=True)
class _Task:
    """What both ways to a plan have in common. `read`: settings of `inspect`; `planned`: of `plan`; `looked`: of
    `search`."""

    model: nn.Module
    structure: Structure
    data: Data
    budget: Budget | None
    read: dict[str, Any]
    planned: dict[str, Any]
    compensate: Compensation | Distillation
    drop: dict[str, Any]
    seed: int
    looked: dict[str, Any]
    stopwatch: Stopwatch | None
    progress: Callable[[str], None]
    detail: Callable[[str], None]

    def search(self) -> tuple[Plan, Scores]:
        self.progress("Searching" if self.budget else LOOKING)
        ignored = (*self.read["ignore"], *self.planned["keep"])  # what must stay takes no part in the search
        structure = self.structure
        if self.planned["keep"]:
            structure = find_structure(self.model, self.data.inputs, ignore=ignored)
        if self.stopwatch is not None:
            self.detail("timing layers")
            structure = self.stopwatch.add_table(structure)
        search = Search(
            self.model,
            self.data.inputs,
            compensate=self.compensate,
            seed=self.seed,
            progress=self.detail,
            structure=structure,
            **self.looked,
            **{**self.read, "ignore": ignored},
        )
        if self.budget is not None and self.stopwatch is not None:
            return self._meet_latency(search, self.budget, self.stopwatch)
        if self.budget is not None:
            return self._plan(search.find(self.budget))

        def choose(find: Callable[[Budget], Scores], share: float) -> tuple[Plan, Scores]:
            scores = find(Budget(macs=share))
            return plan(scores, macs=share, compensate=self.compensate, **self.planned), scores

        return find_most(
            partial(choose, search.sketch),
            finer=partial(choose, search.find),
            model=self.model,
            make=self.carry_out,
            progress=self.detail,
            **self.drop,
        )

    def _meet_latency(self, search: Search, budget: Budget, stopwatch: Stopwatch) -> tuple[Plan, Scores]:
        def choose(find: Callable[[Budget], Scores], share: float) -> tuple[Plan, Scores]:
            scores = find(budget.with_share(share))
            return plan(scores, compensate=self.compensate, **self.planned), scores

        def measure(found: tuple[Plan, Scores]) -> float:
            taken = stopwatch.compare(prune(self.model, found[0]))
            self.detail(f"{taken:.3f} of the time in {stopwatch.runtime}")
            return taken

        return meet_latency(budget.share, partial(choose, search.sketch), partial(choose, search.find), measure)

    def score(self, program: Formulation, solver: Solver, *, paper: bool) -> tuple[Plan, Scores]:
        self.progress("Scoring")
        inputs, labels = self.data.inputs, self.data.labels
        assert labels is not None
        if paper:
            correct = predict(self.model, inputs).numpy() == labels
            chosen, budget = choose_one_per_class(labels, correct, self.seed), None
        else:
            chosen = choose_evenly(labels, _count_scored(self.structure), self.seed)
            budget = self.budget or Budget(macs=halve_macs(self.structure))
        scores = score(
            self.model,
            take_rows(inputs, torch.from_numpy(chosen)),
            labels[chosen],
            formulation=program,
            budget=budget,
            solver=solver,
            progress=lambda step: self.detail(str(step)),
            **self.read,
        )
        return self._plan(scores)

    def carry_out(self, found: Plan) -> nn.Module:
        return prune(
            self.model,
            found,
            self.data.inputs,
            compensate=self.compensate,
            distance=self.looked["distance"],
            seed=self.seed,
            progress=lambda done, total: self.detail(f"{done} of {total} modules refitted"),
            detail=self.detail,
        )

    def _plan(self, scores: Scores) -> tuple[Plan, Scores]:
        self.progress("Planning" if self.budget else LOOKING)
        found = plan(
            scores,
            **(self.budget.to_dict() if self.budget else {}),
            **self.drop,
            **self.planned,
            model=self.model,
            calibration=self.data.inputs,
            compensate=self.compensate,
            progress=self.detail,
        )
        return found, scores


def _choose_program(formulation: Formulation | FormulationName | None, *, paper: bool) -> Formulation | None:
    """None where units are searched for."""
    if formulation is None:
        return PAPER if paper else None
    return as_formulation(formulation)


def _count_scored(structure: Structure) -> int:
    """More data points make better scores, but the work grows with the size of the network."""
    size = sum(3 * len(each.outputs) * each.positions for each in structure.wirings)
    return int(min(MOST_SCORED, max(FEWEST_SCORED, SCORED_NUMBERS // max(size, 1))))

"""The public `score`: read the model, propagate bounds, encode the program and solve it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from critical_neurons.api.score_by_class import score_by_class
from critical_neurons.api.score_task import PATTERN_ADVICE, DataPoints, ScoreTask
from critical_neurons.core.batch import digest_rows, gather_batch
from critical_neurons.core.bounds import Bounds
from critical_neurons.core.budget import Budget
from critical_neurons.core.deadline import reading_until
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.formulation import (
    Bisection,
    ByClass,
    Exact,
    Formulation,
    FormulationName,
    Linearised,
    Paper,
    as_formulation,
    check_together,
)
from critical_neurons.core.loss import SquaredLoss, make_loss
from critical_neurons.core.network import Network
from critical_neurons.core.scores import Scores
from critical_neurons.core.settings import as_names
from critical_neurons.core.solution import Status, Step
from critical_neurons.core.solver import Solver, as_solver
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Floats
from critical_neurons.errors import (
    InfeasibleProgramError,
    InvalidInputError,
    InvalidSettingError,
    SolverError,
)
from critical_neurons.readers import LEFT_OUT, NO_PROGRAM, isolated, read_network, run_model
from critical_neurons.selection.warm_start import propose_mask
from critical_neurons.solvers import find_solver, ignore_progress
from critical_neurons.structure import find_structure

LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT = 1e-4, 1e4
SHARE_STEPS = 14
"""Bisections for a mean score: the weight is then known to within a tenth of a percent."""


@isolated
def score(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    formulation: Formulation | ByClass | FormulationName = "paper",
    budget: Budget | None = None,
    solver: Solver | str = "auto",
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Scores:
    """Importance scores of every neuron and feature map: the program of docs/method.md, solved.

    `inputs` are a tensor or array (batch, ...) with `labels` (batch,), or an iterable of batches or of pairs (inputs,
    labels). Without labels the model's own predictions are used.

    * `formulation`: `cn.Paper(loss_weight=5.0, ...)`, `cn.Exact(...)` or `cn.Linearised(...)`, or the name of one in
      lower case; inside `cn.ByClass(...)`, one program per class. The docstring of each lists its settings; that of
      `cn.Objective` explains the three objectives.
    * `budget`: a limit on what is kept, in place of the sparsity term: `cn.Budget(units=0.5)` of every layer (with
      `scope="global"` of all layers), `cn.Budget(params=0.5)` or `cn.Budget(macs=0.5)`.
    * `solver`: `cn.Solver("highs", time_limit=300, ...)`, or only its name. The time limit, Ctrl-C and lost workers
      leave the best scores so far; with `cn.ByClass` the average over the finished classes.
    * `ignore`: names of layers that get no scores. `progress` is called with every `Step`.
    * `start`, `stop`: names of the first and the last module to read and score, as in `named_modules`; for a
      container its first and its last call, for a function the name that torch.fx gives it. What comes before is run
      as it is: its outputs are the inputs of the program, and `input_radius` is around them. What follows is
      linearised at every data point. Budgets are shares of the span.

    >>> scores = cn.score(model, inputs[:3], labels[:3])
    >>> scores.status
    <Status.OPTIMAL: 'optimal'>
    >>> {name: values.shape for name, values in scores.items()}
    {'0': (4,), '3': (8,)}
    """
    by_class = formulation if isinstance(formulation, ByClass) else None
    program = as_formulation(formulation.formulation if isinstance(formulation, ByClass) else formulation)
    check_together(program, budget, Span(start, stop))
    ignored, chosen = as_names(ignore), as_solver(solver)
    started = time.monotonic()
    backend = find_solver(chosen.name)
    backend.check_options(chosen.options)
    batch = gather_batch(inputs, labels, real=True)
    with reading_until(started, chosen.time_limit):
        network = read_network(model, torch.from_numpy(batch.inputs), ignore=ignored, start=start, stop=stop)
        if not network.removable:
            others = find_structure(model, torch.from_numpy(batch.inputs), ignore=ignored).groups
            advice = f"\n{NO_PROGRAM}" if others else ""
            raise InvalidInputError(f"the network has nothing to score:\n{network}{advice}")
        passage = run_model(model, batch.inputs, network.span)
    aim = make_loss(program.loss, batch, passage.logits)
    if isinstance(aim, SquaredLoss):
        _check_squared(network, by_class)
    own = None
    if not isinstance(program, Linearised) and isinstance(program.bounds, Bounds):
        own = program.bounds
        _check_own(own, network, passage.inputs, program)
    incumbent = program.incumbent if isinstance(program, Exact) else None
    task = ScoreTask(
        network,
        program.without_data(),
        budget,
        chosen,
        backend,
        progress or ignore_progress,
        by_class,
        proposal=None if incumbent is None else propose_mask(incumbent, network, budget),
        record={
            "ignore": list(ignored),
            "input_shape": list(batch.inputs.shape[1:]),
            "labels_from": "model" if batch.labels is None and batch.targets is None else "user",
            "bounds_from": "program" if own is None else "user",
            "versions": describe_versions("torch", "numpy", "scipy", "highspy"),
        },
    )
    digests = np.array(digest_rows(batch.inputs))
    points = DataPoints(passage, aim, digests, own)
    if isinstance(program.loss_weight, Bisection):
        return _score_for_share(task, points, program.loss_weight.mean_score, started)
    return _score_all(task, points, started)[0]


def _score_for_share(task: ScoreTask, points: DataPoints, wanted: float, started: float) -> Scores:
    """Bisection for the largest λ at which the mean score is at most `wanted`.

    The sparsity of an optimum never rises when λ falls, so the search is sound up to the gap.
    """
    low, high = LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT
    best, interrupted = _score_all(task.weigh(low), points, started)
    if best.per_unit.mean() > wanted and best.status is not Status.OPTIMAL:
        raise SolverError(
            f"mean_score: the search was stopped before it was clear whether a mean of {wanted:.4g} is possible."
        )
    if best.per_unit.mean() > wanted:
        raise InfeasibleProgramError(
            f"mean_score: a mean of {wanted:.4g} cannot be reached; even at loss_weight={low:g} it is "
            f"{best.per_unit.mean():.4g}. {PATTERN_ADVICE}"
        )
    stopped = ", stopped at once" if interrupted else ""
    for step in range(0 if interrupted else SHARE_STEPS):
        middle = math.sqrt(low * high)
        scores, interrupted = _score_all(task.weigh(middle), points, started)
        if scores.status is Status.OPTIMAL and scores.per_unit.mean() <= wanted:
            low, best = middle, scores
        else:
            high = middle
        if interrupted or time.monotonic() - started >= task.solver.time_limit:
            stopped = f", stopped after {step + 1} of {SHARE_STEPS} steps"
            break
    note = f"loss_weight {low:.4g} found for a mean score of {wanted:.4g}{stopped}"
    settings = {**best.settings, "mean_score": wanted}
    return replace(best, settings=settings, seconds=time.monotonic() - started, notes=(*best.notes, note))


def _score_all(task: ScoreTask, points: DataPoints, started: float) -> tuple[Scores, bool]:
    """The scores, and whether the user interrupted the search."""
    if task.by_class is not None:
        return score_by_class(task, task.by_class, points, started)
    return task.score_points(points, started, started + task.solver.time_limit)


def _check_squared(network: Network, by_class: ByClass | None) -> None:
    if by_class is not None:
        raise InvalidSettingError(
            "ByClass: the squared loss has targets instead of classes. Give one program for all."
        )
    left_out = [note for note in network.notes if LEFT_OUT in note]
    if left_out:
        raise InvalidSettingError(
            f"loss: 'squared' is about the model's outputs, but {left_out[0]}. Give classes, or remove the last step."
        )


def _check_own(bounds: Bounds, network: Network, inputs: Floats, formulation: Paper | Exact) -> None:
    radius = formulation.input_radius if isinstance(formulation, Paper) else 0.0
    pruned = isinstance(formulation, Exact)
    if (bounds.radius, bounds.pruned) != (radius, pruned):
        raise InvalidSettingError(
            f"bounds: found radius={bounds.radius}, pruned={bounds.pruned}. Accepted: those of input_radius and "
            f"formulation, radius={radius}, pruned={pruned}."
        )
    if not np.array_equal(bounds.inputs, inputs):
        raise InvalidSettingError("bounds: made for other inputs, or the same in another order. Make them for these.")
    bounds.check(network)

"""Compress: the whole way from a model and inputs to a smaller model and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from critical_neurons.api.compare import compare
from critical_neurons.api.inspect import inspect
from critical_neurons.api.plan import check_drop, find_most, plan
from critical_neurons.api.prune import prune
from critical_neurons.api.score import score
from critical_neurons.api.search import Search
from critical_neurons.core.batch import Batch, check_classes, choose_evenly, gather_batch
from critical_neurons.core.comparison import Comparison
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.network import Bools, Ints, Network
from critical_neurons.core.plan import Plan, group_units
from critical_neurons.core.scores import Scores
from critical_neurons.core.settings import Compensation, as_names, check_compensation
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.readers import on_cpu
from critical_neurons.removal.metrics import count_classes, measure_accuracy, predict
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.selection.rules import check_counts, check_keep

FEWEST_HELD_OUT = 10

HELD_OUT_SHARE = 0.3
"""Of the inputs, where a drop in accuracy has to be judged and nothing else was given to judge it by."""

PAPER: Mapping[str, Any] = {
    "formulation": "paper",
    "integer": False,
    "input_radius": 1e-5,
    "objective": "authors",
    "loss_weight": 5.0,
}
"""Settings of `score`, as the authors' code has them: gates relaxed, a small box around the inputs, its objective."""

FEWEST_SCORED, MOST_SCORED = 10, 100
"""Data points that scores of other programs come from."""

SCORED_NUMBERS = 10**7
"""Numbers in a forward pass of all of them, beyond which fewer are taken: a deep network needs minutes else."""

GIVEN_TO_COMPRESS = {"model", "inputs", "labels", "ignore", "start", "stop"}
"""And so no part of `scoring`."""

LOOKING = "Looking for the most that can go"


@dataclass(frozen=True)
class Compression:
    """The smaller model, what was decided on the way, and what it is worth."""

    model: nn.Module
    plan: Plan
    scores: Scores
    comparison: Comparison


@on_cpu
def compress(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    max_drop: float | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    compensate: Compensation | None = None,
    test: tuple[Any, Any] | None = None,
    keep: str | Collection[str] = (),
    min_units: int = 1,
    round_to: int = 1,
    paper: bool = False,
    scoring: Mapping[str, Any] | None = None,
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    seed: int = 0,
    onnx: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
) -> Compression:
    """Search, plan, prune, compensate and compare in one call.

    Give one of `units`, `params`, `macs`, the share kept at most, and `max_drop`, the accuracy that may be lost: then
    as many multiply-adds as possible go. A drop is judged by `evaluate`, a function of a model, or by the accuracy on
    a part of the inputs that is held out for it.

    The units to keep come from `search`, and the refitted weights from `compensate="least_squares"`, both on all of
    the inputs. Two other ways to choose units:

    * `paper=True`: by the paper's scores, `score` with gates relaxed, input_radius=1e-5, the authors' objective and
      λ = 5, on one input of every class, one that the model classifies correctly where there is one. The best-scored
      units that the share allows stay, and nothing is refitted unless `compensate` is given.
    * `scoring`, settings for `score`: by the scores of any other program, on a few inputs, evenly from all classes;
      by default formulation="linearised" and the budget asked for. With `paper` they take the place of the paper's.

    `keep`, `min_units` and `round_to` as for `plan`; `ignore`, `start` and `stop` as for `score`.

    The comparison is on `test`, a pair (inputs, labels) that should have had no part in anything; without it on the
    inputs, and labelled so. A search needs no labels: leave them out where `test` is given and no drop is judged by
    them. `progress` is told what is about to be done, `detail` how far that has come. Ctrl-C while the solver works
    or the most that can go is looked for leaves the best so far, and the rest is done with it.
    """
    shares = {"units": units, "params": params, "macs": macs}
    if sum(value is not None for value in (*shares.values(), max_drop)) != 1:
        raise InvalidSettingError("compress: give one of units=, params=, macs= and max_drop=.")
    if max_drop is not None:
        check_drop(max_drop)
    if compensate is None:
        compensate = "none" if paper else "least_squares"
    check_compensation(compensate)
    check_counts(min_units, round_to)
    searched = scoring is None and not paper
    _check_scoring(scoring or {})
    batch = gather_batch(inputs, labels)
    if batch.labels is None and not (searched and test is not None and (max_drop is None or evaluate is not None)):
        raise InvalidInputError(
            "labels: none. Give the index of the right class of every input. They can be left out where units are "
            "searched for, test= is given to compare on, and max_drop= is judged by evaluate=."
        )
    tested = None if test is None else _gather_test(test, batch)
    used, judge, judged_on = batch, evaluate, None
    if max_drop is not None and evaluate is None:
        assert batch.labels is not None
        used, held_out = _hold_out(batch, batch.labels, seed)
        judge, judged_on = partial(_measure, held_out), held_out.inputs
    if searched or compensate != "none":
        check_inputs(len(used))
    read: dict[str, Any] = {"ignore": as_names(ignore), "start": start, "stop": stop}
    network = inspect(model, used.inputs[:2], **read)
    classes = count_classes(model, torch.from_numpy(used.inputs))
    for each in (batch, tested):
        if each is not None and each.labels is not None:
            check_classes(each.labels, classes)
    task = _Task(
        model,
        network,
        used,
        share={name: share for name, share in shares.items() if share is not None},
        read=read,
        planned={"keep": check_keep(keep, network.layers), "min_units": min_units, "round_to": round_to},
        compensate=compensate,
        drop={"max_drop": max_drop, "evaluate": judge, "judged_on": judged_on},
        seed=seed,
        progress=progress,
        detail=detail,
    )
    found, scores = task.search() if searched else task.score(scoring or {}, paper=paper)
    progress("Removing and refitting" if compensate != "none" else "Removing")
    smaller = prune(
        model,
        found,
        used.inputs,
        compensate=compensate,
        progress=lambda done, total: detail(f"{done} of {total} modules refitted"),
    )
    progress("Comparing")
    measure = partial(compare, model, smaller, onnx=onnx, progress=lambda what: detail(f"Measuring {what}"))
    if tested is None:
        comparison = measure(batch.inputs, batch.labels, data="calibration")
    else:
        comparison = measure(tested.inputs, tested.labels, calibration=batch.inputs)
    return Compression(smaller, found, scores, comparison)


@dataclass(frozen=True)
class _Task:
    """What both ways to a plan have in common. `read`: settings of `inspect`; `planned`: of `plan`."""

    model: nn.Module
    network: Network
    batch: Batch
    share: dict[str, Any]
    read: dict[str, Any]
    planned: dict[str, Any]
    compensate: Compensation
    drop: dict[str, Any]
    seed: int
    progress: Callable[[str], None]
    detail: Callable[[str], None]

    def search(self) -> tuple[Plan, Scores]:
        self.progress("Searching" if self.share else LOOKING)
        ignored = (*self.read["ignore"], *self.planned["keep"])  # what must stay takes no part in the search
        search = Search(
            self.model,
            self.batch.inputs,
            compensate=self.compensate,
            seed=self.seed,
            progress=self.detail,
            **{**self.read, "ignore": ignored},
        )
        if self.share:
            return self._plan(search.find(self.share))

        def choose(find: Callable[[Mapping[str, Any]], Scores], share: float) -> tuple[Plan, Scores]:
            scores = find({"macs": share})
            return plan(scores, macs=share, compensate=self.compensate, **self.planned), scores

        return find_most(
            partial(choose, search.sketch),
            finer=partial(choose, search.find),
            model=self.model,
            example=self.batch.inputs,
            compensate=self.compensate,
            progress=self.detail,
            **self.drop,
        )

    def score(self, scoring: Mapping[str, Any], *, paper: bool) -> tuple[Plan, Scores]:
        self.progress("Scoring")
        inputs, labels = self.batch.inputs, self.batch.labels
        assert labels is not None
        if paper:
            correct = predict(self.model, torch.from_numpy(inputs)).numpy() == labels
            chosen, own = _choose_one_per_class(labels, correct, self.seed), PAPER
        else:
            chosen = choose_evenly(labels, _count_scored(self.network), self.seed)
            groups = group_units(self.network.scored, self.network.groups)
            own = {
                "formulation": "linearised",
                "budget": self.share or {"macs": halve_macs(self.network.wirings, groups)},
            }
        settings = {"seed": self.seed, "progress": lambda step: self.detail(str(step)), **own, **scoring}
        return self._plan(score(self.model, inputs[chosen], labels[chosen], **self.read, **settings))

    def _plan(self, scores: Scores) -> tuple[Plan, Scores]:
        self.progress("Planning" if self.share else LOOKING)
        found = plan(
            scores,
            **self.share,
            **self.drop,
            **self.planned,
            model=self.model,
            calibration=self.batch.inputs,
            compensate=self.compensate,
            progress=self.detail,
        )
        return found, scores


def _check_scoring(scoring: Mapping[str, Any]) -> None:
    unknown = sorted(set(scoring) - set(signature(score).parameters) | GIVEN_TO_COMPRESS & set(scoring))
    if unknown:
        raise InvalidSettingError(
            f"scoring: {', '.join(unknown)} is no setting of score, or is given to compress itself."
        )


def _choose_one_per_class(labels: Ints, correct: Bools, seed: int) -> Ints:
    """Indices of one data point of every class at random, in ascending order: a correct one where there is one."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    ranked = shuffled[np.argsort(~correct[shuffled], kind="stable")]
    _, first = np.unique(labels[ranked], return_index=True)
    return np.sort(ranked[first])


def _gather_test(test: Any, batch: Batch) -> Batch:
    """A pair of inputs and labels, or an iterable of such pairs."""
    pair = isinstance(test, tuple | list) and len(test) == 2
    tested = gather_batch(*test) if pair and not isinstance(test[0], tuple | list) else gather_batch(test)
    if tested.labels is None or tested.inputs.shape[1:] != batch.inputs.shape[1:]:
        raise InvalidInputError(
            f"test: found inputs of shape {tested.inputs.shape[1:]} {'without' if tested.labels is None else 'with'} "
            f"labels. Accepted: a pair of inputs of shape {batch.inputs.shape[1:]} and labels."
        )
    return tested


def _hold_out(batch: Batch, labels: Ints, seed: int) -> tuple[Batch, Batch]:
    """What is left of the batch, and what is held out."""
    aside = choose_evenly(labels, math.ceil(HELD_OUT_SHARE * len(batch)), seed)
    if len(aside) < FEWEST_HELD_OUT:
        raise InvalidInputError(
            f"max_drop: found {len(batch)} inputs, of which {len(aside)} would be held out to judge by. Give "
            f"{math.ceil(FEWEST_HELD_OUT / HELD_OUT_SHARE)} or more, or evaluate=, a function of a model."
        )
    left = np.setdiff1d(np.arange(len(batch)), aside)
    return Batch(batch.inputs[left], labels[left]), Batch(batch.inputs[aside], labels[aside])


def _measure(batch: Batch, model: nn.Module) -> float:
    assert batch.labels is not None
    return measure_accuracy(model, torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels))


def _count_scored(network: Network) -> int:
    """More data points make better scores, but the work grows with the size of the network, or of the span of it."""
    size = sum(math.prod(op.shape) for op in network.ops)
    return min(MOST_SCORED, max(FEWEST_SCORED, SCORED_NUMBERS // size))

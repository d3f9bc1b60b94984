"""Compressing: the whole way from a model and labelled inputs to a smaller model and what it is worth."""

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

from critical_neurons.batch import Batch, choose_evenly, gather_batch
from critical_neurons.comparing import compare
from critical_neurons.comparison import Comparison
from critical_neurons.compensating import check_inputs
from critical_neurons.costs import count_cost
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.measuring import measure_accuracy
from critical_neurons.network import Ints, Network
from critical_neurons.pipeline import Compensation, check_compensation, inspect, prune
from critical_neurons.planning import check_drop, plan
from critical_neurons.plans import Plan
from critical_neurons.scores import Scores
from critical_neurons.scoring import score

FEWEST_HELD_OUT = 10

HELD_OUT_SHARE = 0.3
"""Of the inputs, where a drop in accuracy has to be judged and nothing else was given to judge it by."""

FEWEST_SCORED, MOST_SCORED = 10, 100
"""Data points the scores come from."""

SCORED_NUMBERS = 10**7
"""Numbers in a forward pass of all of them, beyond which fewer are taken: a deep network needs minutes else."""


@dataclass(frozen=True)
class Compression:
    """The smaller model, what was decided on the way, and what it is worth."""

    model: nn.Module
    plan: Plan
    scores: Scores
    comparison: Comparison


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
    compensate: Compensation = "least_squares",
    test: tuple[Any, Any] | None = None,
    keep: str | Collection[str] = (),
    min_units: int = 1,
    round_to: int = 1,
    scoring: Mapping[str, Any] | None = None,
    seed: int = 0,
    onnx: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
) -> Compression:
    """Score, plan, prune, compensate and compare in one call.

    Give one of `units`, `params`, `macs`, the share kept at most, and `max_drop`, the accuracy that may be lost: then
    as many multiply-adds as possible go. A drop is judged by `evaluate`, a function of a model, or by the accuracy on
    a part of the inputs that is held out for it.

    The scores come from a few of the inputs, evenly from all classes; the refitted weights from all of them.
    `scoring` are settings for `score`, in place of those chosen here: formulation="linearised" and the budget asked
    for. `keep`, `min_units` and `round_to` as for `plan`.

    The comparison is on `test`, a pair (inputs, labels) that should have had no part in anything; without it on the
    inputs, and labelled so. `progress` is told what is about to be done, `detail` how far that has come. Ctrl-C while
    the solver works or the most that can go is looked for leaves the best so far, and the rest is done with it.
    """
    given = [value for value in (units, params, macs, max_drop) if value is not None]
    if len(given) != 1:
        raise InvalidSettingError("compress: give one of units=, params=, macs= and max_drop=.")
    if max_drop is not None:
        check_drop(max_drop)
    check_compensation(compensate)
    unknown = sorted(
        set(scoring or ()) - set(signature(score).parameters) | {"model", "inputs", "labels"} & set(scoring or ())
    )
    if unknown:
        raise InvalidSettingError(f"scoring: {', '.join(unknown)} is no setting of score.")
    batch = gather_batch(inputs, labels)
    if batch.labels is None:
        raise InvalidInputError("labels: none. Give the index of the right class of every input.")
    tested = None if test is None else _gather_test(test, batch)
    used, judge, judged_on = batch, evaluate, None
    if max_drop is not None and evaluate is None:
        used, held_out = _hold_out(batch, batch.labels, seed)
        judge, judged_on = partial(_measure, held_out), held_out.inputs
    assert used.labels is not None
    if compensate != "none":
        check_inputs(len(used))
    progress("Scoring")
    own = dict(scoring or {})
    network = inspect(
        model, used.inputs[:2], start=own.get("start"), stop=own.get("stop"), ignore=own.get("ignore", ())
    )
    settings = {
        "formulation": "linearised",
        "budget": _budget(units, params, macs, network),
        "seed": seed,
        "progress": lambda step: detail(str(step)),
        **own,
    }
    chosen = choose_evenly(used.labels, _count_scored(network), seed)
    scores = score(model, used.inputs[chosen], used.labels[chosen], **settings)
    progress("Planning" if max_drop is None else "Looking for the most that can go")
    found = plan(
        scores,
        units=units,
        params=params,
        macs=macs,
        max_drop=max_drop,
        evaluate=judge,
        model=model,
        calibration=used.inputs,
        judged_on=judged_on,
        compensate=compensate,
        keep=keep,
        min_units=min_units,
        round_to=round_to,
        progress=detail,
    )
    progress("Removing and refitting")
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


def _budget(units: float | None, params: float | None, macs: float | None, network: Network) -> dict[str, float]:
    """What was asked for; of the multiply-adds that can go the half, where the share is not known yet."""
    shares = {"units": units, "params": params, "macs": macs}
    given = {name: share for name, share in shares.items() if share is not None}
    if given:
        return given
    all_kept = np.ones(network.unit_count + 1)
    none_kept = np.append(np.zeros(network.unit_count), 1.0)
    floor = count_cost(network.wirings, none_kept, "macs") / count_cost(network.wirings, all_kept, "macs")
    return {"macs": (1 + floor) / 2}


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

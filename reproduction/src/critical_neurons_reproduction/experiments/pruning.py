"""Pruning: score a trained network, remove the low-scored units, measure the accuracy."""

from __future__ import annotations

import copy
from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.api.score_task import INTERRUPTED
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.structure import unwrap
from critical_neurons_reproduction.baselines import (
    plan_by_norm,
    share_as_published,
    share_of_parameters,
    share_of_units,
)
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.experiments.cells import Settings
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.sampling import draw_batch
from critical_neurons_reproduction.score_settings import read_score_settings
from critical_neurons_reproduction.store import Cell


def run_removal(cell: Cell, runs: Runs) -> Settings:
    """Score, remove units by every threshold, measure on the test images."""
    model, data, scores = score_reference(cell.settings, runs)
    plans = [cn.plan(scores, threshold=threshold) for threshold in cell.settings["thresholds"]]
    return {
        "reference": measure(model, data.test),
        "solver": describe_solver(scores),
        "removals": [
            {"threshold": threshold, **measure_removal(model, plan, data.test)}
            for threshold, plan in zip(cell.settings["thresholds"], plans, strict=True)
        ],
    }


def run_comparison(cell: Cell, runs: Runs) -> Settings:
    """`run_removal` compared with removing random and critical units, at the paper's threshold and at thresholds
    chosen on validation images; then one epoch of fine-tuning."""
    settings, (model, data, scores) = cell.settings, score_reference(cell.settings, runs)
    chosen = choose_thresholds(model, scores, data.validation, **settings["goal"])
    recipe, draws = Recipe(**settings["fine_tuning"]), range(settings["draws"])
    removals = []
    for rule, threshold in (("paper", settings["thresholds"][0]), ("validation", chosen)):
        plan = cn.plan(scores, threshold=threshold)
        smaller = cn.prune(model, plan, data.test.inputs[:1])
        names = ("cells", cell.key, rule)
        tuned = runs.train(smaller, settings["data"], recipe, settings["seed"], *names)
        removals.append(
            {
                "rule": rule,
                "threshold": threshold,
                **measure_removal(model, plan, data.test),
                "random": [measure_without(model, plan.random(seed=draw), data.test) for draw in draws],
                "critical": measure_without(model, plan.critical(scores), data.test),
                "fine_tuned": measure(tuned, data.test),
            }
        )
    return {"reference": measure(model, data.test), "solver": describe_solver(scores), "removals": removals}


def find_threshold(model: nn.Module, scores: cn.Scores, share: float) -> float:
    """The lowest threshold that removes this share of the parameters, as the authors count; if none does, the largest
    score."""
    levels = np.unique(np.concatenate(list(scores.values())))
    at = bisect_left(levels, share, key=lambda level: share_as_published(model, cn.plan(scores, threshold=level)))
    return float(levels[min(at, len(levels) - 1)])


def score_reference(settings: Settings, runs: Runs) -> tuple[nn.Module, Dataset, cn.Scores]:
    """The network as the paper trains it, its data, and its scores on a batch of validation images."""
    data = runs.load(settings["data"])
    model = runs.train_reference(settings["network"], settings["data"], settings["seed"])
    return model, data, score_on(model, data, settings)


def score_on(model: nn.Module, data: Dataset, settings: Settings) -> cn.Scores:
    batch = draw(settings, data, model)
    return score_interruptible(model, batch.inputs, batch.labels, **read_score_settings(settings["score"]))


def score_interruptible(model: nn.Module, inputs: Any, labels: Any, **settings: Any) -> cn.Scores:
    """Raise KeyboardInterrupt on Ctrl-C: the incumbent that `cn.score` then returns must not be stored."""
    scores = cn.score(model, inputs, labels, **settings)
    if any(note.startswith(INTERRUPTED) for note in scores.notes):
        raise KeyboardInterrupt
    return scores


def draw(settings: Settings, data: Dataset, model: nn.Module) -> LabelledImages:
    """The batch of images to score on."""
    batch = settings["batch"]
    return draw_batch(
        data.validation,
        batch["per_class"],
        seed=settings["seed"] if batch["seed"] is None else batch["seed"],
        varying=batch["varying"],
        correct_by=model if batch["correct"] else None,
    )


def choose_thresholds(
    model: nn.Module,
    scores: cn.Scores,
    validation: LabelledImages,
    *,
    share: float,
    accuracy: float,
    steps: int,
) -> dict[str, float]:
    """Greedy choice of one threshold per layer: one of `find_levels`, or 0 where nothing is removed.

    Each step raises the threshold with the smallest loss of accuracy per parameter removed (as the authors count),
    until `share` is removed; after that only while the accuracy stays at least `accuracy`.
    """
    levels = {name: find_levels(values, steps) for name, values in scores.items()}
    chosen, removed, before = dict.fromkeys(scores, 0.0), 0.0, measure(model, validation)
    while True:
        ways = []
        for name, ahead in levels.items():
            if not ahead:
                continue
            plan = cn.plan(scores, threshold={**chosen, name: ahead[0]})
            reached = share_as_published(model, plan)
            left = measure_without(model, plan, validation)
            if removed < share or left >= accuracy:
                ways.append(((before - left) / (reached - removed), name, left, reached))
        if not ways:
            return chosen
        _, name, before, removed = min(ways)
        chosen[name] = levels[name].pop(0)


def find_levels(values: np.ndarray, steps: int) -> list[float]:
    """Distinct quantiles of the scores above the smallest one, at `steps` equal steps through the sorted units."""
    ordered = np.sort(values)
    levels = np.unique(ordered[np.arange(steps) * len(values) // steps])
    return [float(each) for each in levels if each > ordered[0]]


def measure_removal(model: nn.Module, plan: cn.Plan, test: LabelledImages) -> Settings:
    """Shares removed and accuracy; L1 and L2 remove as many units of every layer by the norm of their weights."""
    return {
        "units": share_of_units(plan),
        "as_published": share_as_published(model, plan),
        "parameters": share_of_parameters(model, plan, test.inputs[:1]),
        "accuracy": measure_without(model, plan, test),
        "biases_left": measure(mask_incoming(model, plan), test),
        "L1": measure_without(model, plan_by_norm(plan, model, norm=1), test),
        "L2": measure_without(model, plan_by_norm(plan, model, norm=2), test),
    }


def measure_without(model: nn.Module, plan: cn.Plan, part: LabelledImages) -> float:
    return measure(cn.prune(model, plan, part.inputs[:1]), part)


def measure(model: nn.Module, part: LabelledImages) -> float:
    return measure_accuracy(model, part.inputs, part.labels)


def mask_incoming(model: nn.Module, plan: cn.Plan) -> nn.Module:
    """A copy masked as in the authors' code: incoming weights of removed units are zero, their biases stay."""
    masked = copy.deepcopy(unwrap(model))
    with torch.no_grad():
        for layer in plan.layers:
            masked.get_submodule(layer.name).get_parameter("weight")[torch.from_numpy(layer.removed)] = 0
    return masked


def describe_solver(scores: cn.Scores) -> dict[str, Any]:
    return {
        "status": scores.status.value,
        "objective": scores.objective,
        "gap": scores.gap,
        "seconds": scores.seconds,
        "logit_error": scores.logit_error,
        "scores": summarise_scores(scores),
    }


def summarise_scores(scores: cn.Scores) -> dict[str, list[float]]:
    """Minimum, mean and maximum of the scores of every layer."""
    return {name: [float(at(values)) for at in (np.min, np.mean, np.max)] for name, values in scores.items()}

"""Epochs: score a network after every epoch of training; accuracy and share removed by epoch."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

import critical_neurons as cn
from critical_neurons_reproduction.baselines import share_as_published, share_of_units
from critical_neurons_reproduction.datasets import Dataset
from critical_neurons_reproduction.experiments.cells import Settings
from critical_neurons_reproduction.experiments.pruning import describe_solver, measure, measure_without, score_on
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.store import Cell

SEEDS = 1000
"""Offset between the seeds of two runs: every epoch of an incremental run has its own seed."""


def run_epochs(cell: Cell, runs: Runs) -> Settings:
    """Plain: prune the network of each epoch. Incremental: low-scored units stay removed in all later epochs."""
    follow = _follow_smaller if cell.settings["incremental"] else _follow_whole
    return {"epochs": follow(cell, runs, runs.load(cell.settings["data"]))}


def _follow_whole(cell: Cell, runs: Runs, data: Dataset) -> list[Settings]:
    settings = cell.settings
    runs.train_reference(settings["network"], settings["data"], settings["seed"])
    epochs = list[Settings]()
    for number in range(1, _count_epochs(settings, runs) + 1):
        model = runs.load_epoch(settings["network"], settings["data"], settings["seed"], number)
        scores = score_on(model, data, settings)
        plan = cn.plan(scores, threshold=settings["thresholds"][0])
        removed, solver = _count_removed(model, plan), describe_solver(scores)
        epochs.append({"epoch": number, **_measure(model, plan, data), **removed, "solver": solver})
    return epochs


def _follow_smaller(cell: Cell, runs: Runs, data: Dataset) -> list[Settings]:
    """Every epoch starts with a new optimiser, as pruning changes the parameters."""
    settings, seed = cell.settings, cell.settings["seed"]
    recipe = runs.find_recipe(settings["network"], settings["data"]).shortened(1)
    whole = model = runs.build(settings["network"], seed)
    kept: cn.Plan | None = None
    epochs = list[Settings]()
    for number in range(1, _count_epochs(settings, runs) + 1):
        names = ("cells", cell.key, f"epoch-{number:03}")
        trained = runs.train(model, settings["data"], recipe, SEEDS * seed + number, *names)
        scores = score_on(trained, data, settings)
        plan = cn.plan(scores, threshold=settings["thresholds"][0])
        kept = plan if kept is None else _combine(kept, plan)
        removed = _count_removed(whole, kept)
        epochs.append(
            {"epoch": number, **_measure(trained, plan, data), **removed, "solver": describe_solver(scores)}
        )
        model = cn.prune(trained, plan, data.test.inputs[:1])
    return epochs


def _measure(model: nn.Module, plan: cn.Plan, data: Dataset) -> Settings:
    return {"reference": measure(model, data.test), "accuracy": measure_without(model, plan, data.test)}


def _count_removed(model: nn.Module, plan: cn.Plan) -> Settings:
    return {"units": share_of_units(plan), "as_published": share_as_published(model, plan)}


def _combine(first: cn.Plan, then: cn.Plan) -> cn.Plan:
    """Both plans as one of the whole network; `then` is a plan of the network that `first` leaves."""
    removed, stays = then.removed, first.stays.copy()
    for layer, planned in zip(first.structure.layers, first.layers, strict=True):
        if layer.name in removed:
            stays[layer.units[planned.kept[removed[layer.name]]]] = False
    return replace(first, stays=stays)


def _count_epochs(settings: Settings, runs: Runs) -> int:
    return runs.schedule.shorten(runs.find_recipe(settings["network"], settings["data"])).epochs

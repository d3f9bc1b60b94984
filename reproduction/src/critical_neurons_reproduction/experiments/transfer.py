"""Transfer: remove units or connections of the initial network, then train it and measure the accuracy."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import critical_neurons as cn
from critical_neurons.removal.metrics import count_parameters
from critical_neurons_reproduction.baselines import (
    mask_connections,
    plan_by_sensitivity,
    share_as_published,
    share_of_parameters,
    share_of_units,
)
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.experiments.cells import Settings
from critical_neurons_reproduction.experiments.deep import score_transferred
from critical_neurons_reproduction.experiments.pruning import (
    describe_solver,
    find_threshold,
    measure,
    score_on,
    score_reference,
)
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.store import Cell


def run_transfer(cell: Cell, runs: Runs) -> Settings:
    """Prune by the source data set, then train from the initial weights on the target; likewise the whole network."""
    settings = cell.settings
    network, seed, target = settings["network"], settings["seed"], settings["target"]
    test = runs.load(target).test
    initial = runs.build(network, seed)
    reference = runs.measured.get(cell.key)
    if reference is None:
        reference = measure(runs.train_reference(network, target, seed), test)
    if settings["method"] == "connections":
        smaller, found = _mask_connections(initial, runs.load(settings["data"]), settings)
    else:
        plan, solver = _choose_units(initial, runs, settings)
        smaller = cn.prune(initial, plan, test.inputs[:1])
        found = {
            "solver": solver,
            "units": share_of_units(plan),
            "as_published": share_as_published(initial, plan),
            "parameters": share_of_parameters(initial, plan, test.inputs[:1]),
        }
    names = ("cells", cell.key)
    trained = (
        runs.train_decoupled(smaller, target, seed, *names).model
        if network == "vgg16"
        else runs.train(smaller, target, Recipe(**settings["retraining"]), seed, *names)
    )
    return {"reference": reference, "accuracy": measure(trained, test), **found}


def _choose_units(initial: nn.Module, runs: Runs, settings: Settings) -> tuple[cn.Plan, Settings | None]:
    source = runs.load(settings["data"])
    if settings["initial"]:
        scores = score_on(initial, source, settings)
    elif settings["network"] == "vgg16":
        scores = score_transferred(settings, runs)
    else:
        _, _, scores = score_reference(settings, runs)
    threshold = settings["threshold"]
    if threshold is None:
        threshold = find_threshold(initial, scores, settings["share"])
    plan = cn.plan(scores, threshold=threshold)
    if settings["method"] == "scores":
        return plan, describe_solver(scores)
    batch = _draw_for_snip(source, settings)
    return plan_by_sensitivity(plan, initial, batch.inputs, batch.labels, kept=settings["snip"]["kept"]), None


def _mask_connections(initial: nn.Module, source: Dataset, settings: Settings) -> tuple[nn.Module, Settings]:
    """SNIP's masks as parametrisations, so that masked weights stay zero in training."""
    batch = _draw_for_snip(source, settings)
    masks = mask_connections(initial, batch.inputs, batch.labels, kept=settings["snip"]["kept"])
    whole = count_parameters(initial)
    for (module, parameter), mask in masks.items():
        parametrize.register_parametrization(initial.get_submodule(module), parameter, _Mask(mask))
    removed = sum(int((mask == 0).sum()) for mask in masks.values()) / whole
    return initial, {"solver": None, "units": 0, "as_published": removed, "parameters": 0}


class _Mask(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        mask: Tensor = self.get_buffer("mask")
        return weight * mask


def _draw_for_snip(source: Dataset, settings: Settings) -> LabelledImages:
    """Training images at random, as SNIP takes them."""
    generator = torch.Generator().manual_seed(settings["seed"])
    rows = torch.randperm(len(source.training), generator=generator)[: settings["snip"]["images"]]
    return source.training.select(rows)

"""Deep: cells of VGG-16 in parts, trained so, or with weights that were trained end to end elsewhere."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

import critical_neurons as cn
from critical_neurons.core.documents import parse_json, read_file
from critical_neurons.core.files import make_folder, write_atomically
from critical_neurons.errors import InvalidFileError, InvalidSettingError
from critical_neurons_reproduction.baselines import share_as_published, share_of_parameters, share_of_units
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.decoupled import Decoupled, decouple, score_parts, train_heads, train_parts
from critical_neurons_reproduction.experiments.cells import WHOLE, Schedule, Settings
from critical_neurons_reproduction.experiments.pruning import (
    describe_solver,
    draw,
    find_threshold,
    measure,
    score_interruptible,
)
from critical_neurons_reproduction.experiments.workspace import DECOUPLED, Runs
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.score_settings import read_score_settings
from critical_neurons_reproduction.store import Cell
from critical_neurons_reproduction.training import train

DIGITS = 16
"""Of a digest in hexadecimal."""


def run_deep(cell: Cell, runs: Runs) -> Settings:
    """One way to choose units of VGG-16 by the programs of its parts; what is left is fine-tuned as a whole."""
    settings, runs = cell.settings, runs.narrowed(cell.settings.get("narrow", 1))
    decoupled, data = prepare(settings, runs)
    model, chosen = decoupled.model, settings["removed"]
    smaller: nn.Module = model
    removed: dict[str, list[int]] = {}
    kept = find_kept(settings, runs)
    found: Settings = {"reference": measure_once(model, data.test, kept / "reference.json")}
    if chosen != "nothing":
        scores = score_deep(settings, runs, decoupled, data)
        share = settings["share"]
        threshold = settings["thresholds"][0] if share is None else find_threshold(model, scores, share)
        ours = cn.plan(scores, threshold=threshold)
        plan = {"ours": ours, "random": ours.random(seed=settings["seed"]), "critical": ours.critical(scores)}[chosen]
        removed = {layer: units.tolist() for layer, units in plan.removed.items()}
        if removed:
            smaller = cn.prune(model, plan, data.test.inputs[:1])
        found = {
            **found,
            "solver": describe_solver(scores),
            "threshold": threshold,
            **_summarise_scores(scores, settings),
            **_count_removed(model, plan, data.test.inputs[:1]),
            "removed": {layer.name: len(layer.removed) for layer in plan.layers},
            "accuracy": measure(smaller, data.test),
        }
    tuned = train(
        smaller,
        data,
        Recipe(**settings["fine_tuning"]),
        seed=settings["seed"],
        folder=kept / f"fine-tuned-{_digest([settings['fine_tuning'], removed])}",  # one for all that remove the same
        progress=lambda epoch: runs.on_epoch(cell.name, epoch.number, epoch.of),
    ).model
    return {**found, "fine_tuned": measure(tuned, data.test)}


def run_parts(cell: Cell, runs: Runs) -> Settings:
    """One way to score VGG-16 in parts; what is left is not fine-tuned."""
    settings = cell.settings
    decoupled, data = prepare(settings, runs)
    model, scores = decoupled.model, score_deep(settings, runs, decoupled, data)
    threshold = find_threshold(model, scores, settings["share"])
    plan = cn.plan(scores, threshold=threshold)
    return {
        "reference": measure_once(model, data.test, find_kept(settings, runs) / "reference.json"),
        "solver": describe_solver(scores),
        **_summarise_scores(scores, settings),
        "threshold": threshold,
        **_count_removed(model, plan, data.test.inputs[:1]),
        "accuracy": measure(cn.prune(model, plan, data.test.inputs[:1]), data.test),
    }


def _summarise_scores(scores: cn.Scores, settings: Settings) -> Settings:
    values = np.concatenate(list(scores.values()))
    return {"mean_score": float(values.mean()), "below": float((values < settings["thresholds"][0]).mean())}


def _count_removed(model: nn.Module, plan: cn.Plan, example: torch.Tensor) -> Settings:
    return {
        "units": share_of_units(plan),
        "as_published": share_as_published(model, plan),
        "parameters": share_of_parameters(model, plan, example),
    }


def run_replay(cell: Cell, runs: Runs) -> Settings:
    """A narrow VGG-16 trained in parts that read from replay buffers of one size."""
    settings, seed, runs = cell.settings, cell.settings["seed"], runs.narrowed(cell.settings["narrow"])
    data, recipe, model = runs.load(settings["data"]), Recipe(**settings["recipe"]), runs.build("vgg16", seed)
    assert isinstance(model, nn.Sequential)
    decoupled = decouple(model, data.training.inputs[:1], seed=seed)
    losses = train_parts(
        decoupled,
        data.training.inputs,
        data.training.labels,
        runs.schedule.shorten(recipe),
        buffer_size=settings["buffer_size"],
        threads=runs.threads,
        seed=seed,
        checkpoint=make_folder(runs.place(recipe, "cells", cell.key)) / DECOUPLED,
        progress=lambda epoch, losses: runs.on_epoch(cell.name, epoch, recipe.epochs),
    )
    return {"accuracy": measure(decoupled.model, data.test), "losses": losses[-1], "threads": runs.threads}


def prepare(settings: Settings, runs: Runs) -> tuple[Decoupled, Dataset]:
    """The network in parts with trained heads, and its data: trained in parts, or given weights and only the heads
    trained."""
    data, seed = runs.load(settings["data"]), settings["seed"]
    if "weights" in settings:
        shifted = _shift(data, settings["weights"]["shift"])
        return _load_given(settings, runs, shifted), shifted
    trained = runs.train_decoupled(runs.build("vgg16", seed), settings["data"], seed, *_name_training(settings))
    if "heads" not in settings:
        return trained, data
    wide = decouple(trained.model, data.training.inputs[:1], hidden=None, seed=seed)
    _train_heads_once(wide, data, Recipe(**settings["heads"]), find_kept(settings, runs), seed)
    return wide, data


def score_deep(settings: Settings, runs: Runs, decoupled: Decoupled, data: Dataset) -> cn.Scores:
    """The scores of a network in parts, solved once and kept: several cells use them."""
    path = find_scores(settings, runs)
    if path.exists():
        return cn.Scores.load(path)
    # A network whose training was cut short may classify no image of some class correctly.
    whole = "weights" in settings or replace(runs.schedule, narrow=WHOLE.narrow) == WHOLE
    correct = settings["batch"]["correct"] and whole
    batch = draw({**settings, "batch": {**settings["batch"], "correct": correct}}, data, decoupled.model)
    solver_settings = read_score_settings(settings["score"])
    formulation, score = solver_settings.pop("formulation"), partial(score_interruptible, **solver_settings)
    workers = cn.Workers(jobs=runs.threads)
    scores = score_parts(
        decoupled,
        batch.inputs,
        batch.labels,
        formulation=formulation,
        score=score,
        workers=workers,
        **settings["parts"],
    )
    make_folder(path.parent)
    scores.save(path)
    return scores


def find_scores(settings: Settings, runs: Runs) -> Path:
    """Where scores are kept: one file for all cells with the same training, images and program."""
    data = settings["data"]
    wanted = ("data", "seed", "recipe", "weights", "heads", "score", "parts", "batch")
    origin = {key: settings[key] for key in wanted if key in settings}
    origin |= {"pictures": settings["pictures"][data], "schedule": asdict(runs.schedule)}
    folder = find_kept(settings, runs) if runs.scores is None else runs.scores
    return folder / f"vgg16-{data}-{_digest(origin)}.json"


def find_transferred(settings: Settings, runs: Runs) -> Path | None:
    """Kept scores that a transfer can use without training on the source, those of a whole training first."""
    whole = replace(runs, schedule=Schedule(narrow=runs.schedule.narrow))
    return next((path for each in (whole, runs) if (path := find_scores(settings, each)).exists()), None)


def score_transferred(settings: Settings, runs: Runs) -> cn.Scores:
    """The scores on the source, kept ones if there are any."""
    path = find_transferred(settings, runs)
    return score_deep(settings, runs, *prepare(settings, runs)) if path is None else cn.Scores.load(path)


def find_kept(settings: Settings, runs: Runs) -> Path:
    """The folder of what is kept of a network trained by this recipe."""
    place = runs.place(Recipe(**settings["recipe"]), *_name_training(settings))
    return place / f"recipe-{_digest(settings['recipe'])}"


def _name_training(settings: Settings) -> list[str]:
    given = [settings["weights"]["digest"]] if "weights" in settings else []
    return [settings["data"], "vgg16", *given, f"seed-{settings['seed']}"]


def _load_given(settings: Settings, runs: Runs, data: Dataset) -> Decoupled:
    """The network with the given weights, in parts with trained heads."""
    seed = settings["seed"]
    model = runs.build("vgg16", seed)
    model.load_state_dict(read_weights(runs.weights, settings["weights"]["digest"]))
    assert isinstance(model, nn.Sequential)
    decoupled = decouple(model, data.training.inputs[:1], seed=seed)
    _train_heads_once(decoupled, data, Recipe(**settings["recipe"]), find_kept(settings, runs), seed)
    return decoupled


def _train_heads_once(decoupled: Decoupled, data: Dataset, recipe: Recipe, folder: Path, seed: int) -> None:
    """Heads behind frozen bodies, trained in place or read from the folder, where they are kept."""
    heads = nn.ModuleList(part.head for part in decoupled.parts)
    path = make_folder(folder) / f"heads-{_digest(recipe.to_dict())}.safetensors"
    if path.exists():
        heads.load_state_dict(load(path.read_bytes()))
    else:
        training = data.training
        train_heads(decoupled, training.inputs, training.labels, recipe, seed=seed)
        write_atomically(path, save({name: value.contiguous() for name, value in heads.state_dict().items()}))
    for part in decoupled.parts:
        part.network.eval()
    decoupled.model.eval()


def measure_once(model: nn.Module, test: LabelledImages, path: Path) -> float:
    """The accuracy of the whole network, which is the same in all cells."""
    if not path.exists():
        make_folder(path.parent)
        write_atomically(path, json.dumps(measure(model, test)).encode())
    try:
        return float(parse_json(read_file(path)))
    except (ValueError, TypeError) as error:
        raise InvalidFileError(f"{path}: holds no number. Remove it to measure again.") from error


def read_weights(path: Path | None, expected: str) -> dict[str, torch.Tensor]:
    """Those with the digest, and no others: results go by it."""
    if path is None:
        raise InvalidSettingError(
            f"--vgg-weights: found none. Give the safetensors file of VGG-16 whose sha256 begins with {expected}."
        )
    try:
        content = path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidFileError(f"--vgg-weights {path}: cannot be read ({error.strerror or error}).") from error
    found = _shorten(content)
    if found != expected:
        raise InvalidFileError(
            f"--vgg-weights {path}: other weights than those of the cells. Its sha256 begins with {found}; accepted: "
            f"the file whose sha256 begins with {expected}."
        )
    return load(content)


def _digest(plain: Any) -> str:
    return _shorten(json.dumps(plain, sort_keys=True).encode())


def _shorten(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _shift(data: Dataset, by: float) -> Dataset:
    """Images as the network was trained on them."""
    return Dataset(
        *(LabelledImages(part.inputs + by, part.labels) for part in (data.training, data.validation, data.test))
    )

"""Given weights: cells of a VGG-16 that was trained end to end elsewhere; of its parts only the heads are trained."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

import critical_neurons as cn
from critical_neurons.core.documents import parse_json, read_file
from critical_neurons.core.files import make_folder, write_atomically
from critical_neurons.errors import InvalidFileError, InvalidSettingError
from critical_neurons_reproduction.baselines import share_as_published, share_of_parameters, share_of_units
from critical_neurons_reproduction.datasets import Dataset, Part
from critical_neurons_reproduction.decoupled import Decoupled, decouple, score_parts, train_heads
from critical_neurons_reproduction.experiments.cells import Settings
from critical_neurons_reproduction.experiments.pruning import (
    describe_solver,
    draw,
    find_threshold,
    measure,
    score_interruptible,
)
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.score_settings import read_score_settings
from critical_neurons_reproduction.store import Cell
from critical_neurons_reproduction.training import train

DIGITS = 16
"""Of a digest in hexadecimal."""


def run_given(cell: Cell, runs: Runs) -> Settings:
    """One way to choose units, and the rest of the network after an epoch of fine-tuning as a whole."""
    settings = cell.settings
    data = _shift(runs.load(settings["data"]), settings["weights"]["shift"])
    names = settings["data"], "vgg16", settings["weights"]["digest"], f"seed-{settings['seed']}"
    folder = make_folder(runs.place(Recipe(**settings["recipe"]), *names))
    decoupled = _prepare(settings, runs, data, folder)
    model = decoupled.model
    chosen = settings["removed"]
    found: Settings = {"reference": _measure_once(model, data.test, folder / "reference.json")}
    smaller: nn.Module = model
    if chosen != "nothing":
        scores = _score(decoupled, data, settings, folder)
        share = settings["share"]
        threshold = settings["thresholds"][0] if share is None else find_threshold(model, scores, share)
        ours = cn.plan(scores, threshold=threshold)
        plan = {"ours": ours, "random": ours.random(seed=settings["seed"]), "critical": ours.critical(scores)}[chosen]
        smaller = cn.prune(model, plan, data.test.inputs[:1])
        found = {
            **found,
            "solver": describe_solver(scores),
            "threshold": threshold,
            "units": share_of_units(plan),
            "as_published": share_as_published(model, plan),
            "parameters": share_of_parameters(model, plan, data.test.inputs[:1]),
            "removed": {layer.name: len(layer.removed) for layer in plan.layers},
            "accuracy": measure(smaller, data.test),
        }
    tuned = train(
        smaller,
        data,
        Recipe(**settings["fine_tuning"]),
        seed=settings["seed"],
        folder=runs.place(Recipe(**settings["fine_tuning"]), "cells", cell.key),
        progress=lambda epoch: runs.tell(cell.name, epoch.number, epoch.of),
    ).model
    return {**found, "fine_tuned": measure(tuned, data.test)}


def _prepare(settings: Settings, runs: Runs, data: Dataset, folder: Path) -> Decoupled:
    """The network with the given weights, in parts with trained heads; these are kept in the folder."""
    model = runs.build("vgg16", settings["seed"])
    model.load_state_dict(read_weights(runs.weights, settings["weights"]["digest"]))
    assert isinstance(model, nn.Sequential)
    decoupled = decouple(model, data.training.inputs[:1], seed=settings["seed"])
    recipe = Recipe(**settings["recipe"])
    heads = nn.ModuleList(part.head for part in decoupled.parts)
    path = folder / f"heads-{_digest(str(recipe).encode())}.safetensors"
    if path.exists():
        heads.load_state_dict(load(path.read_bytes()))
    else:
        training = data.training
        train_heads(decoupled, training.inputs, training.labels, recipe, seed=settings["seed"])
        write_atomically(path, save({name: value.contiguous() for name, value in heads.state_dict().items()}))
    for part in decoupled.parts:
        part.network.eval()
    decoupled.model.eval()
    return decoupled


def _score(decoupled: Decoupled, data: Dataset, settings: Settings, folder: Path) -> cn.Scores:
    """Kept in the folder: several cells go by the same scores."""
    path = folder / f"scores-{_digest(repr([settings[key] for key in ('score', 'parts', 'batch')]).encode())}.json"
    if path.exists():
        return cn.Scores.load(path)
    batch = draw(settings, data, decoupled.model)
    told = read_score_settings(settings["score"])
    formulation, score = told.pop("formulation"), partial(score_interruptible, **told)
    scores = score_parts(
        decoupled, batch.inputs, batch.labels, formulation=formulation, score=score, **settings["parts"]
    )
    scores.save(path)
    return scores


def _measure_once(model: nn.Module, test: Part, path: Path) -> float:
    """The accuracy of the whole network, which no cell changes."""
    if not path.exists():
        write_atomically(path, json.dumps(measure(model, test)).encode())
    try:
        found = float(parse_json(read_file(path)))
    except (ValueError, TypeError) as error:
        raise InvalidFileError(f"{path}: holds no number. Remove it to measure again.") from error
    return found


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
    found = _digest(content)
    if found != expected:
        raise InvalidFileError(
            f"--vgg-weights {path}: other weights than those of the cells. Its sha256 begins with {found}; accepted: "
            f"the file whose sha256 begins with {expected}."
        )
    return load(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _shift(data: Dataset, by: float) -> Dataset:
    """Images as the network was trained on them."""
    return Dataset(*(Part(part.inputs + by, part.labels) for part in (data.training, data.validation, data.test)))

"""Workspace of a run: data sets, folder of trained networks, and how training is shortened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from critical_neurons.core.files import make_folder
from critical_neurons.errors import InvalidInputError
from critical_neurons.io.builtin_models import MODELS, vgg16
from critical_neurons.io.models import load_model
from critical_neurons_reproduction.datasets import HUB_IDS, Dataset, LabelledImages, digest_pictures, load_dataset
from critical_neurons_reproduction.decoupled import Decoupled, decouple, train_parts
from critical_neurons_reproduction.experiments.cells import (
    BEST_RECIPES,
    FOLDERS,
    FOLLOWED,
    WHOLE,
    Schedule,
    find_recipe,
)
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.training import EPOCH, build_model, train

OnEpoch: TypeAlias = Callable[[str, int, int], None]
"""Progress callback: name of the training, epochs done, total epochs."""

DECOUPLED = "decoupled.pt"
"""The checkpoint of a network trained in parts, in the folder of its training."""


@dataclass(frozen=True)
class Runs:
    """Where and how cells are run.

    * `folder`: training checkpoints, to resume from; shortened training has its own subfolders.
    * `data`: a folder of data sets; None for the Hugging Face hub.
    * `recipes`: the name of the training recipes.
    * `weights`: a file of a trained VGG-16, for the cells that start from one.
    * `scores`: a folder for scores of VGG-16; by default that of its training.
    * `measured`: known accuracies of unpruned networks, which then are not trained again, by the key of the cell.
    * `threads`: parts of VGG-16 trained or scored in parallel. The result does not depend on it.
    """

    folder: Path
    data: Path | None = None
    schedule: Schedule = WHOLE
    cache: Path | None = None
    recipes: str = BEST_RECIPES
    weights: Path | None = None
    scores: Path | None = None
    threads: int = 1
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    on_epoch: OnEpoch = lambda training, done, total: None

    def load(self, data: str) -> Dataset:
        return _load(self._source(data), self.cache, self.schedule.images, self.schedule.measured)

    def check_pictures(self, data: str, expected: str) -> None:
        """Refuse images that are not those of the paper's data set."""
        found = digest_pictures(self._source(data), cache=self.cache)
        if found != expected:
            raise InvalidInputError(
                f"{self._source(data)}: not the images of {HUB_IDS[FOLDERS[data]]} (digest {found}, not "
                f"{expected}). Accepted: the original pixels, in any lossless format, not recompressed as JPEG. "
                f"To fetch them: hf download {HUB_IDS[FOLDERS[data]]} --repo-type dataset --local-dir "
                f"{FOLDERS[data]}"
            )

    def _source(self, data: str) -> str:
        return HUB_IDS[FOLDERS[data]] if self.data is None else str(find_data(self.data, data))

    def build(self, network: str, seed: int) -> nn.Module:
        """The untrained network. The same seed gives the same weights."""
        narrow = self.schedule.narrow if network == "vgg16" else 1
        return build_model(MODELS[network].factory if narrow == 1 else partial(vgg16, narrow=narrow), seed)

    def narrowed(self, by: int) -> Runs:
        """The same, with a VGG-16 whose maps are divided by at least this number."""
        return replace(self, schedule=replace(self.schedule, narrow=max(by, self.schedule.narrow)))

    def find_recipe(self, network: str, data: str) -> Recipe:
        return find_recipe(network, data, self.recipes)

    def train_reference(self, network: str, data: str, seed: int) -> nn.Module:
        """The unpruned network, trained on the data set by the recipe."""
        if network == "vgg16":
            return self.train_decoupled(self.build(network, seed), data, seed, data, network, f"seed-{seed}").model
        keep = (data, network) in FOLLOWED
        recipe = self.find_recipe(network, data)
        names = (data, network, f"seed-{seed}")
        return self.train(self.build(network, seed), data, recipe, seed, *names, keep_epochs=keep)

    def load_epoch(self, network: str, data: str, seed: int, number: int) -> nn.Module:
        """The weights `train_reference` saved after an epoch; only for the networks in `FOLLOWED`."""
        folder = self.place(self.find_recipe(network, data), data, network, f"seed-{seed}")
        return load_model(network, folder / EPOCH.format(number))

    def train(
        self, model: nn.Module, data: str, recipe: Recipe, seed: int, *names: str, keep_epochs: bool = False
    ) -> nn.Module:
        """The model, trained; `names` are the parts of its checkpoint folder's path."""
        return train(
            model,
            self.load(data),
            self.schedule.shorten(recipe),
            seed=seed,
            folder=self.place(recipe, *names),
            keep_epochs=keep_epochs,
            progress=lambda epoch: self.on_epoch("/".join(names), epoch.number, epoch.of),
        ).model

    def train_decoupled(self, model: nn.Module, data: str, seed: int, *names: str) -> Decoupled:
        """The model trained by decoupled greedy learning: in parts, each with its own auxiliary head."""
        assert isinstance(model, nn.Sequential)
        training = self.load(data).training
        whole = self.find_recipe("vgg16", data)
        recipe = self.schedule.shorten(whole)
        found = decouple(model, training.inputs[:1], seed=seed)
        folder = make_folder(self.place(whole, *names))
        train_parts(
            found,
            training.inputs,
            training.labels,
            recipe,
            threads=self.threads,
            seed=seed,
            checkpoint=folder / DECOUPLED,
            progress=lambda epoch, losses: self.on_epoch("/".join(names), epoch, recipe.epochs),
        )
        return found

    def place(self, recipe: Recipe, *names: str) -> Path:
        """The folder of this training alone."""
        cut: dict[str, int | None] = {
            "epochs": self.schedule.epochs if self.schedule.cuts(recipe) else None,
            "images": self.schedule.images,
            "measured": self.schedule.measured,
            "narrow": self.schedule.narrow if self.schedule.narrow > 1 else None,
        }
        shortened = "-".join(f"{name}-{value}" for name, value in cut.items() if value is not None)
        others = "" if self.recipes == BEST_RECIPES else f"recipes-{self.recipes}"
        return self.folder.joinpath(*filter(None, (others, shortened)), *names)


def find_data(folder: Path, data: str) -> Path:
    """The folder of one data set in a folder of several."""
    found = folder.expanduser() / FOLDERS[data]
    if not found.is_dir():
        there = "no such folder" if not folder.expanduser().is_dir() else f"no folder {FOLDERS[data]} in it"
        raise InvalidInputError(
            f"--data {folder}: {there}. Accepted: a folder with {', '.join(FOLDERS.values())} in it, as far as they "
            f"are needed. To fetch this one: hf download {HUB_IDS[FOLDERS[data]]} --repo-type dataset --local-dir "
            f"{folder / FOLDERS[data]}"
        )
    return found


@lru_cache(maxsize=2)
def _load(source: str, cache: Path | None, images: int | None, measured: int | None) -> Dataset:
    """Cached between the cells that one process runs."""
    whole = load_dataset(source, cache=cache)
    return Dataset(_first(whole.training, images), _first(whole.validation, measured), _first(whole.test, measured))


def _first(part: LabelledImages, count: int | None) -> LabelledImages:
    return part if count is None or count >= len(part) else part.select(torch.arange(count))

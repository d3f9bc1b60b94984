"""Where cells are run: the data, the folder that keeps trained networks, and how far trainings are cut down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from critical_neurons.core.files import make_folder
from critical_neurons.errors import InvalidInputError
from critical_neurons.io.builtin_models import MODELS, vgg16
from critical_neurons.io.models import load_model
from critical_neurons_reproduction.datasets import HUB_IDS, Dataset, Part, digest_pictures, load_dataset
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

Tell: TypeAlias = Callable[[str, int, int], None]
"""What is trained, epochs done, epochs there will be."""

DECOUPLED = "decoupled.pt"
"""The checkpoint of a network trained in parts, in the folder of its training."""


@dataclass(frozen=True)
class Runs:
    """`folder` keeps the trainings, which go on where they were stopped; those cut down have places of their own.
    `data` is a folder of data sets, None for those of the hub; `recipes` are those networks are trained by,
    `weights` a file of a trained VGG-16, for the cells that begin with one. `scores` is the folder that keeps scores
    of VGG-16, by default that of its training. `measured` has accuracies of whole networks that need not be trained
    again, by the key of the cell that asks for them. `threads` is how many parts of
    VGG-16 are trained or scored at once, to the same result for any number."""

    folder: Path
    data: Path | None = None
    schedule: Schedule = WHOLE
    cache: Path | None = None
    recipes: str = BEST_RECIPES
    weights: Path | None = None
    scores: Path | None = None
    threads: int = 1
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    tell: Tell = lambda what, done, of: None

    def load(self, data: str) -> Dataset:
        return _load(self._source(data), self.cache, self.schedule.images, self.schedule.measured)

    def check_pictures(self, data: str, expected: str) -> None:
        """Results on other pictures than the paper's are none of its cells."""
        found = digest_pictures(self._source(data), cache=self.cache)
        if found != expected:
            raise InvalidInputError(
                f"{self._source(data)}: other pictures than those of {HUB_IDS[FOLDERS[data]]} (digest {found}, not "
                f"{expected}). Accepted: the original pixels, in any lossless format; a copy that went through JPEG "
                f"has others. To fetch them: hf download {HUB_IDS[FOLDERS[data]]} --repo-type dataset --local-dir "
                f"{FOLDERS[data]}"
            )

    def _source(self, data: str) -> str:
        return HUB_IDS[FOLDERS[data]] if self.data is None else str(find_data(self.data, data))

    def build(self, network: str, seed: int) -> nn.Module:
        """The untrained network. The same seed gives the same weights."""
        narrow = self.schedule.narrow if network == "vgg16" else 1
        return build_model(MODELS[network].factory if narrow == 1 else partial(vgg16, narrow=narrow), seed)

    def find_recipe(self, network: str, data: str) -> Recipe:
        return find_recipe(network, data, self.recipes)

    def train_reference(self, network: str, data: str, seed: int) -> nn.Module:
        """The network as the paper trains it on the data set."""
        if network == "vgg16":
            return self.train_decoupled(self.build(network, seed), data, seed, data, network, f"seed-{seed}").model
        keep = (data, network) in FOLLOWED
        recipe = self.find_recipe(network, data)
        names = (data, network, f"seed-{seed}")
        return self.train(self.build(network, seed), data, recipe, seed, *names, keep_epochs=keep)

    def load_epoch(self, network: str, data: str, seed: int, number: int) -> nn.Module:
        """What `train_reference` has kept of an epoch, where it keeps epochs."""
        folder = self.place(self.find_recipe(network, data), data, network, f"seed-{seed}")
        return load_model(network, folder / EPOCH.format(number))

    def train(
        self, model: nn.Module, data: str, recipe: Recipe, seed: int, *names: str, keep_epochs: bool = False
    ) -> nn.Module:
        """The model, trained; `names` are those of the folder it is kept in."""
        return train(
            model,
            self.load(data),
            self.schedule.shorten(recipe),
            seed=seed,
            folder=self.place(recipe, *names),
            keep_epochs=keep_epochs,
            progress=lambda epoch: self.tell("/".join(names), epoch.number, epoch.of),
        ).model

    def train_decoupled(self, model: nn.Module, data: str, seed: int, *names: str) -> Decoupled:
        """The same in parts, each with a head of its own."""
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
            progress=lambda epoch, losses: self.tell("/".join(names), epoch, recipe.epochs),
        )
        return found

    def place(self, recipe: Recipe, *names: str) -> Path:
        """A folder for this training and no other."""
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
    """Kept while a process goes from cell to cell."""
    whole = load_dataset(source, cache=cache)
    return Dataset(_first(whole.training, images), _first(whole.validation, measured), _first(whole.test, measured))


def _first(part: Part, count: int | None) -> Part:
    return part if count is None or count >= len(part) else part.select(torch.arange(count))

"""Training: from a network, a data set and a recipe to a trained network."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from critical_neurons.core.files import make_folder, write_atomically
from critical_neurons.errors import InvalidFileError, InvalidInputError, InvalidSettingError
from critical_neurons.io.models import read_checkpoint
from critical_neurons.removal.metrics import count_classes, measure_accuracy
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.recipes import Recipe, augment, compute_loss, set_rate

INITIAL, CHECKPOINT = "initial.safetensors", "checkpoint.pt"
"""Files that training writes into its folder."""

EPOCH = "epoch-{:03}.safetensors"
"""File of the weights after an epoch, counted from one, with `keep_epochs`."""

VERSION = 1
"""Format version of the checkpoint."""

SETTINGS = ("seed", *(field.name for field in fields(Recipe)))
"""Those entries of a checkpoint's origin that error messages show with their values."""


@dataclass(frozen=True)
class Epoch:
    """A finished epoch, counted from one: running mean of the training loss, and validation accuracy."""

    number: int
    of: int
    loss: float
    accuracy: float


@dataclass(frozen=True, eq=False)
class Training:
    """The trained network, in evaluation mode, and all its epochs, including those before an interruption."""

    model: nn.Module
    epochs: tuple[Epoch, ...]


def build_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call the factory with torch seeded by `seed`. The global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(_start_random(seed))
        return factory()


def train(
    model: nn.Module,
    data: Dataset,
    recipe: Recipe,
    *,
    seed: int,
    folder: str | os.PathLike[str],
    keep_epochs: bool = False,
    progress: Callable[[Epoch], None] = lambda epoch: None,
) -> Training:
    """Train a copy of the model; the model and the global random state are not changed.

    The initial weights are saved in the folder, and a checkpoint after every epoch, before `progress` is called;
    `load_model` can read both. Called again with the same arguments, training resumes from the checkpoint.
    `keep_epochs` also saves the weights after every epoch in a separate file.
    On the CPU, with the same number of threads, the result is bit-identical, interrupted or not.
    """
    _check_fit(model, data)
    trained = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster
    optimiser = recipe.build_optimiser(trained.parameters())
    directory = make_folder(folder)
    path = directory / CHECKPOINT
    origin = _describe_origin(model, data, recipe, seed)
    random_state, epochs = _start_random(seed), list[Epoch]()
    if path.exists():
        found = _read_same(path, origin)
        random_state, epochs = _restore(path, found, trained, optimiser)
    if not (epochs and (directory / INITIAL).exists()):
        write_atomically(directory / INITIAL, save(_copy_weights(model)))
    while len(epochs) < recipe.epochs:
        number = len(epochs) + 1
        # Only the epoch itself uses this random state, so that `progress` cannot change the result.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)
            loss = _train_epoch(trained, data.training, optimiser, recipe, number)
            random_state = torch.get_rng_state()
        if not math.isfinite(loss):
            raise InvalidSettingError(
                f"recipe: the loss of epoch {number} is {loss} with {recipe.optimiser} at a learning rate of "
                f"{recipe.learning_rate}. Lower the learning rate, in another folder."
            )
        accuracy = measure_accuracy(trained, data.validation.inputs, data.validation.labels)
        epochs.append(Epoch(number, recipe.epochs, loss, accuracy))
        if keep_epochs:
            write_atomically(directory / EPOCH.format(number), save(_copy_weights(trained)))
        _write_checkpoint(path, origin, epochs, trained, optimiser, random_state)
        progress(epochs[-1])
    return Training(trained.eval(), tuple(epochs))


def _train_epoch(
    model: nn.Module, part: LabelledImages, optimiser: torch.optim.Optimizer, recipe: Recipe, number: int
) -> float:
    """Train epoch `number`, counted from one; returns its mean loss."""
    model.train()
    like = next(model.parameters())
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    batches = torch.split(torch.randperm(len(part)), recipe.batch_size)
    for step, rows in enumerate(batches):
        set_rate(optimiser, recipe, (number - 1 + step / len(batches)) / recipe.epochs)
        inputs, labels = part.inputs[rows].to(like), part.labels[rows].to(like.device)
        if recipe.augmented:
            inputs = augment(inputs)
        optimiser.zero_grad()
        with recipe.choose_precision(like):
            outputs = model(inputs)
        loss = compute_loss(outputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total += loss.detach().double() * len(rows)
    return float(total) / len(part)


def _start_random(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _check_fit(model: nn.Module, data: Dataset) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInputError("model: found no parameters that can be trained.")
    outputs = count_classes(model, data.training.inputs)
    if outputs < data.classes:
        raise InvalidInputError(f"model: found {outputs} outputs for {data.classes} classes of data.")


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: values.detach().cpu().contiguous().clone() for name, values in model.state_dict().items()}


def _describe_origin(model: nn.Module, data: Dataset, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Everything the result depends on."""
    weights = _copy_weights(model)
    shapes = [(name, tuple(values.shape), str(values.dtype)) for name, values in weights.items()]
    values = hashlib.sha256()
    for each in weights.values():
        values.update(each.flatten().view(torch.uint8).numpy().data)
    return {
        "network": hashlib.sha256(f"{model}\n{shapes}".encode()).hexdigest(),
        "initial weights": values.hexdigest(),
        "training images": data.training.digest,
        "validation images": data.validation.digest,
        "seed": seed,
        **recipe.to_dict(),
    }


def _write_checkpoint(
    path: Path,
    origin: Mapping[str, Any],
    epochs: list[Epoch],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    random_state: Tensor,
) -> None:
    content = io.BytesIO()
    torch.save(
        {
            "version": VERSION,
            "origin": dict(origin),
            "epochs": [asdict(epoch) for epoch in epochs],
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "random_state": random_state,
        },
        content,
    )
    write_atomically(path, content.getvalue())


def _read_same(path: Path, origin: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint, which must come from the same network, data, recipe and seed."""
    try:
        content = read_checkpoint(path)
    except InvalidFileError as error:
        raise InvalidFileError(f"{error} Remove it to start over, or give another folder.") from error
    there = content.get("origin")
    if content.get("version") != VERSION or not isinstance(there, Mapping):
        raise InvalidFileError(f"{path}: not a checkpoint of this training. Give another folder.")
    others = [
        f"{name} ({there.get(name)} there, {origin.get(name)} here)" if name in SETTINGS else name
        for name in {**origin, **there}
        if there.get(name) != origin.get(name)
    ]
    if others:
        raise InvalidFileError(
            f"{path}: comes from another training, which differs in {', '.join(others)}. Give another folder, or "
            "remove that file."
        )
    return content


def _restore(
    path: Path, content: Mapping[str, Any], model: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[Tensor, list[Epoch]]:
    """Restore model and optimiser; returns the random state and the finished epochs."""
    try:
        model.load_state_dict(content["model"])
        optimiser.load_state_dict(content["optimiser"])
        return content["random_state"], [Epoch(**each) for each in content["epochs"]]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidFileError(f"{path}: damaged ({type(error).__name__}). Remove it to start over.") from error

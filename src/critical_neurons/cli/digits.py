"""Digits: the demo, a small network trained on scikit-learn's digits, compressed, measured, saved and exported."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.core.files import check_folder, write_atomically
from critical_neurons.core.settings import Compensation
from critical_neurons.errors import InvalidSettingError, MissingExtraError
from critical_neurons.io.checkpoint import WRITTEN
from critical_neurons.io.exporters import check_format
from critical_neurons.io.onnx_runtime import open_onnx
from critical_neurons.parallel.threads import on_threads
from critical_neurons.removal.metrics import measure_accuracy, predict_by, share_of_equals

Labelled: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and labels."""

TRAINING_SHARE = 2 / 3
EPOCHS = 15
BATCH_SIZE = 32
LEARNING_RATE = 5e-3
RANDOM_DRAWS = 10
"""Random removals in the comparison, since a single draw can be lucky."""

ORIGINAL, TRAINING, TEST = "original.safetensors", "training.npz", "test.npz"
SMALLER, ONNX, COMPARISON, REPORT = "smaller", "smaller.onnx", "comparison.json", "report.html"
"""What the demo writes into its folder."""

THREADS = 1
"""Threads of torch: with several, steps this small are slower, much slower on a busy machine."""


@dataclass(frozen=True)
class Removal:
    """Accuracies on the test digits with the units of a search, and with equally many per layer at random."""

    searched: float
    random: tuple[float, ...]


@dataclass(frozen=True)
class Demo:
    """What the demo made and measured. The test digits were not used before."""

    model: nn.Module
    compression: cn.Compression
    plain: Removal
    refitted: Removal
    training: Labelled
    test: Labelled
    training_seconds: float
    seconds: float


def run_demo(
    *,
    units: float,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
) -> Demo:
    """Train, compress to a share of the units of every layer, and remove equally many at random.

    `progress` and `detail` as for `compress`.
    """
    if not 0 < units <= 1:
        raise InvalidSettingError(f"units: found {units}. Accepted: a share above 0 and up to 1.")
    started = time.perf_counter()
    training, test = split_digits(seed)
    progress(f"Training a small network on {len(training[1])} digits of 8x8 pixels")
    model = train_small_network(*training, seed)
    training_seconds = time.perf_counter() - started
    with on_threads(THREADS):
        found = cn.compress(
            *(model, *training),
            units=units,
            effort="quick",
            test=test,
            seed=seed,
            progress=progress,
            detail=detail,
        )
        progress("Removing as many units at random")
        draws = [found.plan.random(seed=seed + draw) for draw in range(RANDOM_DRAWS)]
        refitted = _remove(model, [found.plan, *draws], training[0], test, "least_squares")
        progress("Searching for units that need no refitting")
        quick = partial(cn.search, model, training[0], units=units, effort="quick", seed=seed, progress=detail)
        unfitted = quick(compensate="none")
        plain = _remove(model, [cn.plan(unfitted), *draws], training[0], test, "none")
    return Demo(model, found, plain, refitted, training, test, training_seconds, time.perf_counter() - started)


def _remove(
    model: nn.Module, plans: list[cn.Plan], inputs: Tensor, test: Labelled, compensate: Compensation
) -> Removal:
    """The first plan is that of the search."""
    smaller = (cn.prune(model, plan, inputs, compensate=compensate) for plan in plans)
    searched, *random = (measure_accuracy(each, *test) for each in smaller)
    return Removal(searched, tuple(random))


def check_demo(folder: str | os.PathLike[str]) -> None:
    """Raise unless `save_demo` can write there; an earlier demo is overwritten."""
    check_format(ONNX)
    check_folder(folder, (ORIGINAL, TRAINING, TEST, SMALLER, ONNX, COMPARISON, REPORT), overwrite=True)
    if Path(folder).exists():
        check_folder(Path(folder, SMALLER), WRITTEN, overwrite=True)


def save_demo(demo: Demo, folder: str | os.PathLike[str], *, call: str) -> dict[str, float]:
    """Write both networks, the digits, the comparison and a report; `call` is the command that makes the same again.

    Returns the accuracies on the test digits of the networks read back, from the folder and from the ONNX file.
    """
    check_demo(folder)
    directory, found = Path(folder), replace(demo.compression, call=call)
    directory.mkdir(exist_ok=True)
    write_atomically(directory / ORIGINAL, safetensors.save(dict(demo.model.state_dict())))
    for name, (inputs, labels) in ((TRAINING, demo.training), (TEST, demo.test)):
        content = io.BytesIO()
        np.savez(content, inputs=inputs.numpy(), labels=labels.numpy())
        write_atomically(directory / name, content.getvalue())
    found.save(directory / SMALLER, overwrite=True)
    cn.export(found.model, directory / ONNX, demo.training[0])
    found.comparison.save(directory / COMPARISON)
    found.report(directory / REPORT, title="Digits, recognised by less")
    inputs, labels = demo.test
    predictions = predict_by(open_onnx(directory / ONNX), inputs)
    return {
        SMALLER: measure_accuracy(cn.load(directory / SMALLER, small_network), inputs, labels),
        ONNX: share_of_equals(predictions, labels),
    }


def split_digits(seed: int) -> tuple[Labelled, Labelled]:
    """scikit-learn's 1 797 digits, scaled to [0, 1]: a part for training and the search, the rest for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo") from error
    digits: Any = load_digits()
    inputs = torch.from_numpy((digits.images / 16).astype(np.float32))[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    training, test = order[: int(TRAINING_SHARE * len(order))], order[int(TRAINING_SHARE * len(order)) :]
    return (inputs[training], labels[training]), (inputs[test], labels[test])


def small_network() -> nn.Sequential:
    """A batch norm, an average pooling and more units than ten digits of 8x8 pixels need."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_small_network(inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A trained `small_network`, in evaluation mode. The global random state stays as it is."""
    with torch.random.fork_rng(devices=[]), on_threads(THREADS):
        torch.manual_seed(seed)
        model = small_network()
        optimiser = torch.optim.Adam(model.parameters())
        steps = EPOCHS * -(-len(labels) // BATCH_SIZE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
        for _ in range(EPOCHS):
            for rows in torch.split(torch.randperm(len(labels)), BATCH_SIZE):
                optimiser.zero_grad()
                loss: Tensor = functional.cross_entropy(model(inputs[rows]), labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
    return model.eval()

"""Demo: a small network trained on scikit-learn's digits, scored, made smaller and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError, MissingExtraError
from critical_neurons.loading.batches import choose_balanced
from critical_neurons.measuring import count_parameters, measure_accuracy
from critical_neurons.solution import Step

Labelled: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and labels."""

TRAINING_SHARE = 2 / 3
EPOCHS = 15
BATCH_SIZE = 32
LEARNING_RATE = 5e-3
RANDOM_DRAWS = 5
"""Random removals averaged in the comparison: one draw alone can be lucky."""


@dataclass(frozen=True)
class Demo:
    """What the demo made and measured. Accuracies are on `test_images`, seen neither in training nor in scoring."""

    model: nn.Module
    smaller: nn.Module
    scores: cn.Scores
    plan: cn.Plan
    training_images: int
    scoring_images: int
    test_images: int
    accuracy_before: float
    accuracy_after: float
    accuracy_random: float
    parameters_before: int
    parameters_after: int
    training_seconds: float
    seconds: float


def run_demo(
    *,
    seed: int = 0,
    per_class: int = 1,
    threshold: float = 0.5,
    time_limit: float = 30.0,
    announce: Callable[[str], None] = lambda text: None,
    progress: Callable[[Step], None] | None = None,
) -> Demo:
    """Train, score, remove what scores below `threshold`, measure. `announce` is told what is about to happen."""
    if per_class < 1:
        raise InvalidSettingError(f"per_class: at least one, got {per_class}.")
    started = time.perf_counter()
    (inputs, labels), test = split_digits(seed)
    announce(f"Training a small network on {len(labels)} digits of 8x8 pixels")
    model = train_small_network(inputs, labels, seed)
    training_seconds = time.perf_counter() - started
    chosen = choose_balanced(labels.numpy(), per_class, seed)
    announce(f"Scoring its units on {len(chosen)} of them")
    scores = cn.score(model, inputs[chosen], labels[chosen], time_limit=time_limit, seed=seed, progress=progress)
    plan = cn.plan(scores, threshold=threshold)
    announce("Removing what scores low, and as much at random for comparison")
    smaller = cn.prune(model, plan, inputs[chosen])
    by_chance = [cn.prune(model, plan.random(seed=seed + draw), inputs[chosen]) for draw in range(RANDOM_DRAWS)]
    return Demo(
        model=model,
        smaller=smaller,
        scores=scores,
        plan=plan,
        training_images=len(labels),
        scoring_images=len(chosen),
        test_images=len(test[1]),
        accuracy_before=measure_accuracy(model, *test),
        accuracy_after=measure_accuracy(smaller, *test),
        accuracy_random=fmean(measure_accuracy(other, *test) for other in by_chance),
        parameters_before=count_parameters(model),
        parameters_after=count_parameters(smaller),
        training_seconds=training_seconds,
        seconds=time.perf_counter() - started,
    )


def split_digits(seed: int) -> tuple[Labelled, Labelled]:
    """scikit-learn's 1 797 digits, scaled to [0, 1]: a part for training and scoring, the rest for the test."""
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
    with torch.random.fork_rng(devices=[]), _one_thread():
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Steps this small are slower on several threads, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

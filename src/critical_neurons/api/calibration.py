"""Calibration: the inputs that a smaller model is made from, with labels if there are any, and what is held out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from critical_neurons.core.batch import check_labels, choose_evenly
from critical_neurons.core.structure import Bools, Ints
from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.removal.rows import Inputs, count_rows, find_tensors, gather_labelled, take_rows

FEWEST_HELD_OUT = 10

HELD_OUT_SHARE = 0.3
"""Share of the inputs held out to judge a drop in accuracy, if no `evaluate` is given."""


@dataclass(frozen=True)
class Data:
    """Inputs of any kind, and labels if there are any."""

    inputs: Inputs
    labels: Ints | None

    def __len__(self) -> int:
        return count_rows(self.inputs)

    def take(self, rows: Ints) -> Data:
        assert self.labels is not None
        return Data(take_rows(self.inputs, torch.from_numpy(rows)), self.labels[rows])

    def hold_out(self, seed: int) -> tuple[Data, Data]:
        """The remaining and the held-out data, the latter evenly from all classes."""
        assert self.labels is not None
        aside = choose_evenly(self.labels, math.ceil(HELD_OUT_SHARE * len(self)), seed)
        if len(aside) < FEWEST_HELD_OUT:
            raise InvalidInputError(
                f"max_drop: found {len(self)} inputs, of which {len(aside)} would be held out to judge by. Give "
                f"{math.ceil(FEWEST_HELD_OUT / HELD_OUT_SHARE)} or more, or evaluate=, a function of a model."
            )
        return self.take(np.setdiff1d(np.arange(len(self)), aside)), self.take(aside)

    def measure_accuracy(self, model: nn.Module) -> float:
        assert self.labels is not None
        return measure_accuracy(model, self.inputs, torch.from_numpy(self.labels))


def gather_data(inputs: Any, labels: Any) -> Data:
    """Labels are given, or come with the batches; the latter are used only if they are classes."""
    rows, beside = gather_labelled(inputs)
    if labels is None and (beside is None or beside.ndim != 1 or beside.is_floating_point()):
        return Data(rows, None)
    given = np.asarray(beside if labels is None else torch.as_tensor(labels).cpu())
    return Data(rows, check_labels(given, count_rows(rows)))


def gather_test(test: Any, data: Data) -> Data:
    """A pair of inputs and labels, or an iterable of such pairs."""
    pair = isinstance(test, tuple | list) and len(test) == 2
    tested = gather_data(*test) if pair and not isinstance(test[0], list) else gather_data(test, None)
    found, wanted = ([tuple(values.shape[1:]) for values in find_tensors(each.inputs)] for each in (tested, data))
    if found != wanted:
        shapes = [", ".join(map(str, each)) for each in (found, wanted)]
        raise InvalidInputError(
            f"test: found inputs of shape {shapes[0]}. Accepted: a pair of inputs of shape {shapes[1]} and labels."
        )
    return tested


def choose_one_per_class(labels: Ints, correct: Bools, seed: int) -> Ints:
    """Ascending indices of one random data point per class, correctly classified if possible."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    ranked = shuffled[np.argsort(~correct[shuffled], kind="stable")]
    _, first = np.unique(labels[ranked], return_index=True)
    return np.sort(ranked[first])

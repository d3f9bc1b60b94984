"""Losses: convex functions of a network's outputs, one value per data point, never negative.

Each has values, gradients and a root R of its Hessian R'R, as functions of the outputs (batch, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from critical_neurons.core.batch import Batch, check_classes
from critical_neurons.core.formulation import LossName
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import InvalidInputError


def _log_sum_exp(outputs: Floats) -> Floats:
    """log sum_c exp(h_c). The steps of scipy's logsumexp, whose checks take ten times as long on small arrays."""
    largest = outputs.max(axis=1, keepdims=True)
    is_largest = outputs == largest  # apart from the others, for precision
    count = is_largest.sum(axis=1, dtype=np.float64)
    others = np.exp(np.where(is_largest, -np.inf, outputs) - largest).sum(axis=1)
    return np.asarray(np.log1p(others / count) + np.log(count) + largest[:, 0])


def _softmax(outputs: Floats) -> Floats:
    exponentials = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class SoftmaxLoss:
    """log sum_c exp(h_c) - h_label; labels (batch,)."""

    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)

    def values(self, outputs: Floats) -> Floats:
        result: Floats = _log_sum_exp(outputs) - outputs[np.arange(len(outputs)), self.labels]
        return np.maximum(result, 0.0)

    def gradients(self, outputs: Floats) -> Floats:
        shares = _softmax(outputs)
        shares[np.arange(len(outputs)), self.labels] -= 1.0
        return shares

    def apply_root(self, outputs: Floats, forms: Floats) -> Floats:
        """R times forms (batch, outputs, columns): the Hessian is a covariance."""
        shares = _softmax(outputs)
        means = np.matmul(shares[:, None, :], forms)
        return np.asarray(np.sqrt(shares)[:, :, None] * (forms - means))

    def choose(self, points: NDArray[np.int64]) -> SoftmaxLoss:
        return SoftmaxLoss(self.labels[points])


@dataclass(frozen=True, eq=False)
class LogisticLoss:
    """log(1 + exp(h)) - label h, of one output: the softmax loss of the outputs 0 and h; labels (batch,), 0 or 1."""

    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)

    def values(self, outputs: Floats) -> Floats:
        sign = 1.0 - 2.0 * self.labels
        return np.logaddexp(0.0, sign * outputs[:, 0])

    def gradients(self, outputs: Floats) -> Floats:
        return np.asarray(expit(outputs) - self.labels[:, None])

    def apply_root(self, outputs: Floats, forms: Floats) -> Floats:
        chance = expit(outputs)
        return np.asarray(np.sqrt(chance * (1.0 - chance))[:, :, None] * forms)

    def choose(self, points: NDArray[np.int64]) -> LogisticLoss:
        return LogisticLoss(self.labels[points])


@dataclass(frozen=True, eq=False)
class SquaredLoss:
    """The mean of (h_c - target_c)² over the outputs; targets (batch, outputs)."""

    targets: Floats

    def __len__(self) -> int:
        return len(self.targets)

    def values(self, outputs: Floats) -> Floats:
        return np.asarray(((outputs - self.targets) ** 2).mean(axis=1))

    def gradients(self, outputs: Floats) -> Floats:
        return np.asarray(2.0 / self.targets.shape[1] * (outputs - self.targets))

    def apply_root(self, outputs: Floats, forms: Floats) -> Floats:
        return np.asarray(np.sqrt(2.0 / self.targets.shape[1]) * forms)

    def choose(self, points: NDArray[np.int64]) -> SquaredLoss:
        return SquaredLoss(self.targets[points])


Loss: TypeAlias = SoftmaxLoss | LogisticLoss | SquaredLoss


def as_loss(labels: Ints | Loss) -> Loss:
    """Labels mean their softmax loss."""
    return SoftmaxLoss(labels) if isinstance(labels, np.ndarray) else labels


def check_outputs(loss: Loss, outputs: int) -> None:
    """Raise unless a network with this many outputs can have this loss."""
    match loss:
        case SoftmaxLoss():
            if outputs < 2:
                raise InvalidInputError("labels: the network has one output. The softmax loss takes two or more.")
            check_classes(loss.labels, outputs)
        case LogisticLoss():
            if outputs != 1 or not np.isin(loss.labels, (0, 1)).all():
                raise InvalidInputError(
                    f"labels: the logistic loss takes labels of 0 and 1 and one output; the network has {outputs}."
                )
        case SquaredLoss():
            if loss.targets.ndim != 2 or loss.targets.shape[1] != outputs:
                raise InvalidInputError(
                    f"labels: found targets of shape {loss.targets.shape}. Accepted: (batch, {outputs}), one number "
                    "for each of the network's outputs; or integers, the index of the right class."
                )


def make_loss(name: LossName, batch: Batch, outputs: Floats) -> Loss:
    """The loss by name, or the one that suits the labels and the model's outputs (batch, outputs).

    Labels are classes (0 or 1 for a single output), targets are real numbers. Without either the model's own
    predictions are used.
    """
    labels = batch.targets if batch.labels is None else batch.labels
    count, single = len(outputs), outputs.shape[1] == 1
    if name == "auto" and labels is None and single:
        raise InvalidInputError(
            "labels: the model has one output, and none are given. Give labels, 0 and 1 or targets; or take the "
            "model's own, with loss='logistic' or loss='squared'."
        )
    if name == "auto":
        name = _choose_name(batch.targets, single)
    if name == "squared":
        targets = outputs if labels is None else np.asarray(labels, dtype=np.float64)
        loss: Loss = SquaredLoss(targets.reshape(count, -1))
    else:
        own = (outputs[:, 0] > 0).astype(np.int64) if single else outputs.argmax(axis=1)
        classes = own if labels is None else _as_classes(labels)
        loss = LogisticLoss(classes) if name == "logistic" else SoftmaxLoss(classes)
    check_outputs(loss, outputs.shape[1])
    return loss


def _choose_name(targets: Floats | None, single: bool) -> LossName:
    ones = targets is not None and np.isin(targets, (0.0, 1.0)).all()
    if targets is None or (single and ones):
        return "logistic" if single else "softmax"
    if ones and targets.ndim == 2 and (targets.sum(axis=1) == 1).all():
        raise InvalidInputError(
            f"labels: found shape {targets.shape} with a single 1 in every row. Give the classes, labels.argmax(1), "
            "or say that the outputs are to be these numbers, loss='squared'."
        )
    return "squared"


def _as_classes(labels: Ints | Floats) -> Ints:
    if labels.size != len(labels) or (labels != np.floor(labels)).any():
        raise InvalidInputError(
            f"labels: found {labels.dtype} of shape {labels.shape}. Accepted: whole numbers (batch,), the index of "
            "the right class; for numbers to be met, loss='squared'."
        )
    return labels.reshape(-1).astype(np.int64)

"""Losses: values as torch computes them, gradients and curvatures by differences, and which loss goes with what."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import logsumexp

from critical_neurons.core.batch import gather_batch
from critical_neurons.core.loss import LogisticLoss, SoftmaxLoss, SquaredLoss, make_loss
from critical_neurons.errors import InvalidInputError

BATCH = 5
STEP = 1e-5
CLOSE = 1e-8
"""Central differences are right to the square of the step, times the third derivative."""

generator = np.random.default_rng(0)
LABELS = generator.integers(2, size=BATCH)
CASES = {
    "softmax": (
        SoftmaxLoss(LABELS),
        3,
        lambda outputs: F.cross_entropy(outputs, torch.from_numpy(LABELS), reduction="none"),
    ),
    "logistic": (
        LogisticLoss(LABELS),
        1,
        lambda outputs: F.binary_cross_entropy_with_logits(
            outputs[:, 0], torch.from_numpy(LABELS).double(), reduction="none"
        ),
    ),
    "squared": (
        SquaredLoss(TARGETS := generator.normal(size=(BATCH, 2))),
        2,
        lambda outputs: F.mse_loss(outputs, torch.from_numpy(TARGETS), reduction="none").mean(1),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    loss, width, reference = CASES[request.param]
    return loss, 2.0 * np.random.default_rng(1).normal(size=(BATCH, width)), reference


def differentiate(function, outputs):
    """(batch, ..., outputs): by central differences, output by output."""
    parts = []
    for column in range(outputs.shape[1]):
        step = np.zeros_like(outputs)
        step[:, column] = STEP
        parts.append((function(outputs + step) - function(outputs - step)) / (2 * STEP))
    return np.stack(parts, axis=-1)


def test_values_are_those_of_torch(case):
    loss, outputs, reference = case
    assert np.allclose(loss.values(outputs), reference(torch.from_numpy(outputs)).numpy(), rtol=0, atol=1e-12)
    assert (loss.values(outputs) >= 0).all()


def test_gradients_are_differences_of_values(case):
    loss, outputs, _ = case
    assert np.allclose(loss.gradients(outputs), differentiate(loss.values, outputs), rtol=0, atol=CLOSE)


def test_roots_are_those_of_the_curvature(case):
    loss, outputs, _ = case
    root = loss.apply_root(outputs, np.tile(np.eye(outputs.shape[1]), (BATCH, 1, 1)))
    curvature = np.einsum("dij,dik->djk", root, root)
    assert np.allclose(curvature, differentiate(loss.gradients, outputs), rtol=0, atol=CLOSE)


def test_chosen_data_points_keep_their_loss(case):
    loss, outputs, _ = case
    chosen = np.array([3, 0, 3])
    assert np.array_equal(loss.choose(chosen).values(outputs[chosen]), loss.values(outputs)[chosen])
    assert len(loss.choose(chosen)) == len(chosen)


def test_the_logistic_loss_is_the_softmax_of_zero_and_the_output():
    outputs = np.array([[-800.0], [-1.0], [0.0], [2.0], [800.0]])
    pairs = np.concatenate([np.zeros_like(outputs), outputs], axis=1)
    assert np.allclose(LogisticLoss(LABELS).values(outputs), SoftmaxLoss(LABELS).values(pairs), rtol=1e-12, atol=0)


def choose(labels, width, name="auto"):
    batch = gather_batch(np.zeros((3, 2)), labels, real=True)
    return make_loss(name, batch, np.arange(3.0 * width).reshape(3, width))


@pytest.mark.parametrize(
    ("labels", "width", "name", "kind"),
    [
        (np.array([0, 1, 1]), 2, "auto", SoftmaxLoss),
        (np.array([0, 1, 1]), 1, "auto", LogisticLoss),
        (np.array([0.5, 1.0, -1.0]), 1, "auto", SquaredLoss),
        (torch.tensor([[0.5], [1.0], [-1.0]]), 1, "auto", SquaredLoss),
        (np.ones((3, 2)), 2, "auto", SquaredLoss),
        (np.array([0.0, 1.0, 1.0]), 1, "auto", LogisticLoss),
        (np.array([0.0, 1.0, 1.0]), 1, "squared", SquaredLoss),
        (np.eye(3), 3, "squared", SquaredLoss),
        (np.array([[0.0], [1.0], [1.0]]), 1, "logistic", LogisticLoss),
        (np.array([4, 5, 6]), 1, "squared", SquaredLoss),
        (None, 3, "auto", SoftmaxLoss),
        (None, 1, "logistic", LogisticLoss),
        (None, 2, "squared", SquaredLoss),
    ],
)
def test_labels_and_outputs_choose_the_loss(labels, width, name, kind):
    assert type(choose(labels, width, name)) is kind


def test_without_labels_the_model_s_own_answers_are_taken():
    assert choose(None, 3).labels.tolist() == [2, 2, 2]
    assert choose(None, 1, "logistic").labels.tolist() == [0, 1, 1]
    assert choose(None, 2, "squared").values(np.arange(6.0).reshape(3, 2)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("labels", "width", "name", "message"),
    [
        (None, 1, "auto", "the model has one output, and none are given"),
        (np.array([0, 1, 2]), 1, "auto", "labels of 0 and 1 and one output"),
        (np.array([0, 1, 2]), 2, "auto", "Accepted: 0 to 1"),
        (np.array([0, 1, 1]), 2, "logistic", "the network has 2"),
        (np.array([0, 1, 1]), 1, "softmax", "takes two or more"),
        (np.array([0.5, 1.0, 1.0]), 2, "auto", r"targets of shape \(3, 1\). Accepted: \(batch, 2\)"),
        (np.array([0.5, 1.0, 1.0]), 2, "softmax", "Accepted: whole numbers"),
        (np.array([0.5, np.nan, 1.0]), 1, "auto", "NaN or infinite"),
        (np.eye(3), 3, "auto", "a single 1 in every row"),
        (np.ones((2, 2)), 2, "auto", r"found shape \(2, 2\) for 3 data points"),
    ],
)
def test_what_does_not_go_together_is_refused(labels, width, name, message):
    with pytest.raises(InvalidInputError, match=message):
        choose(labels, width, name)


def test_the_softmax_loss_of_large_and_of_equal_outputs():
    outputs = np.array([[1e3, 1e3, -1e3], [-1e3, 1e3, 0.0], [0.0, 1e-17, -40.0], [2.0, 2.0, 2.0]])
    labels = np.array([0, 1, 1, 2])
    expected = logsumexp(outputs, axis=1) - outputs[np.arange(4), labels]
    loss = SoftmaxLoss(labels)
    assert loss.values(outputs) == pytest.approx(np.maximum(expected, 0.0), rel=1e-15, abs=1e-15)
    assert loss.gradients(outputs).sum(axis=1) == pytest.approx(np.zeros(4), abs=1e-15)

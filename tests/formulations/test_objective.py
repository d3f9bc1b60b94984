"""The objective: what the scores of each layer weigh, by hand and as rows of the program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.formulations.objective import BudgetRows, Objective, encode_sparsity
from critical_neurons.io.builtin_models import lenet5
from critical_neurons.readers import read_network

ROUNDING = 1e-12
OBJECTIVES = ["balanced", "authors", "paper"]

CONVOLUTIONAL = nn.Sequential(
    *(nn.Conv2d(1, 2, (2, 3)), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten()),
    *(nn.Linear(18, 4), nn.ReLU(), nn.Linear(4, 2)),
)
"""Layers of 2, 3 and 4 units, with kernels of 6, 4 and 1 positions: 12, 12 and 4 neurons as the authors count."""

SCORES = np.array([1.0, 0.5, 0.25, 0.75, 0.2, 0.0, 0.5, 0.5, 1.0])
"""Sums of 1.5, 1.2 and 2."""

LOSSES = np.array([0.2, 0.6])

SPARSITY = {
    # the layer in brackets has the smallest term and drops out
    ("balanced", 0.0): 1.5 / 2 + 2.0 / 4,  # [1.2 / 3]
    ("balanced", 1.0): -0.5 / 2 - 2.0 / 4,  # [-1.8 / 3]
    ("balanced", 2.0): -2.5 / 2 - 6.0 / 4,  # [-4.8 / 3]
    ("authors", 0.0): 1.5 / 12 + 2.0 / 4,  # [1.2 / 12]
    ("authors", 1.0): -0.5 / 12 - 1.8 / 12,  # [-2.0 / 4]
    ("authors", 2.0): -2.5 / 12 - 4.8 / 12,  # [-6.0 / 4]
    ("paper", 0.0): (1.5 + 2.0) / 9,  # [1.2]
    ("paper", 1.0): (-0.5 - 1.8) / 9,  # [-2.0]
    ("paper", 2.0): (-2.5 - 4.8) / 9,  # [-6.0]
}

SOFTMAX = {"balanced": 0.4, "authors": 0.4, "paper": 0.8}


def read(model, *shape):
    return read_network(model, torch.zeros(2, *shape))


def fully_connected(*sizes):
    layers = []
    for size in sizes:
        layers += [nn.LazyLinear(size), nn.ReLU()]
    model = nn.Sequential(*layers, nn.LazyLinear(2))
    model(torch.zeros(2, 3))
    return read(model, 3)


def sparsity(objective, network, scores):
    """The smallest t that the rows allow at these scores."""
    count = network.unit_count
    rows = encode_sparsity(objective, network, count, count + 1)
    return (rows.lower - rows.matrix @ np.append(scores, 0.0)).max()


@pytest.mark.parametrize(("name", "rescale"), SPARSITY)
def test_by_hand(name, rescale):
    network = read(CONVOLUTIONAL, 1, 4, 6)
    objective = Objective(name, loss_weight=5.0, rescale=rescale)
    assert sparsity(objective, network, SCORES) == pytest.approx(SPARSITY[name, rescale], abs=ROUNDING)
    expected = SPARSITY[name, rescale] + 5.0 * SOFTMAX[name]
    assert objective.compute(network, SCORES, LOSSES) == pytest.approx(expected, abs=ROUNDING)


def test_neurons_of_lenet5_as_the_authors_count_them():
    """Its third convolution sees a single position; in the authors' code it is a linear layer."""
    weights = Objective("authors").layer_weights(read(lenet5(), 3, 32, 32))
    assert weights == pytest.approx([1 / 150, 1 / 400, 1 / 120, 1 / 84], abs=ROUNDING)


def test_kernels_of_one_dimension():
    model = nn.Sequential(nn.Conv1d(2, 3, 5), nn.ReLU(), nn.Conv1d(3, 2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2))
    assert read(model, 2, 8).kernels == (5, 1)


def test_of_fully_connected_networks_the_authors_objective_is_the_balanced_one():
    network = fully_connected(3, 5, 2)
    balanced, authors = (Objective(name).layer_weights(network) for name in ("balanced", "authors"))
    assert np.array_equal(balanced, authors)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_single_layer_stays_in(name):
    scores = np.array([0.5, 1.0])
    assert sparsity(Objective(name), fully_connected(2), scores) == pytest.approx((1.5 - 4.0) / 2, abs=ROUNDING)


def test_rescale_only_shifts_the_balanced_sparsity():
    network, generator = read(CONVOLUTIONAL, 1, 4, 6), np.random.default_rng(0)
    plain, rescaled = Objective(rescale=0.0), Objective(rescale=2.0)
    drawn = generator.uniform(size=(5, network.unit_count))

    def shifts(name):
        return [
            sparsity(replace(plain, name=name), network, scores)
            - sparsity(replace(rescaled, name=name), network, scores)
            for scores in drawn
        ]

    assert shifts("balanced") == pytest.approx([4.0] * 5, abs=ROUNDING)
    for name in ("authors", "paper"):
        assert np.ptp(shifts(name)) > 0.1


@pytest.mark.parametrize("sizes", [(6,), (3, 5), (4, 2, 6)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_by_definition_it_is_what_the_rows_allow(name, sizes):
    generator = np.random.default_rng(0)
    network = fully_connected(*sizes)
    scores, losses = generator.uniform(size=sum(sizes)), generator.uniform(size=4)
    objective = Objective(name, loss_weight=3.0, rescale=1.5)
    expected = sparsity(objective, network, scores) + objective.softmax_weight(4) * losses.sum()
    assert objective.compute(network, scores, losses) == pytest.approx(expected, abs=ROUNDING)


def test_under_a_budget_only_the_losses_count():
    budget = BudgetRows(np.ones((1, 2)), np.ones(1))
    assert budget.compute(fully_connected(2), np.ones(2), np.array([1.0, 2.0])) == 1.5

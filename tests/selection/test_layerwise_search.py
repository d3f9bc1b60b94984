"""A choice of units revised by what reaches their consumers once the others have gone: least squares solved anew."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.selection import statistics, trial
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.layerwise_search import Choice
from tests.zoo import build_model, draw_inputs

STRUCTURES = ["mlp", "groups", "resnet", "densenet", "mobilenet", "convolution in one dimension"]
INPUTS = 120
NO_RIDGE = 1e-9
SAME = 1e-4


@pytest.fixture
def no_ridge(monkeypatch):
    monkeypatch.setattr(trial, "RIDGE", NO_RIDGE)
    monkeypatch.setattr(statistics, "RIDGE", NO_RIDGE)


def make_choice(model, inputs):
    structure = cn.inspect(model, inputs[:2])
    return Choice(model, structure, inputs, Distance(divergence=True)), structure.groups


def build_chain(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    return model.double().eval(), torch.randn(INPUTS, 5, dtype=torch.float64)


def fit(rows, wanted):
    """What least squares with a constant leaves, and what it gives."""
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], dim=1)
    found = rows @ torch.linalg.lstsq(rows, wanted).solution
    return float((wanted - found).square().sum()) / len(rows), found


@torch.no_grad()
def solve_anew(model, inputs, first, second):
    """The error of the last layer when these units stay, beyond what those of the first cost already."""
    _, reached = fit(model[:2](inputs)[:, first], model[:3](inputs))
    hidden, wanted = reached.relu(), model(inputs)
    return fit(hidden[:, second], wanted)[0] - fit(hidden, wanted)[0]


def keep_last(orders, counts):
    return [sorted(order[len(order) - count :].tolist()) for order, count in zip(orders, counts, strict=True)]


def test_errors_are_those_of_what_reaches_the_consumer_and_the_choice_is_the_best(no_ridge):
    model, inputs = build_chain(seed=3)
    choice, _ = make_choice(model, inputs)
    counts = [2, 3]
    before = choice.choose(counts, temperature=None)
    revised = choice.revise(counts, before.orders, temperature=None)
    told = choice.revise(counts, revised.orders, temperature=None, settled=True)

    first, second = keep_last(revised.orders, counts)
    errors = {kept: solve_anew(model, inputs, first, list(kept)) for kept in combinations(range(6), 3)}
    assert told.errors[1] == pytest.approx(errors[tuple(second)], rel=SAME)
    assert errors[tuple(second)] == min(errors.values())
    assert errors[tuple(second)] < errors[tuple(keep_last(before.orders, counts)[1])] / 2  # as it was chosen at first
    assert 0 < told.bounds[1] <= min(errors.values())
    assert all(np.array_equal(*pair) for pair in zip(told.orders, revised.orders, strict=True))


def test_where_nothing_else_goes_a_choice_stays_as_it_is():
    model, inputs = build_chain()
    choice, _ = make_choice(model, inputs)
    for counts in ([3, 6], [8, 3]):
        chosen = choice.choose(counts)
        revised = choice.revise(counts, chosen.orders)
        assert keep_last(revised.orders, counts) == keep_last(chosen.orders, counts)


@pytest.mark.parametrize("name", STRUCTURES)
def test_counts_blocks_and_the_model_stay_as_they_are(name):
    model, inputs = build_model(name), draw_inputs(name, INPUTS)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    choice, groups = make_choice(model, inputs)
    counts = [max(len(group.units) // (2 * group.blocks), 1) * group.blocks for group in groups]
    chosen = choice.choose(counts, bounded=False)
    revised = choice.revise(counts, chosen.orders)
    told = choice.revise(counts, revised.orders, settled=True)
    for group, count, order, kept in zip(
        groups, counts, revised.orders, keep_last(revised.orders, counts), strict=True
    ):
        assert sorted(order.tolist()) == list(range(len(group.units)))
        assert len(set(np.bincount(np.array(kept) * group.blocks // len(group.units), minlength=group.blocks))) == 1
        assert len(kept) == count
    assert all(0 <= bound <= error for error, bound in zip(told.errors, told.bounds, strict=True))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

"""Choices of units revised by what reaches their consumers once the others have gone: least squares solved anew."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.parallel import SERIAL
from critical_neurons.removal.refit import ridge
from critical_neurons.removal.refit.behind import refit_behind
from critical_neurons.removal.remove import remove_units
from critical_neurons.selection import consumers, layerwise_search
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons.selection.trials import Outputs
from tests.zoo import build_model, draw_inputs

STRUCTURES = ["mlp", "groups", "resnet", "densenet", "mobilenet", "convolution in one dimension"]
INPUTS = 120
NO_RIDGE = 1e-9
SAME = 1e-4


@pytest.fixture
def no_ridge(monkeypatch):
    monkeypatch.setattr(ridge, "RIDGE", NO_RIDGE)
    monkeypatch.setattr(ridge, "RIDGES", (NO_RIDGE,))


def keep_last(order, count):
    stays = np.zeros(len(order), dtype=bool)
    stays[order[len(order) - count :]] = True
    return stays


def make_search(model, inputs):
    structure = cn.inspect(model, inputs[:2])
    return LayerwiseSearch(model, structure, inputs, Distance(divergence=True)), structure


def build_chain(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    return model.double().eval(), torch.randn(INPUTS, 5, dtype=torch.float64)


def draw_stays(structure, seed=0):
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    for group in structure.groups:
        count = max(len(group) // (2 * group.blocks), 1) * group.blocks
        stays[group.units] = group.choose(np.random.default_rng(seed).random(len(group)), count)
    return stays


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


def test_errors_are_those_of_what_reaches_the_consumer_and_bounds_hold(no_ridge, monkeypatch):
    model, inputs = build_chain(seed=3)
    search, structure = make_search(model, inputs)
    monkeypatch.setattr(
        search, "_find_roots", lambda view: {"2": [torch.eye(6).double()], "4": [torch.eye(4).double()]}
    )
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    stays[structure.groups[0].units] = keep_last(search.order(search.whole)[0].order.numpy(), 2)
    view = search.carry_out(stays)
    first = np.flatnonzero(stays[structure.groups[0].units])
    errors = {kept: solve_anew(model, inputs, first, list(kept)) for kept in combinations(range(6), 3)}
    for kept, expected in errors.items():
        chosen = stays.copy()
        chosen[structure.groups[1].units] = np.isin(np.arange(6), kept)
        described = search.describe(view, chosen)[1]
        assert described.error == pytest.approx(expected, rel=SAME)
        assert 0 < described.bound <= min(errors.values())
    found = search.order(view)[1]
    assert float(found.errors[2]) == pytest.approx(errors[tuple(sorted(found.order[3:].tolist()))], rel=SAME)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_draft_gives_what_the_removed_and_refitted_network_gives(name, monkeypatch):
    """With one ridge for all: it is chosen by all outputs, of which the smaller network has fewer."""
    monkeypatch.setattr(ridge, "RIDGES", (1e-2,))
    model, inputs = build_model(name), draw_inputs(name, INPUTS)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    search, structure = make_search(model, inputs)
    stays = draw_stays(structure)
    view, smaller = search.carry_out(stays), remove_units(model, structure, stays)
    fitted = refit_behind(model, smaller, structure, stays, inputs, "least_squares")
    loss, miss = search._compare(fitted, search._shuffled, Outputs())
    assert view.loss == pytest.approx(loss, rel=SAME, abs=1e-6)
    assert view.miss == pytest.approx(miss, rel=SAME, abs=1e-6)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", STRUCTURES)
def test_errors_of_orders_are_those_of_choices(name):
    model, inputs = build_model(name), draw_inputs(name, INPUTS)
    search, structure = make_search(model, inputs)
    stays = draw_stays(structure)
    for view in (search.whole, search.carry_out(stays)):
        for place, (group, found) in enumerate(zip(structure.groups, search.order(view), strict=True)):
            count = max(len(group) // (2 * group.blocks), 1) * group.blocks
            chosen = view.stays.copy()
            chosen[group.units] = kept = keep_last(found.order.numpy(), count)
            assert len(set(kept.reshape(group.blocks, -1).sum(1).tolist())) == 1
            described = search.describe(view, chosen)[place]
            gone = len(group) - count
            assert described.error == pytest.approx(
                float(found.errors[gone - 1]) if gone else 0.0, rel=SAME, abs=1e-12
            )
            assert 0 <= described.bound <= described.error * (1 + SAME)


def test_wide_modules_are_judged_in_parts(monkeypatch):
    """Units of two parts that have nothing in common: as if they were judged together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[0].weight[:4, 3:], model[0].weight[4:, :3] = 0.0, 0.0
    inputs = torch.randn(20_000, 6)
    together = make_search(model, inputs)[0]
    monkeypatch.setattr(consumers, "MOST_COLUMNS", 4)
    apart = make_search(model, inputs)[0]
    one, other = (each.order(each.whole)[0] for each in (together, apart))
    assert [len(each._parts["2"]) for each in (together, apart)] == [1, 2]
    assert torch.allclose(one.errors, other.errors, rtol=0.1)


@pytest.mark.parametrize("carry_out", ["carry_out", "judge"])
@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_the_loss_of_a_draft_is_that_of_running_it(name, carry_out):
    model, inputs = build_model(name, 0), draw_inputs(name, 32)
    search, structure = make_search(model, inputs)
    draft = getattr(search, carry_out)(draw_stays(structure))
    with torch.no_grad():
        lost = Distance(divergence=True).measure([draft.model(inputs)], [model(inputs)])
    assert draft.loss == pytest.approx(float(lost), rel=SAME)


def test_outputs_that_are_missing_are_computed():
    model, inputs = build_chain()
    outputs, rows = Outputs(), torch.randperm(INPUTS)
    with torch.no_grad():
        outputs.add(rows[:50], model(inputs[rows[:50]]))
        outputs.complete(model, inputs, rows[:80], 7, SERIAL)
        assert torch.equal(outputs.rows.sort().values, rows[:80].sort().values)
        assert torch.allclose(outputs.join()[0], model(inputs[outputs.rows]))


def test_trials_in_portions_have_the_same_prices(monkeypatch):
    inputs = draw_inputs("resnet", INPUTS)
    search, _ = make_search(build_model("resnet", 0), inputs)
    found = search.order(search.whole)
    together = search.price(found, 3)
    monkeypatch.setattr(layerwise_search, "MOST_TRIED_BYTES", 1)
    told = []
    apart = search.price(found, 3, lambda done, total: told.append((done, total)))
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.errors, other.errors)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] >= 2 * len(found)

"""Law: a search keeps to its budget on every network of the zoo, whatever is refitted afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.core.costs import count_cost, count_new_biases
from critical_neurons.core.plan import group_units
from critical_neurons.selection import gate_descent
from tests.laws.test_masked_is_removed import SCORED
from tests.zoo import build_model, draw_inputs

COMPENSATIONS = ["none", "least_squares"]
FEW_STEPS = 20
ROUNDING = 1e-9


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(gate_descent, "STEPS", FEW_STEPS)


def draw(name, count=40):
    return build_model(name), draw_inputs(name, count, seed=3)


@pytest.mark.parametrize("compensate", COMPENSATIONS)
@pytest.mark.parametrize("name", SCORED)
def test_as_many_units_stay_as_a_plan_would_keep(name, compensate):
    model, inputs = draw(name)
    scores = cn.search(model, inputs, units=0.6, compensate=compensate)
    plan, any_scores = cn.plan(scores), cn.score(model, inputs[:2], formulation="linearised")
    expected = cn.plan(any_scores, units=0.6)
    assert {layer: len(kept) for layer, kept in plan.kept.items()} == {
        layer: len(kept) for layer, kept in expected.kept.items()
    }
    assert np.array_equal(scores.per_unit >= 0.5, plan.stays[:-1])
    smaller = cn.prune(model, plan, inputs, compensate=compensate)
    with torch.no_grad():
        assert torch.isfinite(smaller(inputs)).all()


@pytest.mark.parametrize("compensate", COMPENSATIONS)
@pytest.mark.parametrize("measure", ["params", "macs"])
@pytest.mark.parametrize("name", SCORED)
def test_budgets_over_all_layers_are_met(name, measure, compensate):
    model, inputs = draw(name)
    share = find_share(cn.inspect(model, inputs[:2]), measure)
    scores = cn.search(model, inputs, **{measure: share}, compensate=compensate)
    kept = cn.plan(scores).stays.astype(float)
    whole, left = (count_cost(scores.wirings, each, measure) for each in (np.ones_like(kept), kept))
    if compensate != "none" and measure == "params":
        left += count_new_biases(scores.wirings, kept, everywhere=True)
    assert left <= share * whole + ROUNDING
    assert np.array_equal(scores.per_unit >= 0.5, kept[:-1] == 1)


@pytest.mark.parametrize("compensate", COMPENSATIONS)
@pytest.mark.parametrize("name", SCORED)
def test_a_share_of_all_units_is_met(name, compensate):
    model, inputs = draw(name)
    scores = cn.search(model, inputs, units=0.6, scope="global", compensate=compensate)
    assert np.array_equal(scores.per_unit >= 0.5, cn.plan(scores).stays[:-1])


def find_share(network, measure):
    """Half of what can go, counted as with a bias for every layer."""
    least, whole = np.ones(network.unit_count + 1), np.ones(network.unit_count + 1)
    for units, blocks in group_units(network.layers, network.groups):
        least[units] = blocks / len(units)
    floor = count_cost(network.wirings, least, measure) + count_new_biases(network.wirings, least, everywhere=True)
    return min(1.0, (1 + floor / count_cost(network.wirings, whole, measure)) / 2)


@pytest.mark.parametrize("compensate", COMPENSATIONS)
@pytest.mark.parametrize("name", ["mlp", "resnet", "grouped convolutions"])
def test_a_search_is_deterministic_and_leaves_the_model_alone(name, compensate):
    model, inputs = draw(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, second = (cn.search(model, inputs, units=0.6, compensate=compensate, seed=4) for _ in range(2))
    assert np.array_equal(first.per_unit, second.per_unit)
    assert first.objective == second.objective
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

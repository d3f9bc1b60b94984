"""Law: a search keeps to its budget on every network of the zoo, whatever is refitted afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.core.costs import count_cost, count_new_biases
from tests.drawing import count_by_group, make_scores
from tests.zoo import ZOO, build_model, draw_inputs, first_or_slow

COMPENSATIONS = ["none", "least_squares"]
ROUNDING = 1e-9


COUNTED = (
    *("mlp", "constants of every channel", "resnet", "mobilenet", "concatenation on a stream"),
    *("grouped convolutions", "batch norm behind the relu, then padding", "decoder", "tokens", "vgg"),
)
"""Units that are counted differently: shared, in blocks, at several positions, or leaving new biases behind."""

pytestmark = pytest.mark.usefixtures("short_descent")  # no budget depends on how good the choice is


def draw(name, count=40):
    return build_model(name), draw_inputs(name, count, seed=3)


@pytest.mark.networks(*COUNTED)
@pytest.mark.parametrize("compensate", first_or_slow(*COMPENSATIONS))
@pytest.mark.parametrize("name", ZOO)
def test_as_many_units_stay_as_a_plan_would_keep(name, compensate):
    model, inputs = draw(name)
    scores = cn.search(model, inputs, units=0.6, compensate=compensate, effort="quick")
    plan, structure = cn.plan(scores), cn.inspect(model, inputs[:2])
    expected = cn.plan(make_scores(structure, np.ones(structure.unit_count)), units=0.6)
    assert count_by_group(plan) == count_by_group(expected)
    assert np.array_equal(scores.per_unit >= 0.5, plan.stays[:-1])
    smaller = cn.prune(model, plan, inputs, compensate=compensate)
    with torch.no_grad():
        assert torch.isfinite(smaller(inputs)).all()


@pytest.mark.networks(*COUNTED)
@pytest.mark.parametrize(
    ("measure", "compensate"),
    [
        *(("params", "least_squares"), ("macs", "none")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("params", "none"), ("macs", "least_squares"))),
    ],
)
@pytest.mark.parametrize("name", ZOO)
def test_budgets_over_all_layers_are_met(name, measure, compensate):
    model, inputs = draw(name)
    share = find_share(cn.inspect(model, inputs[:2]), measure)
    scores = cn.search(model, inputs, **{measure: share}, compensate=compensate, effort="quick")
    kept = cn.plan(scores).stays.astype(float)
    whole, left = (count_cost(scores.structure, each, measure) for each in (np.ones_like(kept), kept))
    if compensate != "none" and measure == "params":
        left += count_new_biases(scores.structure.wirings, kept, everywhere=True)
    assert left <= share * whole + ROUNDING
    assert np.array_equal(scores.per_unit >= 0.5, kept[:-1] == 1)


@pytest.mark.networks(*COUNTED)
@pytest.mark.parametrize("compensate", first_or_slow("least_squares", "none"))
@pytest.mark.parametrize("name", ZOO)
def test_a_share_of_all_units_is_met(name, compensate):
    model, inputs = draw(name)
    scores = cn.search(model, inputs, units=0.6, scope="global", compensate=compensate, effort="quick")
    assert np.array_equal(scores.per_unit >= 0.5, cn.plan(scores).stays[:-1])


def find_share(structure, measure):
    """Half of what can go, counted as with a bias for every layer."""
    least, whole = np.ones(structure.unit_count + 1), np.ones(structure.unit_count + 1)
    for group in structure.groups:
        least[group.units] = group.least / len(group)
    floor = count_cost(structure, least, measure) + count_new_biases(structure.wirings, least, everywhere=True)
    return min(1.0, (1 + floor / count_cost(structure, whole, measure)) / 2)


@pytest.mark.parametrize(
    ("name", "compensate"),
    [
        *(("mlp", "none"), ("grouped convolutions", "least_squares")),
        pytest.param("mlp", "least_squares", marks=pytest.mark.slow),
        pytest.param("grouped convolutions", "none", marks=pytest.mark.slow),
        *(pytest.param("resnet", compensate, marks=pytest.mark.slow) for compensate in COMPENSATIONS),
    ],
)
def test_budgets_are_met_with_all_effort(name, compensate):
    model, inputs = draw(name)
    share = find_share(cn.inspect(model, inputs[:2]), "macs")
    scores = cn.search(model, inputs, macs=share, compensate=compensate, effort="thorough")
    kept = cn.plan(scores).stays.astype(float)
    whole, left = (count_cost(scores.structure, each, "macs") for each in (np.ones_like(kept), kept))
    assert left <= share * whole + ROUNDING
    assert np.array_equal(scores.per_unit >= 0.5, kept[:-1] == 1)


@pytest.mark.parametrize(
    ("name", "compensate"),
    [
        *(("mlp", "none"), ("mlp", "least_squares"), ("resnet", "least_squares"), ("grouped convolutions", "none")),
        pytest.param("resnet", "none", marks=pytest.mark.slow),
        pytest.param("grouped convolutions", "least_squares", marks=pytest.mark.slow),
    ],
)
def test_a_search_is_deterministic_and_leaves_the_model_alone(name, compensate):
    model, inputs = draw(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, second = (
        cn.search(model, inputs, units=0.6, compensate=compensate, effort="quick", seed=4) for _ in range(2)
    )
    assert np.array_equal(first.per_unit, second.per_unit)
    assert first.objective == second.objective
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

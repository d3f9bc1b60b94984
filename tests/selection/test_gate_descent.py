"""Gates: the projection, the derivative, exchanges that never do harm, a network whose best units are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.gate_descent import GateSearch, Limit, Steps, project
from critical_neurons.selection.gated_model import GatedModel
from tests.drawing import draw_plan
from tests.zoo import ZOO, build_model, draw_inputs, first_or_slow

NEAREST = 1e-6
SAME_SLOPE = 1e-3
"""Largest difference between derivatives and quotients of differences, relative to the largest derivative."""


DIVERGENCE, STEPS = Distance(divergence=True), Steps()


def make_search(model, inputs, steps=STEPS):
    structure = cn.inspect(model, inputs[:2])
    return GateSearch(GatedModel(model, structure), inputs, DIVERGENCE, size=10, effort=steps), structure


@pytest.mark.parametrize("seed", first_or_slow(*range(5)))
def test_projected_points_are_the_nearest_inside(seed):
    generator = np.random.default_rng(seed)
    values, weights = generator.normal(0.5, 1.0, 6), generator.uniform(0.2, 2.0, 6)
    most = 0.4 * weights.sum()
    point = project(values, weights, most)
    assert ((point >= 0) & (point <= 1)).all()
    assert weights @ point <= most + NEAREST
    others = generator.random((20_000, 6))
    others *= np.minimum(1.0, most / (others @ weights))[:, None]
    assert ((point - values) ** 2).sum() <= ((others - values) ** 2).sum(axis=1).min() + NEAREST


def test_points_inside_stay_where_they_are():
    values = np.array([0.2, 0.0, 0.7])
    assert np.array_equal(project(values, np.ones(3), 1.0), values)


@pytest.mark.parametrize("name", ZOO)
def test_gates_of_zero_are_the_masked_network(name):
    model, inputs = build_model(name), draw_inputs(name, 20)
    structure = cn.inspect(model, inputs[:2])
    plan, gated = draw_plan(structure), GatedModel(model, structure)
    gates = torch.from_numpy(plan.stays[:NO_UNIT]).double()
    with torch.no_grad():
        (found,) = gated.run(inputs, gates)
        assert torch.allclose(found, cn.mask(model, plan)(inputs))
        (whole,) = gated.run(inputs, torch.ones_like(gates))
        assert torch.allclose(whole, model(inputs))


def test_the_loss_of_the_whole_network_is_zero_and_its_slope_that_of_differences():
    model, inputs = build_model("mlp"), draw_inputs("mlp", 20)
    search, structure = make_search(model, inputs)
    whole = np.ones(structure.unit_count, dtype=bool)
    assert search.measure(whole) == pytest.approx(0.0, abs=1e-6)
    stays = whole.copy()
    stays[0] = False
    slope, step = search.differentiate(stays), 1e-4
    assert slope[0] != 0.0
    differences = []
    for unit in range(len(stays)):
        gates, rows = torch.from_numpy(stays).double(), torch.arange(20)
        moved = step * torch.eye(len(gates))[unit]
        start = gates if unit == 0 else gates - moved  # a gate below 0 would let through what the ReLU holds back
        rise = search._diverge(gates + moved, rows) - search._diverge(start, rows)
        differences.append(float(rise) / (step if unit == 0 else 2 * step))
    assert np.abs(slope - differences).max() <= SAME_SLOPE * np.abs(slope).max()


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_exchanges_never_raise_the_loss_and_keep_the_counts(name):
    model, inputs = build_model(name), draw_inputs(name, 20)
    search, structure = make_search(model, inputs)
    groups = [group.units for group in structure.groups]
    for seed in range(3):
        stays = np.zeros(structure.unit_count, dtype=bool)
        for units in groups:
            stays[np.random.default_rng(seed).permutation(units)[: -(-len(units) // 2)]] = True
        found, loss = search.exchange(stays, groups)
        assert loss == search.measure(found) <= search.measure(stays)
        assert all(found[units].sum() == stays[units].sum() for units in groups)


def test_units_without_effect_are_shut_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)).double().eval()
    idle = [1, 3, 4, 6, 9]
    model[2].weight.data[:, idle] = 0.0
    inputs = torch.randn(60, 4, dtype=torch.float64)
    search, _ = make_search(model, inputs)
    gates = search.descend(lambda gates, way: [Limit(np.arange(10), np.ones(10), 10 - 5 * way)])
    assert np.flatnonzero(gates < 0.5).tolist() == idle
    assert gates.sum() <= 5 + NEAREST


def test_many_units_are_exchanged_at_once():
    """All that have no effect stay and all others are gone: to exchange one after the other is not needed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)).double().eval()
    model[2].weight.data[:, :5] = 0.0
    search, _ = make_search(model, torch.randn(60, 4, dtype=torch.float64), Steps(swaps=0))
    stays = np.arange(10) < 5
    found, loss = search.exchange(stays, [np.arange(10)])
    assert found.sum() == 5
    assert loss == search.measure(found) < search.measure(stays)
    assert found[:5].sum() < 4


def test_a_derivative_is_worked_out_once_for_the_same_units_and_temperature(monkeypatch):
    search, structure = make_search(build_model("mlp"), draw_inputs("mlp", 20))
    half, passes = np.arange(structure.unit_count) % 2 == 0, []
    monkeypatch.setattr(search._model, "run", lambda *args, run=search._model.run: passes.append(1) or run(*args))
    known = search.differentiate(half).copy()
    assert np.array_equal(search.differentiate(half.copy()), known)
    assert len(passes) == 1
    assert not np.array_equal(search.differentiate(half, 0.5), known)
    assert not np.array_equal(search.differentiate(~half, 0.5), known)
    assert len(passes) == 3


def test_changed_decisions_are_those_of_the_masked_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)).double().eval()
    inputs = torch.randn(60, 4, dtype=torch.float64)
    search, structure = make_search(model, inputs)
    plan = draw_plan(structure, seed=1)
    with torch.no_grad():
        changed = cn.mask(model, plan)(inputs).argmax(1) != model(inputs).argmax(1)
    assert search.count_changed(plan.stays[:NO_UNIT]) == pytest.approx(float(changed.double().mean())) != 0
    assert search.count_changed(np.ones(structure.unit_count, dtype=bool)) == 0

"""Gates: the projection, the derivative, a network whose best units are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.gate_descent import TEMPERATURE, GateSearch, Limit, project
from critical_neurons.selection.gated_model import GatedModel
from tests.drawing import draw_plan
from tests.zoo import ZOO, build_model, draw_inputs, first_or_slow

NEAREST = 1e-6
SAME_SLOPE = 1e-3
"""Largest difference between derivatives and quotients of differences, relative to the largest derivative."""


DIVERGENCE = Distance(divergence=True)


def make_search(model, inputs):
    structure = cn.inspect(model, inputs[:2])
    return GateSearch(GatedModel(model, structure), inputs, DIVERGENCE, size=10, steps=400), structure


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
    gated, whole = GatedModel(model, structure), np.ones(structure.unit_count, dtype=bool)
    assert search.measure(whole) == pytest.approx(0.0, abs=1e-6)
    stays = whole.copy()
    stays[0] = False
    slope, step = search._differentiate(torch.from_numpy(stays).double(), torch.arange(20))[1].numpy(), 1e-4
    assert slope[0] != 0.0
    differences = []
    for unit in range(len(stays)):
        gates = torch.from_numpy(stays).double()
        moved = step * torch.eye(len(gates))[unit]
        start = gates if unit == 0 else gates - moved  # a gate below 0 would let through what the ReLU holds back
        with torch.no_grad():
            ends = [gated.run(inputs, each) for each in (gates + moved, start)]
            after, before = (float(DIVERGENCE.measure(each, [model(inputs)], TEMPERATURE)) for each in ends)
        differences.append((after - before) / (step if unit == 0 else 2 * step))
    assert np.abs(slope - differences).max() <= SAME_SLOPE * np.abs(slope).max()


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

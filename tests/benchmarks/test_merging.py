"""benchmarks/merging.py: what the units that stay take over of those that go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from merging import MERGERS, fold, keep_units, merge
from preferring import Subject
from refitted import choose

TOLERANCE = 1e-5


@pytest.fixture
def twins() -> Subject:
    """A network of which every second unit is twice the one before it, in both hidden layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 3)
    ).eval()
    with torch.no_grad():
        model[1].weight[1::2] = 2
        model[0].weight[1::2], model[0].bias[1::2] = model[0].weight[::2], model[0].bias[::2]
        model[4].weight[1::2], model[4].bias[1::2] = 2 * model[4].weight[::2], 2 * model[4].bias[::2]
    return Subject(model, torch.randn(20, 3, 4, 4), torch.arange(20) % 3, {})


def test_merging_scaled_copies_changes_nothing(twins):
    plan = keep_units(twins, np.tile([0.0, 1.0], 7))
    merged, chosen = merge(twins, plan, 0)
    smaller = cn.prune(merged, chosen, twins.inputs)
    torch.testing.assert_close(smaller(twins.inputs), twins.model(twins.inputs), rtol=0, atol=TOLERANCE)
    plain = cn.prune(twins.model, plan, twins.inputs)
    assert (plain(twins.inputs) - twins.model(twins.inputs)).abs().max() > 100 * TOLERANCE


def test_folding_copies_changes_nothing(twins):
    with torch.no_grad():
        twins.model[1].weight[1::2] = 1
        twins.model[4].weight[1::2] /= 2
        twins.model[4].bias[1::2] /= 2
    plan = keep_units(twins, np.repeat([1.0, 0.0, 1.0, 0.0], [4, 4, 3, 3]))
    folded, chosen = fold(twins, plan, 0)
    assert [len(chosen.kept[name]) for name in ("0", "4")] == [4, 3]
    smaller = cn.prune(folded, chosen, twins.inputs)
    torch.testing.assert_close(smaller(twins.inputs), twins.model(twins.inputs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("method", MERGERS)
def test_the_network_is_not_changed_and_the_plan_keeps_its_size(twins, method):
    before = {name: values.clone() for name, values in twins.model.state_dict().items()}
    plan = choose(twins, {"method": method, "division": "one ranking", "macs": 0.5}, {})
    merged, chosen = MERGERS[method](twins, plan, 0)
    assert {name: len(units) for name, units in chosen.kept.items()} == {n: len(u) for n, u in plan.kept.items()}
    assert all(torch.equal(before[name], now) for name, now in twins.model.state_dict().items())
    assert any(not torch.equal(before[name], now) for name, now in merged.state_dict().items())

"""What is left of a network with some units alone: least squares solved anew, all structures, exchanges that help."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.compensating import carrying, reads_units
from critical_neurons.compensating.carrying import Carrier
from tests.zoo import build_model, draw_inputs

SAME = 1e-6
STRUCTURES = ["mlp", "groups", "resnet", "densenet", "mobilenet", "convolution in one dimension"]


def make_carrier(model, inputs):
    network = cn.inspect(model, inputs[:2])
    return Carrier(model, [wiring for wiring in network.wirings if reads_units(wiring)], inputs), network


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_whole_network_misses_nothing_and_the_model_stays_as_it_is(name):
    model, inputs = build_model(name), draw_inputs(name, 60)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    carrier, network = make_carrier(model, inputs)
    whole = np.ones(network.unit_count, dtype=bool)
    half = np.arange(network.unit_count) % 2 == 0
    assert carrier.miss(half) > SAME
    assert carrier.miss(whole) == pytest.approx(0.0, abs=SAME)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_consumer_is_refitted_on_some_inputs_and_judged_on_the_others(monkeypatch):
    monkeypatch.setattr(carrying, "RIDGE", 1e-9)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    inputs = torch.randn(90, 4, dtype=torch.float64)
    stays = np.array([True, False] * 4)
    found = make_carrier(model, inputs)[0].miss(stays)

    drawn = inputs[torch.randperm(90, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        hidden, outputs = model[:2](drawn)[:, stays], model(drawn)
        rows = torch.cat([hidden, torch.ones(90, 1)], dim=1).double()
        refitted = rows @ torch.linalg.lstsq(rows[:60], outputs[:60]).solution
        held_out = outputs[60:]
        temperature = 0.5 * (held_out - held_out.mean(1, keepdim=True)).square().mean().sqrt()
        log, wanted = ((each / temperature).log_softmax(1) for each in (refitted[60:], held_out))
    expected = nn.functional.kl_div(log, wanted, log_target=True, reduction="batchmean")
    assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_in_the_end_no_exchange_helps_and_counts_are_kept(name):
    model, inputs = build_model(name), draw_inputs(name, 60)
    carrier, network = make_carrier(model, inputs)
    groups = np.split(np.arange(network.unit_count), np.cumsum(network.groups)[:-1])
    stays = np.concatenate([np.arange(len(units)) < -(-len(units) // 2) for units in groups])
    found = carrier.exchange(stays, groups)
    least = carrier.miss(found)
    assert least <= carrier.miss(stays)
    for units in groups:
        assert found[units].sum() == stays[units].sum()
        for old, new in product(units[found[units]], units[~found[units]]):
            further = found.copy()
            further[[old, new]] = [False, True]
            assert carrier.miss(further) >= (1 - carrying.BETTER) * least - carrying.NOTHING


def test_large_groups_are_left_alone_and_trials_end(monkeypatch):
    model, inputs = build_model("mlp"), draw_inputs("mlp", 60)
    carrier, network = make_carrier(model, inputs)
    stays = np.arange(network.unit_count) % 2 == 0
    groups = [np.arange(network.unit_count)]
    monkeypatch.setattr(carrying, "MOST_TRIALS", 0)
    assert np.array_equal(carrier.exchange(stays, groups), stays)
    monkeypatch.setattr(carrying, "MOST_TRIALS", 50)
    monkeypatch.setattr(carrying, "SMALL_GROUP", 1)
    assert np.array_equal(carrier.exchange(stays, groups), stays)

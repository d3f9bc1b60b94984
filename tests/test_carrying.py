"""What is left of a network with some units alone: all structures, least squares solved anew."""

from __future__ import annotations

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
def test_a_whole_network_is_as_sure_as_it_was_and_the_model_stays_as_it_is(name, monkeypatch):
    monkeypatch.setattr(carrying, "SOFTENING", 10.0)
    model, inputs = build_model(name), draw_inputs(name, 60)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    carrier, network = make_carrier(model, inputs)
    whole = np.ones(network.unit_count, dtype=bool)
    with torch.no_grad():
        outputs = model(inputs[torch.randperm(60, generator=torch.Generator().manual_seed(0))]).double()
    doubts = []
    for held_out in outputs.split(20):
        temperature = carrying.SOFTENING * (held_out - held_out.mean(1, keepdim=True)).square().mean().sqrt()
        doubts.append(float(1 - (held_out / temperature).softmax(1).amax(1).mean()))
    assert carrier.miss(whole) == pytest.approx(np.mean(doubts), abs=SAME)
    assert abs(carrier.miss(~whole) - carrier.miss(whole)) > SAME
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_consumer_is_refitted_on_some_inputs_and_judged_on_the_others(monkeypatch):
    monkeypatch.setattr(carrying, "RIDGE", 1e-9)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    inputs = torch.randn(90, 4, dtype=torch.float64)
    stays = np.array([True, False] * 4)
    carrier, _ = make_carrier(model, inputs)

    drawn = inputs[torch.randperm(90, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        hidden, outputs = model[:2](drawn)[:, stays], model(drawn)
    rows = torch.cat([hidden, torch.ones(90, 1)], dim=1).double()
    expected = []
    for held_out in (slice(60, 90), slice(30, 60), slice(0, 30)):
        fitted = torch.ones(90, dtype=torch.bool)
        fitted[held_out] = False
        refitted = rows[held_out] @ torch.linalg.lstsq(rows[fitted], outputs[fitted]).solution
        wanted = outputs[held_out]
        temperature = 0.1 * (wanted - wanted.mean(1, keepdim=True)).square().mean().sqrt()
        sure = (refitted / temperature).softmax(1)[torch.arange(30), wanted.argmax(1)]
        expected.append(float(1 - sure.mean()))
    assert carrier.miss(stays, folds=1) == pytest.approx(expected[0], rel=1e-4)
    assert carrier.miss(stays) == pytest.approx(np.mean(expected), rel=1e-4)

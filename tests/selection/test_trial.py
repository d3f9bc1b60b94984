"""What is left of a network with some units alone: all structures, least squares solved anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.selection import distance, trial
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.layerwise_search import list_consumers
from critical_neurons.selection.trial import Carrier, Draft
from tests.zoo import build_model, draw_inputs

SAME = 1e-6
STRUCTURES = ["mlp", "groups", "resnet", "densenet", "mobilenet", "convolution in one dimension"]


def make_carrier(model, inputs):
    structure = cn.inspect(model, inputs[:2])
    return Carrier(model, list_consumers(structure, model), inputs, Distance(divergence=True)), structure


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_whole_network_is_as_sure_as_it_was_and_the_model_stays_as_it_is(name, monkeypatch):
    monkeypatch.setattr(distance, "SOFTENING", 10.0)
    model, inputs = build_model(name), draw_inputs(name, 60)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    carrier, structure = make_carrier(model, inputs)
    whole = np.ones(structure.unit_count, dtype=bool)
    with torch.no_grad():
        outputs = model(inputs[torch.randperm(60, generator=torch.Generator().manual_seed(0))]).double()
    doubts = []
    for held_out in outputs.split(20):
        temperature = distance.SOFTENING * (held_out - held_out.mean(1, keepdim=True)).square().mean().sqrt()
        doubts.append(float(1 - (held_out / temperature).softmax(1).amax(1).mean()))
    assert carrier.miss(whole) == pytest.approx(np.mean(doubts), abs=SAME)
    assert abs(carrier.miss(~whole) - carrier.miss(whole)) > SAME
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_consumer_is_refitted_on_some_inputs_and_judged_on_the_others(monkeypatch):
    monkeypatch.setattr(trial, "RIDGE", 1e-9)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_never_changes_carries_its_mean_alone(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).to(dtype).eval().requires_grad_(False)
    model[0].weight[:3] = 0
    model[0].bias[:3] = torch.tensor([0.1, 0.3, 0.7])
    inputs = torch.randn(60, 3).to(dtype)
    draft = Draft(model, cn.inspect(model, inputs[:2]).wirings[-1:], inputs, len(inputs), 0)
    (outputs,) = draft.run(np.array([True] * 3 + [False] * 3 + [True]))
    assert torch.allclose(outputs, model(inputs).mean(0).expand_as(outputs), atol=1e-5)


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_reaches_a_module_are_the_columns_that_stay(name):
    """Also where the groups of a convolution keep different numbers."""
    model, inputs = build_model(name), draw_inputs(name, 40)
    structure = cn.inspect(model, inputs[:2])
    consumers = list_consumers(structure, model)
    draft = Draft(model, consumers, inputs, len(inputs), 0)
    generator = np.random.default_rng(0)
    for wiring in consumers:
        stays = np.append(generator.random(structure.unit_count) < 0.5, True)
        module, seen = draft.model.get_submodule(wiring.module), []
        handle = module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        reached = draft.reach(stays, [wiring.module])[wiring.module]
        handle.remove()
        rows = unroll_anew(module, seen[0]).double()
        left = np.repeat(stays[wiring.inputs], rows.shape[2] * wiring.groups // len(wiring.inputs))
        for number, kept in enumerate(torch.from_numpy(left.reshape(wiring.groups, -1))):
            expected = rows[number][:, kept].T @ rows[number][:, kept]
            found = reached.rows[number].T @ reached.rows[number]
            count = int(kept.sum())
            assert torch.allclose(found[:count, :count], expected, rtol=SAME, atol=SAME)
            assert not found[count:].any()


def unroll_anew(module, inputs):
    """(groups, rows, columns), by torch's own unfold."""
    if isinstance(module, nn.Linear):
        return inputs[None]
    if isinstance(module, nn.Conv1d):
        inputs, size, padding, stride = (
            inputs[:, :, None],
            (1, *module.kernel_size),
            (0, *module.padding),
            (1, *module.stride),
        )
    else:
        size, padding, stride = module.kernel_size, module.padding, module.stride
    columns = functional.unfold(inputs, size, padding=padding, stride=stride)
    return columns.reshape(len(inputs), module.groups, -1, columns.shape[2]).permute(1, 0, 3, 2).flatten(1, 2)

"""What no change reaches is computed once, and runs give what they gave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.selection import prefix_cache
from critical_neurons.selection.distance import choose_distance
from critical_neurons.selection.gate_descent import GateSearch, Steps
from critical_neurons.selection.gated_model import GatedModel
from critical_neurons.selection.layerwise_search import list_consumers
from critical_neurons.selection.prefix_cache import Front
from critical_neurons.selection.trial import Draft
from tests.zoo import ZOO, build_model, draw_inputs

SAME = 1e-9
ROWS = 12


class Twice(nn.Module):
    """The same layer before and behind the gates, and one that stands before them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.shared, self.gates = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(4)

    def forward(self, inputs):
        first = functional.relu_(self.shared(self.alone(inputs)))
        return self.shared(first * self.gates)


def count_calls(module: nn.Module) -> list[int]:
    """A list that grows by one with every call that computes something."""
    calls: list[int] = []
    plain = type(module).forward

    def forward(read):
        calls.append(1)
        return plain(module, read)

    vars(module)["forward"] = forward
    return calls


def hold(model: Twice, inputs: torch.Tensor) -> Front:
    model.requires_grad_(False)

    def probe() -> None:
        model.gates = torch.ones(4, requires_grad=True)
        model(inputs[:2])
        model.gates = torch.ones(4)

    return Front(model, probe, len(inputs))


def test_parts_of_the_inputs_give_what_they_gave_and_nothing_is_worked_on_in_place():
    torch.manual_seed(0)
    model, inputs = Twice(), torch.randn(ROWS, 4)
    found = hold(model, inputs)
    with found.learn():
        for part in inputs.split(5):
            model(part)
    rows = torch.tensor([3, 0, 3, 11])
    for gates in (torch.zeros(4), torch.rand(4)):
        model.gates = gates
        with found.recall(rows):
            given = model(torch.full((4, 4), torch.nan))  # not read: what the first layer gave is known
        assert torch.allclose(given, model(inputs[rows]), atol=SAME)


def test_modules_that_are_called_twice_are_run():
    model = Twice()
    found = hold(model, torch.randn(ROWS, 4))
    assert found._steady == [model.alone]


def test_what_does_not_fit_is_run(monkeypatch):
    monkeypatch.setattr(prefix_cache, "HELD_BYTES", ROWS * 4 * 4 - 1)
    assert hold(Twice(), torch.randn(ROWS, 4))._steady == []


def test_modules_with_a_forward_of_their_own_keep_it():
    model = Twice()
    calls = count_calls(model.alone)
    found = hold(model, torch.randn(ROWS, 4))
    with found.learn():
        model(torch.randn(ROWS, 4))
    before = len(calls)
    with found.recall(torch.arange(ROWS)):
        model(torch.randn(ROWS, 4))
    assert len(calls) == before + 1


@pytest.mark.parametrize("name", ZOO)
def test_gated_and_refitted_networks_are_the_same_with_it_and_without(name, monkeypatch):
    model, inputs = build_model(name).requires_grad_(False), draw_inputs(name, ROWS)
    structure = cn.inspect(model, inputs[:2])
    distance = choose_distance([model(inputs)], "divergence", inputs[0].numel())
    stays = np.random.default_rng(0).random(structure.unit_count) < 0.5
    consumers = list_consumers(structure, model)
    gated = GatedModel(model, structure)
    measured, refitted = [], []
    for room in (prefix_cache.HELD_BYTES, 0):
        monkeypatch.setattr(prefix_cache, "HELD_BYTES", room)
        search = GateSearch(gated, inputs, distance, size=10, effort=Steps())
        measured.append((search.measure(stays), search.differentiate(stays)))
        refitted += Draft(model, consumers, inputs, ROWS, 0).run(np.append(stays, True))
    (loss, slope), (again, same) = measured
    assert loss == pytest.approx(again, abs=SAME)
    assert np.allclose(slope, same, atol=1e-6)
    assert torch.allclose(*refitted, atol=SAME)

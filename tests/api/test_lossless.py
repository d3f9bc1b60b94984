"""`lossless`: what is merged and collapsed, what is kept, records, workers, bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.deadline import TimeIsUp
from critical_neurons.core.stability import Stability, State
from critical_neurons.errors import (
    InvalidFileError,
    InvalidInputError,
    InvalidSettingError,
    PlanMismatchError,
    UnreadableModelError,
)
from critical_neurons.stability.reach import ReachSearch

UNIT_BOX = np.zeros(3), np.ones(3)


def make_mlp(weight, bias, second, *, norm=None):
    """A layer of these weights, a ReLU, and a layer behind it."""
    first, last = nn.Linear(len(weight[0]), len(weight)), nn.Linear(len(weight), len(second))
    with torch.no_grad():
        first.weight.copy_(torch.tensor(weight))
        first.bias.copy_(torch.tensor(bias))
        last.weight.copy_(torch.tensor(second))
    return nn.Sequential(first, *([] if norm is None else [norm]), nn.ReLU(), last).double().eval()


def assert_same(model, found, lower=0.0, upper=1.0, shape=(3,)):
    points = lower + (upper - lower) * torch.rand(50, *shape, generator=torch.Generator().manual_seed(0)).double()
    points[::2] = points[::2].round()
    with torch.no_grad():
        torch.testing.assert_close(found.model(points), model(points), rtol=1e-9, atol=1e-9)


def test_multiples_of_a_unit_are_merged():
    model = make_mlp(
        [[1.0, -1.0, 0.2], [2.0, -2.0, 0.4], [-1.0, 1.0, -0.2]], [-0.1, -0.2, 0.1], [[1.0, 3.0, -1.0]] * 2
    )
    found = cn.lossless(model, UNIT_BOX)
    assert [unit.state for unit in found.stability.units] == [State.UNSTABLE] * 3
    assert found.model[0].out_features == 2
    assert found.stability.changes[0].merged == 1
    assert_same(model, found)


def test_combinations_of_units_that_are_on_are_folded():
    """Five units that are on, of rank 2, and one that is not."""
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [2.0, -1.0, 0.0], [0.0, 0.0, 0.0], [1.0, -1.0, 0.0]]
    model = make_mlp(rows, [1.0, 2.0, 0.5, 3.0, 4.0, 0.1], torch.randn(9, 6, generator=torch.manual_seed(0)).tolist())
    found = cn.lossless(model, UNIT_BOX)
    assert found.stability.count()[State.ON] == 5
    assert found.model[0].out_features == 3
    assert_same(model, found)


def test_units_that_are_on_are_as_many_as_outputs_tell_apart():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 15), nn.ReLU(), nn.Linear(15, 3)).double()
    with torch.no_grad():
        model[0].bias[:18] += 5
        model[2].bias[:12] += 9
    found = cn.lossless(model, (np.zeros(30), np.ones(30)), collapse=False)
    on = found.stability.count("2")[State.ON]
    assert on >= 12
    assert found.model[2].out_features <= 15 - on + 3
    assert_same(model, found, shape=(30,))


def test_feature_maps_are_folded_with_their_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2)),
    )
    model = model.double().eval()
    with torch.no_grad():
        model[0].weight[2] = 2 * model[0].weight[0] - model[0].weight[1]
        model[0].weight[3] = 0.0
        model[0].bias[3] = -1.0
        model[1].bias[:3] += 9.0
    found = cn.lossless(model, (np.zeros((1, 4, 4)), np.ones((1, 4, 4))))
    change = found.stability.changes[0]
    assert (change.off, change.merged) == (1, 1)
    assert found.model[0].out_channels == 2
    assert_same(model, found, shape=(1, 4, 4))


def test_constants_are_not_folded_into_padded_maps():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    ).double()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[:] = 2 * model[0].weight[0], torch.tensor([5.0, 6.0])
    found = cn.lossless(model, (np.zeros((1, 4, 4)), np.ones((1, 4, 4))))
    assert found.stability.changes[0].merged == 0
    assert_same(model, found, shape=(1, 4, 4))


def test_a_layer_that_is_on_collapses():
    model = nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
    model = model.double().eval()
    with torch.no_grad():
        model[0].bias += 20
        model[3].bias -= model[:4](torch.full((1, 3), 0.5, dtype=torch.float64))[0]  # on and off in the box
    found = cn.lossless(model, UNIT_BOX)
    assert isinstance(found.model[0], nn.Identity)
    assert found.model[3].in_features == 3
    assert found.stability.changes[0].collapsed
    assert_same(model, found)
    kept = cn.lossless(model, UNIT_BOX, collapse=False)
    assert kept.model[0].out_features == 3, "three are enough for all linear functions of three inputs"
    assert_same(model, kept)


def test_a_functional_relu_does_not_collapse():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    model = Functional().double()
    with torch.no_grad():
        model.one.bias += 20
    found = cn.lossless(model, UNIT_BOX)
    assert found.model.one.out_features == 2, "two outputs tell no more than two units apart"
    assert "no module of its own" in found.stability.changes[0].note
    assert_same(model, found)


def test_a_dead_layer_leaves_a_constant():
    model = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[2].bias -= 50
    found = cn.lossless(model, UNIT_BOX)
    assert [found.model[at].out_features for at in (0, 2)] == [1, 1], "nothing reads the first layer any more"
    assert_same(model, found)


def test_types_and_modes_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)).train()
    before = [values.clone() for values in model.parameters()]
    found = cn.lossless(model, UNIT_BOX)
    assert found.model.training
    assert {values.dtype for values in found.model.parameters()} == {torch.float32}
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    torch.testing.assert_close(found.model(torch.rand(5, 3)).shape, (5, 2))


def draw_doubtful():
    """Units that points do not settle: never on where anyone looks."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)).double()
    with torch.no_grad():
        model[0].weight *= 3
        model[2].bias -= 0.9
    return model, (-np.ones(6), np.ones(6))


def test_what_is_undecided_stays(monkeypatch):
    model, box = draw_doubtful()
    proved = cn.lossless(model, box)
    assert proved.stability.count_methods()["integer program"] > 0
    assert not proved.stability.stopped
    hurried = cn.lossless(model, box, time_limit=1e-9)
    assert hurried.stability.stopped == "time limit"
    assert hurried.stability.count()[State.UNDECIDED] > 0
    assert hurried.parameters[1] >= proved.parameters[1]
    for early, late in zip(hurried.stability.units, proved.stability.units, strict=True):
        assert early.state in (late.state, State.UNDECIDED)
    assert_same(model, hurried, -1.0, 1.0, (6,))

    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ReachSearch, "ask", press)
    stopped = cn.lossless(model, box)
    assert stopped.stability.stopped == "interrupted"
    assert_same(model, stopped, -1.0, 1.0, (6,))


def test_a_record_is_taken_up_again(tmp_path, monkeypatch):
    model, box = draw_doubtful()
    path = tmp_path / "record.json"
    hurried = cn.lossless(model, box, time_limit=1e-9, record=path).stability
    first = cn.lossless(model, box, record=path).stability
    assert first.count()[State.UNDECIDED] < hurried.count()[State.UNDECIDED]

    def refuse(*_):
        raise AssertionError("all is known")

    monkeypatch.setattr(ReachSearch, "ask", refuse)
    again = cn.lossless(model, box, record=path).stability
    assert [unit.state for unit in again.units] == [unit.state for unit in first.units]
    assert [unit.method for unit in again.units] == [unit.method for unit in first.units]
    with pytest.raises(PlanMismatchError, match="another box"):
        cn.lossless(model, (box[0], 2 * box[1]), record=path)
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(PlanMismatchError, match="another network"):
        cn.lossless(model, box, record=path)
    path.write_text("{}")
    with pytest.raises(InvalidFileError):
        cn.lossless(model, box, record=path)


@pytest.mark.slow
def test_workers_decide_the_same():
    model, box = draw_doubtful()
    alone, shared = (cn.lossless(model, box, workers=cn.Workers(jobs)).stability for jobs in (1, 2))
    assert [unit.state for unit in alone.units] == [unit.state for unit in shared.units]


def test_the_record_travels(tmp_path):
    model, box = draw_doubtful()
    found = cn.lossless(model, box).stability
    found.save(tmp_path / "record.json")
    json.loads((tmp_path / "record.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    loaded = Stability.load(tmp_path / "record.json")
    assert loaded.to_dict() == found.to_dict()
    assert str(loaded) == str(found)
    assert "layer" in str(found)
    assert "integer program" in found.summary
    for unit in found.units:
        assert (unit.gap is None) == (unit.state in (State.UNSTABLE, State.UNDECIDED))
        assert unit.gap is None or unit.gap >= -1e-9


def test_the_smaller_model_can_be_saved(tmp_path):
    model, box = draw_doubtful()
    found = cn.lossless(model, box, collapse=False)
    cn.save(found.model, tmp_path / "smaller", plan=found.plan)
    loaded = cn.load(tmp_path / "smaller", model)
    points = torch.rand(9, 6, dtype=torch.float64)
    assert torch.equal(loaded(points), found.model(points))


MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give the range of the inputs"),
        ({"box": (np.ones(3), np.zeros(3))}, "it is empty"),
        ({"box": (np.zeros(3), np.full(3, np.inf))}, "NaN or infinite"),
        ({"box": (np.zeros(3), np.array([1.0, np.nan, 1.0]))}, "NaN or infinite"),
        ({"box": (np.zeros(3), np.ones(2))}, "found ends of shape"),
        ({"box": (0.0, 1.0)}, "do not say what an input looks like"),
        ({"box": 1.0}, "Accepted: a pair"),
        ({"box": ("a", "b")}, "no array of numbers"),
        ({"box": (np.zeros(4), np.ones(4))}, "does not run on inputs"),
        ({"box": (0.0, 1.0), "inputs": np.full((2, 3), 1.5)}, "2 of 2 inputs lie outside"),
        ({"box": (0.0, 1.0), "inputs": np.full((2, 3), np.nan)}, "NaN or infinite"),
        ({"inputs": np.ones((2, 3)), "radius": -1.0}, "radius"),
        ({"inputs": np.ones((2, 3)), "radius": np.nan}, "radius"),
        ({"radius": 1.0}, "needs inputs"),
        ({"box": UNIT_BOX, "time_limit": 0}, "time_limit"),
        ({"box": UNIT_BOX, "collapse": 1}, "collapse"),
        ({"box": UNIT_BOX, "workers": 2}, "workers"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises((InvalidInputError, InvalidSettingError), match=message):
        cn.lossless(MODEL, **arguments)


def test_without_time_the_model_comes_back_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).train()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].bias.zero_()
        model[2].bias.copy_(-1e-3 * torch.arange(6))  # no interval of a unit is on one side of zero
    found = cn.lossless(model, (-np.ones(3), np.ones(3)), time_limit=1e-9)
    assert found.stability.stopped == "time limit"
    assert found.parameters[0] == found.parameters[1]
    assert found.plan.stays.all()
    assert found.model is not model
    assert found.model.training
    for one, other in zip(found.model.parameters(), model.parameters(), strict=True):
        assert one is not other
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def test_networks_that_cannot_be_read():
    with pytest.raises(UnreadableModelError, match="GELU"):
        cn.lossless(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), UNIT_BOX)


def test_substitution_is_given_up_when_the_time_is_over(monkeypatch):
    def give_up():
        raise TimeIsUp

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    monkeypatch.setattr("critical_neurons.formulations.bound_propagation.backward.check_time", give_up)
    found = cn.lossless(model, UNIT_BOX, time_limit=5.0)
    assert "backward" not in found.stability.count_methods()
    inputs = torch.rand(20, 3)
    assert torch.allclose(found.model(inputs), model(inputs), atol=1e-5)
    network = cn.read_network(model, inputs)
    with pytest.raises(TimeIsUp):
        cn.bound_network(network, inputs.double().numpy(), radius=0.1, method="backward")

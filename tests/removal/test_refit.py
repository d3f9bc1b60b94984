"""Refitting modules behind removed units: the optimum reached, streaming, what a user may get wrong."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError, InvalidSettingError, PruningError
from critical_neurons.removal.refit import batches, least_squares, ridge, stream
from tests import drawing

STATIONARY = 1e-4
"""Largest gradient of the squared error at its least value, relative to that before the refit."""

SAME_MEAN = 1e-9
"""Largest difference of means and variances."""

RECOVERED = 1e-3

ROUNDING = 1e-25
"""Squared errors below this are none."""


@pytest.fixture(autouse=True)
def same_weights_every_time():
    torch.manual_seed(0)


def draw_plan(model, inputs, seed):
    return drawing.draw_plan(cn.inspect(model, inputs), seed)


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def build(*modules):
    model = nn.Sequential(*modules).double().eval()
    for module in model:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.copy_(0.3 * draw(module.num_features, seed=1))
            module.running_var.copy_(1 + 0.5 * draw(module.num_features, seed=2).abs())
    return model


CONSUMERS = {
    "linear": ((6,), lambda: build(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))),
    "without bias": ((6,), lambda: build(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5, bias=False))),
    "padded, strided": (
        (2, 7, 6),
        lambda: build(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3, stride=2, padding=1), nn.Flatten()),
    ),
    "dilated, same size": (
        (2, 8, 7),
        lambda: build(
            nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, (2, 3), dilation=(2, 1), padding="same"), nn.Flatten()
        ),
    ),
    "grouped": (
        (2, 6, 6),
        lambda: build(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2), nn.Flatten()),
    ),
    "along a line": (
        (2, 9),
        lambda: build(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Conv1d(8, 5, 2, padding=1), nn.Flatten()),
    ),
}


def find_consumer(model):
    """The second layer with weights."""
    return [name for name, module in model.named_modules() if hasattr(module, "weight")][1]


def squared_error(original, smaller, inputs):
    return (original(inputs).detach() - smaller(inputs)).square().sum()


def gradient(original, smaller, inputs):
    """The largest entry of that of the squared error by the consumer's parameters."""
    squared_error(original, smaller, inputs).backward()
    consumer = smaller.get_submodule(find_consumer(smaller))
    parts = [parameter.grad.flatten() for parameter in consumer.parameters()]
    return float(torch.cat(parts).abs().max())


@pytest.mark.parametrize("name", CONSUMERS)
def test_least_squares_reaches_the_least_squared_error(name, monkeypatch):
    """Judged by torch's own gradient of the error, with next to no regularisation."""
    monkeypatch.setattr(ridge, "RIDGES", (1e-9,))
    shape, make = CONSUMERS[name]
    model, inputs = make(), draw(200, *shape)
    plan = draw_plan(model, inputs, seed=1)
    assert sum(map(len, plan.removed.values()))
    plain = cn.prune(model, plan, inputs)
    before, error = gradient(model, plain, inputs), squared_error(model, plain, inputs).item()
    refitted = cn.prune(model, plan, inputs, compensate="least_squares")
    assert gradient(model, refitted, inputs) <= STATIONARY * before
    shifted = cn.prune(model, plan, inputs, compensate="bias")
    assert squared_error(model, refitted, inputs) < squared_error(model, shifted, inputs) < error


@pytest.mark.parametrize("name", CONSUMERS)
def test_bias_keeps_the_mean_of_every_channel(name):
    shape, make = CONSUMERS[name]
    model, inputs = make(), draw(64, *shape)
    plan = draw_plan(model, inputs, seed=1)
    smaller = cn.prune(model, plan, inputs, compensate="bias")
    consumer = find_consumer(model)
    outputs = [run_to(each, consumer, inputs) for each in (model, smaller)]
    means = [output.transpose(0, 1).flatten(1).mean(1) for output in outputs]
    assert (means[0] - means[1]).abs().max() <= SAME_MEAN


def run_to(model, name, inputs):
    found = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        model(inputs)
    handle.remove()
    return found[0]


def test_a_twin_takes_over():
    """A unit that another one copies is not missed at all, in every layer and behind batch norms."""
    model = build(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 3)),
    )
    with torch.no_grad():
        for layer in (model[0], model[1], model[4], model[7]):
            for values in layer.state_dict().values():
                if values.ndim:
                    values[3:] = values[:3]
    inputs, fresh = draw(400, 1, 8, 8), draw(50, 1, 8, 8, seed=1)
    plan = draw_plan(model, inputs, seed=0)
    first = np.concatenate([np.arange(len(group)) < 3 for group in plan.structure.groups])
    plan = replace(plan, stays=np.append(first, True))
    with torch.no_grad():
        expected = model(fresh)
        missed = {
            method: float((cn.prune(model, plan, inputs, compensate=method)(fresh) - expected).norm())
            / float((expected - expected.mean(0)).norm())
            for method in ("none", "bias", "least_squares")
        }
    assert missed["least_squares"] <= RECOVERED
    assert missed["none"] > missed["bias"] > 100 * RECOVERED


def test_batch_norm_gives_the_mean_and_variance_it_gave():
    model = build(
        *(nn.Conv2d(1, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(24, 3)),
    )
    inputs = draw(100, 1, 6, 6)
    plan = draw_plan(model, inputs, seed=3)
    kept = {layer.name: layer.kept for layer in plan.layers}["2"]
    assert len(plan.removed["0"])
    for method in ("bias", "least_squares"):
        smaller = cn.prune(model, plan, inputs, compensate=method)
        assert smaller[2].bias is None  # the batch norm takes the shift
        wanted, found = run_to(model, "3", inputs)[:, kept], run_to(smaller, "3", inputs)
        for moment in (torch.mean, torch.var):
            assert torch.allclose(moment(wanted, dim=(0, 2, 3)), moment(found, dim=(0, 2, 3)), atol=SAME_MEAN)


def test_inputs_that_memory_has_no_room_for_join_later(monkeypatch):
    """Two large feature maps, then a small one: there all inputs take part, and each still comes through once."""
    model = build(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(16)),
        *(nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
    )
    inputs, fresh = draw(400, 1, 16, 16), draw(100, 1, 16, 16, seed=1)
    plan = draw_plan(model, inputs, seed=1)
    plain = cn.prune(model, plan, inputs)
    stops = [stream.Stop(layer.name, torch.from_numpy(layer.kept)) for layer in plan.layers[1:]]
    stops.append(stream.Stop("8", torch.arange(3)))

    def refit():
        smaller = copy.deepcopy(plain)
        return smaller, stream.refit_modules(model, smaller, stops, inputs, "least_squares")

    _, used = refit()
    assert used == {"2": 400, "6": 400, "8": 400}
    monkeypatch.setattr(batches, "HELD_BYTES", 2**22)
    runs = count_rows_run(model)
    some, used = refit()
    again, _ = refit()
    assert 8 <= used["2"] < 100
    assert used["6"] == used["8"] == 400
    assert sum(runs) == 2 * (400 + batches.LEAST_INPUTS)  # the first few are run beforehand, to see what there is
    for name, values in some.state_dict().items():
        assert torch.equal(values, again.state_dict()[name])
    assert squared_error(model, some, fresh) < 0.5 * squared_error(model, plain, fresh)
    monkeypatch.setattr(batches, "HELD_BYTES", 0)
    assert set(refit()[1].values()) == {batches.LEAST_INPUTS}


def count_rows_run(model):
    """By its first module."""
    runs = []
    model[0].register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    return runs


def test_positions_are_left_out_where_there_are_more_than_enough(monkeypatch):
    model, inputs = CONSUMERS["padded, strided"][1](), draw(400, 2, 7, 6)
    plan = draw_plan(model, inputs, seed=1)
    every = cn.prune(model, plan, inputs, compensate="least_squares")
    monkeypatch.setattr(least_squares, "ROW_LIMIT", least_squares.RowLimit(10, 1))
    some, again = (cn.prune(model, plan, inputs, compensate="least_squares") for _ in range(2))
    plain = cn.prune(model, plan, inputs)
    fresh = draw(200, 2, 7, 6, seed=5)
    errors = [squared_error(model, each, fresh).item() for each in (every, some, plain)]
    assert errors[0] < errors[1] < errors[2]
    assert torch.equal(some(fresh), again(fresh))


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_inputs_that_say_nothing_do_no_harm(name, value):
    """A singular system: the weights stay, and the bias alone keeps the outputs there."""
    shape, make = CONSUMERS[name]
    model, inputs = make(), torch.full((32, *shape), value, dtype=torch.float64)
    plan = draw_plan(model, inputs, seed=1)
    refitted = cn.prune(model, plan, inputs, compensate="least_squares")
    plain = cn.prune(model, plan, inputs)
    with torch.no_grad():
        assert all(torch.isfinite(values).all() for values in refitted.state_dict().values())
        assert squared_error(model, refitted, inputs) <= squared_error(model, plain, inputs) + ROUNDING


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize(("spread", "middle"), [(1e-2, 10.0), (1e-3, 200.0)])
def test_inputs_far_from_zero_in_single_precision(name, spread, middle):
    shape, make = CONSUMERS[name]
    model, inputs = make().float(), spread * draw(200, *shape).float() + middle
    plan = draw_plan(model, inputs, seed=1)
    refitted, shifted = (cn.prune(model, plan, inputs, compensate=each) for each in ("least_squares", "bias"))
    with torch.no_grad():
        assert squared_error(model, refitted, inputs) <= 1.01 * squared_error(model, shifted, inputs)


def test_nothing_removed_changes_nothing():
    model, inputs = CONSUMERS["linear"][1](), draw(32, 6)
    scores = cn.score(model, inputs[:2])
    smaller = cn.prune(model, cn.plan(scores, threshold=0.0), inputs, compensate="least_squares")
    for name, values in model.state_dict().items():
        assert torch.equal(values, smaller.state_dict()[name])


def test_the_given_model_stays_as_it_is_and_the_mode_is_kept():
    model, inputs = CONSUMERS["linear"][1]().float().train(), draw(32, 6).float()
    model[2].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    plan = draw_plan(model, inputs, seed=1)
    smaller = cn.prune(model, plan, inputs, compensate="least_squares")
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert smaller.training
    assert all(parameter.dtype == torch.float32 for parameter in smaller.parameters())
    assert not smaller[2].weight.requires_grad


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_unit_of_very_many_weights_is_refitted_through_products_of_rows(name, monkeypatch):
    shape, make = CONSUMERS[name]
    model, inputs = make(), draw(30, *shape)
    plan = draw_plan(model, inputs, seed=1)
    usual = cn.prune(model, plan, inputs, compensate="least_squares")
    monkeypatch.setattr(least_squares, "MOST_COLUMNS", 1)
    refitted = cn.prune(model, plan, inputs, compensate="least_squares")
    assert (usual(inputs) - refitted(inputs)).abs().max() <= 1e-6
    monkeypatch.setattr(least_squares, "MOST_ROWS", 20)
    coarser, plain = cn.prune(model, plan, inputs, compensate="least_squares"), cn.prune(model, plan, inputs)
    errors = [squared_error(model, each, inputs).item() for each in (refitted, coarser, plain)]
    assert errors[0] < errors[1] < errors[2]


def test_inputs_may_come_once():
    model, inputs = CONSUMERS["linear"][1](), draw(64, 6)
    plan = draw_plan(model, inputs, seed=1)
    once = cn.prune(model, plan, (part for part in inputs.split(16)), compensate="least_squares")
    assert torch.equal(once(inputs), cn.prune(model, plan, inputs, compensate="least_squares")(inputs))


def test_inputs_in_the_order_of_their_classes_have_all_of_them_held_out(monkeypatch):
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    nn.init.ones_(model[0].weight)
    inputs = torch.arange(1.0, 11.0, dtype=torch.float64).repeat_interleave(100)[:, None]
    seen = {}

    def begin(*args, **how):
        refit = least_squares.begin_refit(*args, **how)
        add = refit.add

        def listen(read, given, found, *, input_count: int, held_out: bool):
            seen.setdefault(held_out, []).append(read)
            add(read, given, found, input_count=input_count, held_out=held_out)

        refit.add = listen
        return refit

    monkeypatch.setattr(stream, "begin_refit", begin)
    cn.prune(model, draw_plan(model, inputs, seed=1), inputs, compensate="least_squares")
    for held_out in (True, False):
        assert len(torch.cat(seen[held_out]).unique(dim=0)) == 10


def test_progress_is_reported():
    model, inputs = CONSUMERS["linear"][1](), draw(32, 6)
    reported = []
    plan = draw_plan(model, inputs, seed=1)
    cn.prune(model, plan, inputs, compensate="bias", progress=reported.append)
    assert [(each.stage, each.done, each.total) for each in reported] == [("refitting", 0, 1), ("refitting", 1, 1)]


def test_what_a_user_may_get_wrong():
    model, inputs = CONSUMERS["linear"][1](), draw(32, 6)
    plan = draw_plan(model, inputs, seed=1)
    with pytest.raises(InvalidSettingError, match=r"compensate: found 'magic'\. Accepted: 'none', 'bias'"):
        cn.prune(model, plan, inputs, compensate="magic")
    with pytest.raises(InvalidInputError, match=r"calibration: found 4 inputs\. Give 8 or more"):
        cn.prune(model, plan, inputs, compensate="bias", calibration=inputs[:4])
    with pytest.raises(InvalidInputError, match=r"calibration: found inputs of shape \(5,\). Accepted: \(6,\), as"):
        cn.prune(model, plan, inputs, compensate="bias", calibration=draw(32, 5))
    with pytest.raises(PruningError, match="NaN or infinite"):
        cn.prune(model.float(), plan, inputs, compensate="least_squares", calibration=1e30 * inputs)


def test_weights_keep_their_memory_format():
    """Else a saved network, loaded, would round otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1))
    inputs = torch.rand(8, 2, 6, 6)
    for given in (model, copy.deepcopy(model).to(memory_format=torch.channels_last)):
        plan = cn.plan(cn.search(given, inputs, units=0.5, effort="quick"))
        plain, refitted = (
            cn.prune(given, plan, inputs, compensate=each).state_dict() for each in ("none", "least_squares")
        )
        assert {name: each.stride() for name, each in refitted.items()} == {
            name: each.stride() for name, each in plain.items()
        }

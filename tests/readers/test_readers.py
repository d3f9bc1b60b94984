"""Reading: what every layer becomes, what is left alone and why, what is refused; the model stays as it is."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import critical_neurons as cn
from critical_neurons.core.costs import count_cost
from critical_neurons.core.network import Affine, MaxPool, Relu
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.errors import InvalidInputError, InvalidSettingError, UnreadableModelError
from critical_neurons.readers import read_network, registry
from critical_neurons.readers.linear_maps import ScaleMap
from critical_neurons.readers.registry import KeepsChannels, Passes
from tests.zoo import MAX_POOLED, ZOO, build_model, draw_case, draw_inputs

LOGIT_TOLERANCE = 1e-10
"""Largest relative difference between the logits of a model and of the network read from it."""

ADJOINT_TOLERANCE = 1e-11
"""Largest relative difference between the two sides of an identity between linear maps."""

TRACE_NOISE = "While executing"
"""What torch.fx appends to errors in its interpreter; no message may carry it."""


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def vectors(count=3, size=4):
    return torch.rand(count, size, generator=torch.Generator().manual_seed(0))


def images(*shape):
    return torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))


class Forward(nn.Module):
    """Two linear layers and a forward of one's own."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def reason_of(network, name):
    (found,) = [layer for layer in network.layers if layer.name == name]
    return found.reason


def refuse(model, example=None, error=UnreadableModelError):
    """The message with which the model is refused."""
    with pytest.raises(error) as caught:
        read_network(model, vectors() if example is None else example)
    message = str(caught.value)
    assert TRACE_NOISE not in message
    return message


@pytest.mark.syntax
@pytest.mark.parametrize("name", ZOO)
def test_the_network_computes_what_the_model_computes(name):
    case = draw_case(name, count=7, seed=3)
    with torch.no_grad():
        expected = case.model(torch.from_numpy(case.inputs)).numpy()
    logits = ZOO[name].finish(torch.from_numpy(case.network.forward(case.inputs))).numpy()
    assert np.abs(logits - expected).max() <= LOGIT_TOLERANCE * max(1.0, np.abs(expected).max())
    assert any(isinstance(op, MaxPool) for op in case.network.ops) == (name in MAX_POOLED)


FORMS = {
    "F.relu": lambda m, x: F.relu(x),
    "F.relu in place": lambda m, x: F.relu(x, inplace=True),
    "torch.relu": lambda m, x: torch.relu(x),
    "torch.relu_": lambda m, x: torch.relu_(x),
    "relu method": lambda m, x: x.relu(),
    "relu_ method": lambda m, x: x.relu_(),
    "relu module in place": lambda m, x: m.relu(x),
    "clamp": lambda m, x: x.clamp(min=0),
    "clamp_ by position": lambda m, x: x.clamp_(0.0),
    "torch.clamp without an end": lambda m, x: torch.clamp(x, 0, float("inf")),
    "torch.clip": lambda m, x: torch.clip(x, min=0),
    "clamp_min": lambda m, x: x.clamp_min(0),
    "torch.clamp_min": lambda m, x: torch.clamp_min(x, 0),
    "F.threshold": lambda m, x: F.threshold(x, 0, 0),
    "F.threshold in place": lambda m, x: F.threshold(x, 0, 0, inplace=True),
    "threshold module": lambda m, x: m.threshold(x),
    "F.dropout that obeys the mode": lambda m, x: F.dropout(F.relu(x), 0.5, training=m.training),
    "contiguous": lambda m, x: F.relu(x).contiguous(),
    "reshape to the same shape": lambda m, x: F.relu(x).reshape(x.shape),
    "identity": lambda m, x: m.identity(F.relu(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_a_relu(form):
    model = Forward(
        lambda m, x: m.last(FORMS[form](m, m.first(x))),
        relu=nn.ReLU(inplace=True),
        threshold=nn.Threshold(0.0, 0.0),
        identity=nn.Identity(),
    )
    network = read_network(model.train(), vectors())
    assert [layer.name for layer in network.removable] == ["first"]
    assert reason_of(network, "last") == "it gives the network's output"
    assert np.array_equal(network.ops[2].units, np.arange(4))


CALCULATIONS = {
    "x + 1": (lambda m, x: x + 1, 1, 1),
    "1 + x": (lambda m, x: 1 + x, 1, 1),
    "x.add_(1)": (lambda m, x: x.add_(1), 1, 1),
    "torch.add": (lambda m, x: torch.add(x, other=m.number), 1, 3),
    "x - 1": (lambda m, x: x - 1, 1, -1),
    "1 - x": (lambda m, x: torch.sub(1, x), -1, 1),
    "x.sub_(1)": (lambda m, x: x.sub_(1), 1, -1),
    "x * 3": (lambda m, x: x * m.number, 3, 0),
    "3 * x": (lambda m, x: m.number * x, 3, 0),
    "x.mul(3)": (lambda m, x: x.mul(3), 3, 0),
    "x / 2": (lambda m, x: x / 2, 0.5, 0),
    "x.div_(2)": (lambda m, x: x.div_(2), 0.5, 0),
    "-x": (lambda m, x: -x, -1, 0),
    "by a parameter": (lambda m, x: x * m.parameter.reshape(1, 1), 7, 0),
    "by a vector": (lambda m, x: x - m.vector, 1, [0, -1, -2, -3]),
    "by a row": (lambda m, x: x * m.vector.view(1, -1), [0, 1, 2, 3], 0),
}


@pytest.mark.parametrize("how", CALCULATIONS)
def test_every_way_to_calculate_with_constants(how):
    calculate, scale, offset = CALCULATIONS[how]
    model = Forward(lambda m, x: m.last(F.relu(m.first(calculate(m, x)))))
    model.parameter, model.number = nn.Parameter(torch.tensor(7.0)), torch.tensor(3.0)
    model.register_buffer("vector", torch.arange(4.0))
    network = read_network(model, vectors())
    assert np.array_equal(network.ops[1].map.scale, np.broadcast_to(scale, 4))
    assert np.array_equal(network.ops[1].map.offset, np.broadcast_to(offset, 4))
    assert [layer.name for layer in network.removable] == ["first"]


def test_a_span_may_start_at_a_calculation():
    model = Forward(lambda m, x: m.last(F.relu(m.first(m.parameter.reshape(1, 1) * x))))
    model.parameter = nn.Parameter(torch.tensor(7.0))
    network = read_network(model, vectors(), start="mul")
    assert network.ops[1].name == "mul"


CEILINGS = {
    "ReLU6": (lambda m, x: m.relu6(x), 6),
    "F.relu6": (lambda m, x: F.relu6(x, inplace=True), 6),
    "Hardtanh": (lambda m, x: m.hardtanh(x), 0.5),
    "F.hardtanh": (lambda m, x: F.hardtanh(x, 0, 6), 6),
    "F.hardtanh_": (lambda m, x: F.hardtanh_(x, min_val=0), 1),
    "clamp": (lambda m, x: x.clamp(0, 0.5), 0.5),
    "torch.clamp": (lambda m, x: torch.clamp(x, max=2, min=0), 2),
}


@pytest.mark.parametrize("how", CEILINGS)
def test_every_way_to_write_a_relu_with_a_ceiling(how):
    """It is read as max(0, x) - max(0, x - c)."""
    rectify, ceiling = CEILINGS[how]
    model = Forward(
        lambda m, x: m.last(rectify(m, m.first(x))), relu6=nn.ReLU6(), hardtanh=nn.Hardtanh(0.0, 0.5, inplace=True)
    )
    network = read_network(model, vectors())
    lowered = next(op.map.offset for op in network.ops if isinstance(op, Affine) and isinstance(op.map, ScaleMap))
    assert np.array_equal(lowered, np.full(4, -ceiling))
    assert [layer.name for layer in network.removable] == ["first"]


def test_images_without_an_axis_of_channels_are_given_one():
    model = Forward(
        lambda m, x: m.last(F.relu(m.convolution(x.unsqueeze(1))).flatten(1)), convolution=nn.Conv2d(1, 2, 3)
    )
    assert [layer.name for layer in read_network(model, images(4, 3)).removable] == ["convolution"]


POOLS = {
    "AvgPool1d": (nn.AvgPool1d(2), (2, 5)),
    "AvgPool1d with padding": (nn.AvgPool1d(3, stride=1, padding=1), (2, 5)),
    "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(3), (2, 5)),
    "AvgPool2d": (nn.AvgPool2d((2, 3), stride=(1, 2)), (2, 5, 6)),
    "AvgPool2d that leaves padding out": (nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), (2, 5, 6)),
    "AvgPool2d that rounds up": (nn.AvgPool2d(2, ceil_mode=True), (2, 5, 5)),
    "AvgPool2d with a divisor": (nn.AvgPool2d(2, divisor_override=3), (2, 4, 4)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d((2, 3)), (2, 5, 7)),
    "AdaptiveMaxPool1d": (nn.AdaptiveMaxPool1d(3), (2, 5)),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d((2, 3)), (2, 5, 7)),
    "AdaptiveMaxPool2d to one": (nn.AdaptiveMaxPool2d(1), (2, 3, 2)),
    "AdaptiveMaxPool2d to more than there are": (nn.AdaptiveMaxPool2d((5, None)), (2, 3, 2)),
    "ZeroPad1d": (nn.ZeroPad1d((1, 2)), (2, 3)),
    "ZeroPad2d": (nn.ZeroPad2d((1, 0, 2, 3)), (2, 3, 2)),
    "ZeroPad2d that cuts off": (nn.ZeroPad2d((-1, 1, 0, -1)), (2, 3, 3)),
    "ConstantPad2d": (nn.ConstantPad2d(1, 0), (2, 2, 2)),
}


@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool):
    module, shape = POOLS[pool]
    convolution = (nn.Conv1d if len(shape) == 2 else nn.Conv2d)(shape[0], 3, 1)
    features = module(convolution(images(*shape))).flatten(1).shape[1]
    model = nn.Sequential(convolution, nn.ReLU(), module, nn.Flatten(), nn.Linear(features, 2)).double()
    inputs = images(*shape).double()
    network = read_network(model, inputs)
    with torch.no_grad():
        expected = model(inputs).numpy()
    assert np.abs(network.forward(inputs.numpy()) - expected).max() <= LOGIT_TOLERANCE
    assert [layer.name for layer in network.removable] == ["0"]


def test_layer_names_are_those_of_named_modules():
    model = build_model("nest")
    network = read_network(model, draw_inputs("nest", 2))
    names = [layer.name for layer in network.layers]
    assert names == ["features.0.convolution", "features.1.0.convolution", "head.hidden", "head.logits"]
    modules = dict(model.named_modules())
    assert [layer.kind for layer in network.layers] == [type(modules[name]).__name__ for name in names]
    assert [layer.size for layer in network.layers] == [2, 3, 3, 3]
    assert [layer.name for layer in network.removable] == names[:-1]


def test_a_unit_behind_a_batch_norm_belongs_to_its_convolution():
    network = draw_case("nest").network
    assert [layer.units.tolist() for layer in network.removable] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert not any(layer.kind.startswith("BatchNorm") for layer in network.layers)
    wirings = {wiring.module: wiring for wiring in network.structure.wirings}
    assert np.array_equal(wirings["features.0.norm"].inputs, wirings["features.0.convolution"].outputs)
    assert np.array_equal(wirings["features.1.0.convolution"].inputs, wirings["features.0.norm"].outputs)


def test_flattening_repeats_units_by_position():
    network = draw_case("flatten method").network
    (hidden,) = [wiring for wiring in network.structure.wirings if wiring.module == "hidden"]
    assert hidden.inputs.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_units_are_numbered_through_layer_by_layer():
    network = draw_case("mlp").network
    relus = [op for op in network.ops if isinstance(op, Relu)]
    assert [op.units.tolist() for op in relus] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert {layer.name: layer.units.tolist() for layer in network.layers} == {
        "0": [0, 1, 2, 3, 4],
        "2": [5, 6, 7, 8],
        "4": [NO_UNIT] * 3,
    }
    assert network.group_sizes == (5, 4)
    assert network.unit_count == 9


def test_modules_that_no_output_depends_on_have_no_scores_but_cost():
    model = Forward(
        lambda m, x: (m.dead(x), m.last(F.relu(m.first(x))))[1], dead=nn.Linear(4, 6), idle=nn.Linear(9, 9)
    )
    network = read_network(model, vectors())
    assert reason_of(network, "dead") == "the outputs do not depend on it"
    assert [layer.name for layer in network.removable] == ["first"]
    assert np.array_equal(network.ops[2].units, np.arange(4))
    everything = count_cost(network.structure, np.ones(5), "params")
    assert everything == sum(parameter.numel() for parameter in model.parameters())
    span = read_network(model, vectors(), start="first")
    assert count_cost(span.structure, np.ones(5), "params") == 4 * 5 + 3 * 5


def test_a_second_relu_gates_nobody():
    network = draw_case("relu twice").network
    first, second = [op for op in network.ops if isinstance(op, Relu)]
    assert first.units.tolist() == [0, 1, 2, 3]
    assert set(second.units.reshape(-1).tolist()) == {NO_UNIT}


def test_bias_free_layers_have_no_offset():
    network = draw_case("mlp without biases").network
    zero = np.zeros((1, *network.input_shape))
    assert np.array_equal(network.forward(zero), np.zeros((1, network.class_count)))


SHAPED = {
    "squeeze": lambda m, x: x[:, :, None, None].squeeze(3).squeeze(-1),
    "squeeze of two": lambda m, x: torch.squeeze(torch.unsqueeze(x, -1)[..., None], dim=(2, -1)),
    "index": lambda m, x: x.unsqueeze(2).unsqueeze(3)[:, :, 0, -1],
    "index from the end": lambda m, x: x[:, :, None][..., 0],
    "index of everything": lambda m, x: x[:][:, :],
    "unflatten": lambda m, x: x.unflatten(1, (-1, 1)).flatten(1),
    "torch.unflatten": lambda m, x: torch.unflatten(x[:, :, None], 2, (1, 1)).flatten(1),
    "unflatten module": lambda m, x: m.unflatten(x).flatten(1),
}


@pytest.mark.parametrize("how", SHAPED)
def test_every_way_to_add_and_take_away_axes_of_one(how):
    model = Forward(lambda m, x: m.last(SHAPED[how](m, F.relu(m.first(x)))), unflatten=nn.Unflatten(-1, (-1, 1)))
    network = read_network(model, vectors())
    assert [layer.name for layer in network.removable] == ["first"]
    assert [wiring.inputs.tolist() for wiring in network.structure.wirings][-1] == [0, 1, 2, 3]


REASONS = {
    "channels squeezed away if one is left": (
        lambda: Forward(lambda m, x: m.last(F.relu(m.first(x)).squeeze(1))),
        (4,),
        "first",
        "it feeds squeeze, which takes the channels' axis away if one is left",
    ),
    "unflattened by number": (
        lambda: Forward(lambda m, x: m.last(F.relu(m.first(x)).unflatten(1, (4, 1)).flatten(1))),
        (4,),
        "first",
        "it feeds unflatten, which has the size 4 written into it; write -1",
    ),
    "none: positions unflattened by number": (
        lambda: nn.Sequential(
            *(nn.Conv1d(1, 3, 1), nn.ReLU(), nn.Unflatten(2, (2, 2)), nn.Conv2d(3, 2, 2), nn.Flatten())
        ),
        (1, 4),
        "0",
        "",
    ),
    "no ReLU between": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)),
        (4,),
        "0",
        "no ReLU stands between it and 1",
    ),
    "none: batch norm behind the ReLU": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        (4,),
        "0",
        "",
    ),
    "depthwise convolution of the input": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)),
        (2, 2, 2),
        "0",
        "it filters channels that must stay, one by one",
    ),
    "none: grouped convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)),
        (4, 2, 2),
        "0",
        "",
    ),
    "none: feeds a grouped convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        ),
        (1, 2, 2),
        "0",
        "",
    ),
    "gives the output": (mlp, (4,), "2", "it gives the network's output"),
    "gives the output through a pool": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (1, 2, 2),
        "0",
        "it gives the network's output",
    ),
    "none: flattened positions keep their channels": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Flatten(2), nn.Conv1d(3, 2, 4), nn.Flatten()),
        (1, 2, 2),
        "0",
        "",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_reasons_to_leave_a_layer_alone(case):
    build, shape, layer, expected = REASONS[case]
    torch.manual_seed(0)
    network = read_network(build(), images(*shape))
    found = reason_of(network, layer)
    assert expected in found
    assert bool(expected) == bool(found)
    assert any(line.startswith(f"{layer} ") and line.endswith(found or "yes") for line in str(network).splitlines())


def test_a_reshape_of_positions_into_channels_is_left_alone():
    def forward(model, x):
        return model.head(F.relu(model.convolution(x)).reshape(x.shape[0], x.shape[2], -1)).flatten(1)

    model = Forward(forward, convolution=nn.Conv2d(1, 3, 1), head=nn.Conv1d(2, 1, 1))
    network = read_network(model, images(1, 2, 2))
    assert reason_of(network, "convolution") == "its channels are mixed with positions where head reads them"


def test_a_view_with_a_size_written_into_it_names_itself_and_the_size():
    model = Forward(
        lambda m, x: m.head(F.relu(m.convolution(x)).view(-1, 12)),
        convolution=nn.Conv2d(1, 3, 1),
        head=nn.Linear(12, 2),
    )
    found = reason_of(read_network(model, images(1, 2, 2)), "convolution")
    assert "view" in found
    assert "12" in found
    assert "flatten(1)" in found


def test_a_view_with_a_size_written_into_it_counts_even_where_it_does_nothing():
    model = Forward(lambda m, x: m.last(F.relu(m.first(x)).view(-1, 4)))
    assert "size 4 written into it" in reason_of(read_network(model, vectors()), "first")


def test_ignored_layers():
    model, inputs = build_model("mlp"), draw_inputs("mlp", 2)
    network = read_network(model, inputs, ignore=("0",))
    assert reason_of(network, "0") == "ignored, as asked"
    assert [layer.name for layer in network.removable] == ["2"]
    assert [op.units.tolist() for op in network.ops if isinstance(op, Relu)] == [[NO_UNIT] * 5, [0, 1, 2, 3]]
    with pytest.raises(InvalidSettingError, match=r"ignore: no layer is called 0\.weight, nothing\. Layers: 0, 2, 4"):
        read_network(model, inputs, ignore=("0.weight", "nothing"))


def test_inspect_takes_the_name_of_one_layer():
    model = Forward(lambda m, x: m.last(F.relu(m.first(x))))
    assert reason_of(cn.inspect(model, vectors(), ignore="first"), "first") == "ignored, as asked"


def test_inspect_shows_every_layer_with_its_fate():
    shown = str(cn.inspect(build_model("view by number"), draw_inputs("view by number", 2).numpy())).splitlines()
    assert len(shown) == 3
    assert shown[0].startswith("convolution")
    assert "2 units" in shown[0]
    assert "Is a size written into its forward? (zoo.py:" in shown[0]
    assert shown[1].startswith("hidden")
    assert shown[1].endswith("yes")
    assert shown[2].endswith("it gives the network's output")


@pytest.mark.parametrize("name", ["softmax", "log softmax"])
def test_a_final_softmax_is_left_out_and_said(name):
    network = draw_case(name).network
    (note,) = network.notes
    assert "softmax" in note
    assert "left out" in note
    assert note in str(network)


def test_a_softmax_over_the_batch_is_no_final_softmax():
    message = refuse(nn.Sequential(*mlp(), nn.Softmax(dim=0)))
    assert message.startswith("3")


def test_a_softmax_in_the_middle_is_refused():
    assert "last step" in refuse(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1), nn.Linear(3, 2)))


def test_notes_are_empty_without_a_softmax():
    assert draw_case("mlp").network.notes == ()


def snapshot(model):
    return {
        "state": {name: values.clone() for name, values in model.state_dict().items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: p.requires_grad for name, p in model.named_parameters()},
        "identities": {name: id(p) for name, p in model.named_parameters()},
        "devices": {name: (v.device, v.dtype) for name, v in model.state_dict().items()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        },
        "random": torch.get_rng_state(),
    }


def assert_unchanged(model, before):
    after = snapshot(model)
    assert before.pop("state").keys() == after["state"].keys()
    assert torch.equal(before.pop("random"), after["random"])
    for key, value in before.items():
        assert after[key] == value, key


@pytest.mark.parametrize("name", ["nest", "mlp with batch norm and dropout", "flatten method"])
def test_the_model_is_never_changed(name):
    model = build_model(name).float().train()
    last = list(model.modules())[-1]
    last.eval()  # modes that differ from module to module
    next(model.parameters()).requires_grad_(False)
    last.register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    values = copy.deepcopy(before["state"])
    inputs = draw_inputs(name, 4)
    kept = inputs.clone()
    scores = cn.score(model, inputs, solver=cn.Solver(threads=1))
    plan = cn.plan(scores, units=0.5)
    cn.inspect(model, inputs)
    cn.mask(model, plan)
    cn.prune(model, plan, inputs)
    assert_unchanged(model, before)
    assert all(torch.equal(values[key], model.state_dict()[key]) for key in values)
    assert torch.equal(inputs, kept)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_unchanged_when_it_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    before = snapshot(model)
    refuse(model)
    assert_unchanged(model, before)


def test_an_unreadable_layer_is_named_with_the_way_out():
    message = refuse(nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.GELU()), nn.Linear(3, 2)))
    assert message.startswith("1.0: cannot read GELU. Readable layers: ")
    for name in ("Linear", "Conv1d", "Conv2d", "BatchNorm1d", "BatchNorm2d", "ReLU", "AvgPool2d", "Flatten"):
        assert name in message
    assert "@critical_neurons.reads(GELU)" in message


UNREADABLE = {
    "function": (lambda m, x: m.last(torch.tanh(m.first(x))), "tanh"),
    "method": (lambda m, x: m.last(m.first(x).sigmoid()), "sigmoid"),
    "multiplication": (lambda m, x: m.last(F.relu(m.first(x)) * x), "mul"),
    "clamp from above zero": (lambda m, x: m.last(m.first(x).clamp(1, 2)), "clamp: a clamp from 1 to 2."),
    "clamp without a positive end": (lambda m, x: m.last(m.first(x).clamp(max=0)), "clamp: a clamp from None to 0."),
    "clamp to nothing": (lambda m, x: m.last(m.first(x).clamp(0, 0)), "clamp: a clamp from 0 to 0."),
    "clamp by a tensor": (lambda m, x: m.last(torch.clamp(m.first(x), torch.zeros(4))), "clamp: a clamp from tensor"),
    "clamp by a size": (lambda m, x: m.last(m.first(x).clamp(0, x.shape[0])), "clamp: it calculates with a size"),
    "threshold": (lambda m, x: m.last(F.threshold(m.first(x), 1, 0)), "threshold: a threshold 1 with the value 0."),
    "padding of the batch": (lambda m, x: m.last(F.pad(m.first(x), (0, 0, 1, 0))), "pad: padding by (0, 0, 1, 0)"),
    "maximum of features": (
        lambda m, x: m.last(m.first(x).amax(1, keepdim=True) * torch.ones(4)),
        "amax: a maximum over",
    ),
    "maximum of everything": (lambda m, x: m.last(m.first(x).amax() + x), "amax: a maximum over the axes None"),
    "squeeze without an axis": (lambda m, x: m.last(m.first(x).squeeze()), "squeeze: a squeeze that takes the batch"),
    "squeeze of the batch": (lambda m, x: m.last(m.first(x).squeeze(-2)), "squeeze: a squeeze that takes the batch"),
    "part of the batch": (lambda m, x: m.last(m.first(x)[0]), "getitem: it takes a part of (batch, 4)"),
    "further axis before the batch": (
        lambda m, x: m.last(m.first(x)[None]),
        "getitem: it takes a part of (batch, 4) along the batch axis",
    ),
    "batch axis divided": (
        lambda m, x: m.last(m.first(x).unflatten(0, (3, 1)).flatten(1)),
        "unflatten: it divides the batch axis",
    ),
    "constant per data point": (lambda m, x: m.last(m.first(x) * torch.ones(3, 1)), "mul: it combines"),
    "constant in a concatenation": (
        lambda m, x: m.last(torch.cat([m.first(x), torch.ones(3, 1)], 1)[:, :4]),
        "cat: it reads a tensor that does not come from the input",
    ),
    "mean over the batch": (lambda m, x: m.last(m.first(x).mean(0, keepdim=True)), "mean"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_functions_are_named(case):
    forward, name = UNREADABLE[case]
    assert name in refuse(Forward(forward))


def test_a_subclass_with_its_own_forward_is_refused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    message = refuse(nn.Sequential(Doubled(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert message.startswith("0: cannot read Doubled, a subclass of a readable layer with a forward of its own.")
    assert "@critical_neurons.reads(Doubled)" in message


def test_a_subclass_that_inherits_forward_is_read():
    class Named(nn.Linear):
        pass

    network = read_network(nn.Sequential(Named(4, 3), nn.ReLU(), nn.Linear(3, 2)), vectors())
    assert [(layer.name, layer.kind) for layer in network.removable] == [("0", "Named")]


@pytest.fixture
def readers():
    """The registry, put back afterwards."""
    before = dict(registry._readers)
    yield registry._readers
    registry._readers.clear()
    registry._readers.update(before)


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_a_registered_reader_is_used(readers):
    @cn.reads(Scale)
    def read_scale(call):
        size = call.input_shape[0]
        return KeepsChannels(ScaleMap(np.full(size, call.module.factor), np.zeros(size)))

    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Scale(2.5), nn.Linear(3, 2)).double()
    inputs = vectors().double()
    network = read_network(model, inputs)
    assert [layer.name for layer in network.removable] == ["0"]
    scores = cn.score(model, inputs, solver=cn.Solver(threads=1))
    smaller = cn.prune(model, cn.plan(scores, units=0.5), inputs)
    assert smaller[0].out_features == 1


def test_a_registered_function_and_method_are_used(readers):
    cn.reads(torch.clone, "clone")(lambda call: Passes())
    for clone in (torch.clone, lambda x: x.clone()):
        network = read_network(Forward(lambda m, x, clone=clone: m.last(F.relu(clone(m.first(x))))), vectors())
        assert [layer.name for layer in network.removable] == ["first"]


def test_a_wrong_reader_is_found_out(readers):
    torch.manual_seed(0)  # some of the ReLUs must be live
    cn.reads(Scale)(lambda call: Passes())
    message = refuse(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Scale(2.5), nn.Linear(3, 2)))
    assert "other logits than the model" in message


def test_a_layer_with_its_own_reader_and_parameters_keeps_its_units(readers):
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x):
            return x * self.gain

    @cn.reads(Gain)
    def read_gain(call):
        return KeepsChannels(ScaleMap(call.module.gain.detach().numpy(), np.zeros(3)))

    network = read_network(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Gain(), nn.Linear(3, 2)), vectors())
    assert "cannot be sliced" in reason_of(network, "0")


def test_an_untraceable_forward_is_explained():
    def forward(model, x):
        return model.last(F.relu(x)) if x.sum() > 0 else model.last(x)

    message = refuse(Forward(forward))
    assert "cannot be traced by torch.fx" in message
    assert "Forward" in message


def test_a_tuple_is_refused():
    assert "returns a tuple; a single tensor of logits" in refuse(Forward(lambda m, x: (m.last(x), x)))


def test_a_dictionary_is_refused():
    message = refuse(Forward(lambda m, x: {"logits": m.last(x)}))
    assert "returns a dict; a single tensor of logits (batch, classes) is read. Wrap it in a module" in message


ENDS = {
    "one output": [],
    "an axis less": [nn.Flatten(0)],
    "a sigmoid": [nn.Sigmoid()],
    "an axis less and a sigmoid": [nn.Flatten(0), nn.Sigmoid()],
}


@pytest.mark.parametrize("end", ENDS)
def test_one_output_is_read(end):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1), *ENDS[end]).double()
    inputs = torch.rand(5, 4, dtype=torch.float64)
    network = read_network(model, inputs)
    assert network.class_count == 1
    assert any("(sigmoid) is left out" in note for note in network.notes) == ("sigmoid" in end)
    with torch.no_grad():
        assert np.allclose(network.forward(inputs.numpy()), model[:3](inputs).numpy(), rtol=0, atol=1e-12)


def test_an_output_taken_by_its_number_is_read():
    model = Forward(lambda m, x: m.last(m.first(x))[:, 1]).double()
    inputs = torch.rand(5, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = model(inputs).numpy()[:, None]
    assert np.allclose(read_network(model, inputs).forward(inputs.numpy()), expected, rtol=0, atol=1e-12)


def test_outputs_that_are_no_logits_are_refused():
    assert "shape (3, 2, 3, 3)" in refuse(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()), images(1, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype):
    message = refuse(mlp().to(dtype))
    assert message.startswith("0.weight: half precision")
    assert "model.float()" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named(bad):
    model = build_model("nest")
    model.head["hidden"].bias.data[1] = bad
    message = refuse(model, draw_inputs("nest", 2), InvalidInputError)
    assert message == "head.hidden.bias: the model has NaN or infinite weights."


def test_statistics_that_are_not_numbers_are_named():
    model = build_model("nest")
    model.features[0].norm.running_var[0] = float("inf")
    assert refuse(model, draw_inputs("nest", 2), InvalidInputError).startswith("features.0.norm.running_var")


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "both": lambda model: torch.compile(nn.DataParallel(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_taken_off(wrapper):
    model = mlp()
    wrapped = WRAPPERS[wrapper](model)
    network = read_network(wrapped, vectors())
    assert [layer.name for layer in network.layers] == ["0", "2"]
    assert network.fingerprint == read_network(model, vectors()).fingerprint
    scores = cn.score(wrapped, vectors(), solver=cn.Solver(threads=1))
    plan = cn.plan(scores, units=0.5)
    assert type(cn.prune(wrapped, plan, vectors())) is nn.Sequential
    assert type(cn.mask(wrapped, plan)) is nn.Sequential


def test_a_module_called_twice_is_refused():
    message = refuse(Forward(lambda m, x: m.last(F.relu(m.first(F.relu(m.first(x)))))))
    assert message.startswith("first: this module is called more than once")


def test_a_relu_module_may_be_called_twice():
    model = Forward(lambda m, x: m.last(m.relu(m.middle(m.relu(m.first(x))))), relu=nn.ReLU(), middle=nn.Linear(4, 4))
    assert [layer.name for layer in read_network(model, vectors()).removable] == ["first", "middle"]


def test_shared_weights_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    assert refuse(model).startswith("2: it shares weights with 0")


def test_parametrised_weights_are_refused():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    message = refuse(model)
    assert message.startswith("0: its weights are parametrised")
    assert "remove_parametrizations" in message


HOOKED = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda module: prune.random_unstructured(module, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", HOOKED)
def test_weights_computed_by_hooks_are_refused(how):
    model = mlp()
    HOOKED[how](model[0])
    assert "0" in refuse(model)


def test_lazy_modules_are_refused():
    message = refuse(nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2)))
    assert message.startswith("0.weight: not initialised yet")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_script_modules_are_refused():
    assert "TorchScript" in refuse(torch.jit.script(mlp()))


def test_something_else_than_a_module_is_refused():
    assert refuse(lambda x: x) == "model: found function, expected a torch.nn.Module."


def test_batch_norm_without_statistics_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.ReLU(), nn.Linear(3, 2))
    assert refuse(model).startswith("1: a batch norm without running statistics")


def test_other_padding_modes_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten())
    assert "padding_mode='reflect'" in refuse(model, images(1, 4, 4))


PADDINGS = {
    "a number": lambda x: F.pad(x, (1, 1), value=1.0),
    "reflections": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "channels and positions": lambda x: F.pad(x, (0, 1, 0, 0, 1, 0)),
}


@pytest.mark.parametrize("how", PADDINGS)
def test_padding_by_other_than_zeros_around_positions_is_refused(how):
    model = Forward(lambda m, x: m.convolution(PADDINGS[how](x)).flatten(1), convolution=nn.LazyConv2d(2, 2))
    with torch.no_grad():
        model(images(1, 3, 3))
    message = refuse(model, images(1, 3, 3))
    assert message.startswith("pad: padding by (")
    assert "One with zeros is read, around positions" in message


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp(), (5,)),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), (1, 4, 4)),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), (1, 5, 5)),
        (nn.Sequential(nn.BatchNorm1d(4), *mlp()), (4, 3, 3)),
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,)),
    ],
    ids=["features", "channels", "positions", "batch norm", "axes"],
)
def test_inputs_of_the_wrong_shape_are_refused(model, shape):
    message = refuse(model, images(*shape), InvalidInputError)
    assert "does not run on inputs of shape" in message
    assert str((3, *shape)) in message


@pytest.mark.parametrize("example", [torch.rand(4), torch.rand(0, 4), np.zeros((2, 4))], ids=["row", "none", "array"])
def test_an_example_that_is_no_batch_is_refused(example):
    with pytest.raises(InvalidInputError, match=r"example: give a batch of inputs"):
        read_network(mlp(), example)


def test_a_forward_of_several_inputs_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, x, y):
            return self.last(F.relu(x + y))

    message = refuse(Pair())
    assert "y" in message
    assert "several inputs" in message


def test_a_further_argument_at_its_default_is_read():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x, mask=None):
            return self.last(F.relu(self.first(x)))

    assert [layer.name for layer in read_network(Optional(), vectors()).removable] == ["first"]


def test_a_forward_that_touches_the_batch_axis_is_refused():
    assert "batch axis" in refuse(Forward(lambda m, x: m.last(F.relu(m.first(x)).reshape(-1, 3, 4).flatten(0, 1))))


HOOKS = {
    "layer": lambda model: model[0],
    "relu": lambda model: model[1],
    "whole model": lambda model: model,
}


@pytest.mark.parametrize("place", HOOKS)
def test_hooks_that_change_outputs_are_detected(place):
    model = mlp()
    HOOKS[place](model).register_forward_hook(lambda module, args, output: output * 1.01)
    message = refuse(model)
    assert "other logits than the model" in message
    assert "Hooks" in message


def test_hooks_behind_a_final_softmax_are_detected():
    model = nn.Sequential(*mlp(), nn.Softmax(dim=1))
    model.register_forward_hook(lambda module, args, output: output.flip(1))
    assert "Hooks" in refuse(model)


def test_hooks_that_only_look_are_fine():
    seen, model = [], mlp()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert read_network(model, vectors()).unit_count == 5


def test_dropout_that_is_always_on_is_refused():
    message = refuse(Forward(lambda m, x: m.last(F.dropout(m.first(x), 0.5))))
    assert "dropout that stays on" in message
    assert "training=self.training" in message


@pytest.mark.parametrize("name", ZOO)
def test_adjoints_absolute_maps_and_offsets(name):
    """<A x, y> = <x, A' y>; |A| x >= |A x| with equality where nothing cancels; apply = A x + b."""
    generator = np.random.default_rng(0)
    network = draw_case(name).network
    affine = [op for op in network.ops if isinstance(op, Affine)]
    assert affine
    for op in affine:
        shape = network.ops[op.source].shape
        x, y = generator.normal(size=(2, *shape)), generator.normal(size=(2, *op.shape))
        image, back = op.map.apply_linear(x), op.map.adjoint(y)
        assert image.shape == (2, *op.shape)
        assert back.shape == (2, *shape)
        for one in range(2):  # data point by data point: no mixing
            left, right = np.vdot(image[one], y[one]), np.vdot(x[one], back[one])
            assert abs(left - right) <= ADJOINT_TOLERANCE * (1 + np.abs(image * y).sum())
        offset = op.map.apply(np.zeros((1, *shape)))
        assert np.abs(op.map.apply(x) - image - offset).max() <= ADJOINT_TOLERANCE * (1 + np.abs(image).max())

        columns = np.eye(int(np.prod(shape))).reshape(-1, *shape)
        matrix = op.map.apply_linear(columns)
        absolute = np.tensordot(np.abs(x).reshape(2, -1), np.abs(matrix), axes=1)
        found = op.map.apply_absolute(np.abs(x))
        assert np.abs(found - absolute).max() <= ADJOINT_TOLERANCE * (1 + absolute.max())


def test_reading_works_under_no_grad_and_inference_mode():
    with torch.inference_mode():
        assert read_network(mlp(), vectors()).unit_count == 5
    with torch.no_grad():
        assert read_network(mlp(), vectors()).unit_count == 5


def test_maps_carry_no_gradients():
    """Values are arrays and detached tensors: whoever evaluates the network needs no torch.no_grad."""
    for name in ("nest", "convolution in one dimension"):
        network = draw_case(name).network
        for op in network.ops:
            if isinstance(op, Affine):
                tensors = [value for value in vars(op.map).values() if isinstance(value, torch.Tensor)]
                assert not any(value.requires_grad for value in tensors)
        with torch.enable_grad():
            network.forward(draw_inputs(name, 2).numpy())


def test_nouns_do_not_import_torch():
    code = (
        "import sys, critical_neurons.core.network, critical_neurons.core.program, critical_neurons.core.scores, "
        "critical_neurons.core.plan, critical_neurons.core.batch, critical_neurons.core.settings, "
        "critical_neurons.selection.plan_rules\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

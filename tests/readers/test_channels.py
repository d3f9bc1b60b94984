"""Channels: which layers share units, which are left alone and why, which graphs are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import critical_neurons as cn
from critical_neurons.core.plan import Plan
from critical_neurons.errors import PlanMismatchError, UnreadableModelError
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.readers import read_network

ROUNDING = 1e-10
SHAPE = (1, 4, 4)


class Graph(nn.Module):
    """Three convolutions of four channels, a linear head, and a forward of one's own."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 4, 1), nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1)
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, x):
        return self.head(self.run(self, x).flatten(1)) if "head" in self._modules else self.run(self, x)


def build(forward, **modules):
    """With weights that are no special numbers, a head that fits, in float64 and evaluation mode."""
    torch.manual_seed(0)
    model = Graph(forward, **modules)
    size = math.prod(model(torch.rand(2, *SHAPE)).shape[1:])
    model.add_module("head", nn.Linear(size, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    return model.double().eval()


def example(count=3):
    return torch.randn(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def reasons(model):
    return {layer.name: layer.reason for layer in read_network(model, example()).layers}


def refuse(forward, **modules):
    with pytest.raises(UnreadableModelError) as caught:
        read_network(build(forward, **modules), example())
    return str(caught.value)


OUTPUT = "it gives the network's output"

REASONS = {
    "added to the input": (
        lambda m, x: F.relu(m.one(x) + x),
        {"one": nn.Conv2d(1, 1, 1)},
        {"one": "add adds it to channels that must stay"},
    ),
    "added to what a layer reads without a ReLU": (
        lambda m, x: F.relu(F.relu(m.a(x)) + (y := m.b(x))) + F.relu(m.c(y)),
        {},
        {
            "b": "no ReLU stands between it and c",
            "a": "it shares its channels with b: no ReLU stands between it and c",
            "c": "it shares its channels with b",
        },
    ),
    "a constant that is padded": (
        lambda m, x: F.relu(m.next(m.norm(F.relu(m.a(x))))),
        {"norm": nn.BatchNorm2d(4), "next": nn.Conv2d(4, 2, 3, padding=1)},
        {"a": "next pads the constant its removal would leave", "next": ""},
    ),
    "a constant that is not": (
        lambda m, x: F.relu(m.next(m.norm(F.relu(m.a(x))))),
        {"norm": nn.BatchNorm2d(4), "next": nn.Conv2d(4, 2, 3)},
        {"a": "", "next": ""},
    ),
    "a constant that a depthwise convolution pads": (
        lambda m, x: F.relu(m.next(m.norm(F.relu(m.a(x))))),
        {"norm": nn.BatchNorm2d(4), "next": nn.Conv2d(4, 4, 3, padding=1, groups=4)},
        {"a": "next pads the constant", "next": "it shares its channels with a: next pads the constant"},
    ),
    "a constant that an average pool pads": (
        lambda m, x: m.pool(m.norm(F.relu(m.a(x)))),
        {"norm": nn.BatchNorm2d(4), "pool": nn.AvgPool2d(2, padding=1)},
        {"a": "pool pads the constant its removal would leave"},
    ),
    "a constant that an average pool keeps": (
        lambda m, x: m.pool(m.norm(F.relu(m.a(x)))),
        {"norm": nn.BatchNorm2d(4), "pool": nn.AvgPool2d(2, padding=1, count_include_pad=False)},
        {"a": ""},
    ),
    "no constant without a batch norm": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x)))),
        {"next": nn.Conv2d(4, 2, 3, padding=1)},
        {"a": "", "next": ""},
    ),
    "a number behind the ReLU": (lambda m, x: F.relu(m.c(2 * F.relu(m.a(x)) - 1)), {}, {"a": "", "c": ""}),
    "a number before the ReLU": (
        lambda m, x: F.relu(m.c(F.relu(m.a(x) + 1.0))),
        {},
        {"a": "no ReLU stands between it and the constant of add", "c": ""},
    ),
    "a factor before the ReLU": (lambda m, x: F.relu(m.c(F.relu(-m.a(x) / 3))), {}, {"a": "", "c": ""}),
    "a number that is padded": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x)) + 1)),
        {"next": nn.Conv2d(4, 2, 3, padding=1)},
        {"a": "next pads the constant its removal would leave", "next": ""},
    ),
    "a number that is padded by itself": (
        lambda m, x: F.relu(m.c(F.pad(F.relu(m.a(x)) + 1, (1, 1)))),
        {},
        {"a": "pad pads the constant its removal would leave", "c": ""},
    ),
    "a number that is cut off": (
        lambda m, x: F.relu(m.c(F.pad(F.relu(m.a(x)) + 1, (-1, -1)))),
        {},
        {"a": "", "c": ""},
    ),
    "a factor that is padded": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x)) * 2)),
        {"next": nn.Conv2d(4, 2, 3, padding=1)},
        {"a": "", "next": ""},
    ),
    "a number that is max pooled": (lambda m, x: F.max_pool2d(F.relu(m.a(x)) * 2 + 1, 2), {}, {"a": ""}),
    "a number added on one of two ways": (
        lambda m, x: F.relu(F.relu(m.a(x)) + 1) + F.relu(m.b(x)),
        {},
        {"a": "", "b": ""},
    ),
    "a number under a ceiling": (lambda m, x: F.relu6(F.relu(m.a(x)) + 7), {}, {"a": ""}),
    "a batch norm under a ceiling": (
        lambda m, x: F.relu6(5 + m.norm(F.relu(m.a(x)))),
        {"norm": nn.BatchNorm2d(4)},
        {"a": ""},
    ),
    "a number for every channel": (
        lambda m, x: F.relu(m.c(F.relu(m.a(x)) * torch.arange(4).reshape(4, 1, 1))),
        {},
        {"a": "it feeds mul, whose constants, one per channel, cannot be sliced", "c": ""},
    ),
    "a constant that is added before a ReLU": (
        lambda m, x: F.relu(m.norm(F.relu(m.a(x))) + m.b(x)),
        {"norm": nn.BatchNorm2d(4)},
        {"a": "add adds the constant its removal would leave before a ReLU", "b": "add adds the constant"},
    ),
    "a reshape that mixes": (
        lambda m, x: m.next(F.relu(m.three(x)).reshape(x.shape[0], x.shape[2], -1)),
        {"three": nn.Conv2d(1, 3, 1), "next": nn.Conv1d(4, 2, 1)},
        {"three": "its channels are mixed with positions where next reads them"},
    ),
    "a max pool on values without a ReLU": (
        lambda m, x: F.relu(m.c(F.max_pool2d(m.a(x), 2))),
        {},
        {"a": "no ReLU stands between it and c", "c": ""},
    ),
    "a difference": (lambda m, x: F.relu(m.c(F.relu(m.a(x) - m.b(x)))), {}, {"a": "", "b": "", "c": ""}),
    "a difference from a constant": (
        lambda m, x: F.relu(m.c((F.relu(m.a(x)) + 1) - F.relu(m.b(x)))),
        {},
        {"a": "", "b": "", "c": ""},
    ),
    "the larger without a ReLU": (
        lambda m, x: F.relu(m.c(torch.maximum(m.a(x), m.b(x)))),
        {},
        {"a": "no ReLU stands between it and c", "b": "no ReLU stands between it and c", "c": ""},
    ),
    "the larger of constants": (
        lambda m, x: F.relu(m.c(torch.maximum(F.relu(m.a(x)) + 1, F.relu(m.b(x)) - 1))),
        {},
        {"a": "", "b": "", "c": ""},
    ),
    "the larger of what must stay": (
        lambda m, x: F.relu(m.next(torch.minimum(F.relu(m.one(x)), x))),
        {"one": nn.Conv2d(1, 1, 1), "next": nn.Conv2d(1, 2, 1)},
        {"one": "minimum compares it to channels that must stay"},
    ),
    "one slope": (lambda m, x: F.relu(m.c(m.slope(m.a(x)))), {"slope": nn.PReLU()}, {"a": "", "c": ""}),
    "a slope for every channel": (
        lambda m, x: F.relu(m.c(m.slope(m.a(x)))),
        {"slope": nn.PReLU(4)},
        {"a": "", "c": ""},
    ),
    "a constant behind a slope": (
        lambda m, x: F.relu(m.c(F.leaky_relu(F.leaky_relu(m.a(x)) - 1, 0.5))),
        {},
        {"a": "", "c": ""},
    ),
    "a slice of the channels": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x))[:, 1:])),
        {"next": nn.Conv2d(3, 2, 1)},
        {"a": "slice takes a part of its channels", "next": ""},
    ),
    "parts of the channels": (
        lambda m, x: F.relu((y := F.relu(m.a(x)).chunk(2, 1))[0] + m.next(y[1])),
        {"next": nn.Conv2d(2, 2, 1)},
        {"a": "", "next": ""},
    ),
    "slices of positions": (lambda m, x: F.relu(m.c(F.relu(m.a(x))[:, :, 1:, ::2])), {}, {"a": "", "c": ""}),
    "parts of positions": (
        lambda m, x: F.relu(m.c((y := F.relu(m.a(x)).unbind(2))[0][:, :, None])) + y[1][:, :, None],
        {},
        {"a": "", "c": ""},
    ),
    "zeros beside channels that a layer reads": (
        lambda m, x: F.relu(m.next(F.pad(F.relu(m.a(x)), (0, 0, 0, 0, 2, 1)))),
        {"next": nn.Conv2d(7, 2, 1)},
        {"a": "", "next": ""},
    ),
    "zeros beside channels that are added": (
        lambda m, x: F.relu(m.five(x) + F.pad(F.relu(m.a(x)), (0, 0, 0, 0, 0, 1))),
        {"five": nn.Conv2d(1, 5, 1)},
        {"five": "add adds it to channels that must stay", "a": "it shares its channels with five"},
    ),
    "channels that are cut off": (
        lambda m, x: F.relu(m.next(F.pad(F.relu(m.a(x)), (0, 0, 0, 0, 0, -1)))),
        {"next": nn.Conv2d(3, 2, 1)},
        {"a": "padding cuts some of its channels off"},
    ),
    "channels on the last axis": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x)).permute(0, 2, 3, 1))),
        {"next": nn.Linear(4, 3)},
        {"a": "", "next": ""},
    ),
    "channels in the place of positions": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x)).transpose(1, 2))),
        {"next": nn.Conv2d(4, 2, 1)},
        {"a": "its channels are mixed with positions where next reads them", "next": ""},
    ),
    "a constant that is upsampled": (
        lambda m, x: F.relu(m.c(F.interpolate(F.relu(m.a(x)) + 1, scale_factor=2, mode="bilinear"))),
        {},
        {"a": "", "c": ""},
    ),
    "a transposed convolution": (
        lambda m, x: F.relu(m.up(F.relu(m.a(x)))),
        {"up": nn.ConvTranspose2d(4, 2, 2)},
        {"a": "", "up": ""},
    ),
    "a view with its size written into it": (
        lambda m, x: F.relu(m.next(F.relu(m.a(x)).view(-1, 64))),
        {"next": nn.Linear(64, 3)},
        {"a": "it feeds view, which has the size 64 written into it; write x.flatten(1)", "next": ""},
    ),
    "no ReLU on one of two ways": (
        lambda m, x: F.relu(m.c(m.a(x))) + F.relu(m.b(x)),
        {},
        {"a": "no ReLU stands between it and c", "b": "", "c": ""},
    ),
    "a grouped convolution of parts": (
        lambda m, x: F.relu(m.next(torch.cat([F.relu(m.a(x)), F.relu(m.b(x))], 1))),
        {"next": nn.Conv2d(8, 4, 1, groups=2)},
        {"a": "", "b": "", "next": ""},
    ),
    "a depthwise convolution of the input and a layer": (
        lambda m, x: F.relu(m.next(torch.cat([F.relu(m.a(x)), x], 1))),
        {"next": nn.Conv2d(5, 5, 1, groups=5)},
        {"a": "next filters it along with channels that must stay", "next": "it filters channels that must stay"},
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_reasons_to_leave_a_layer_alone(case):
    forward, modules, expected = REASONS[case]
    model = build(forward, **modules)
    found = reasons(model)
    for name, reason in expected.items():
        assert reason in found[name]
        assert bool(reason) == bool(found[name])
    assert found["head"] == OUTPUT
    if any(not reason for name, reason in found.items()):
        go_the_whole_way(model)


def go_the_whole_way(model):
    """Whatever is left to score can be scored and removed; `prune` compares with the masked model."""
    plan = cn.plan(cn.score(model, example(), formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)
    assert plan.removed
    cn.prune(model, plan, example())


def test_an_ignored_layer_keeps_its_whole_group():
    network = read_network(build(lambda m, x: F.relu(m.a(x) + m.b(x))), example(), ignore=["b"])
    found = {layer.name: layer.reason for layer in network.layers}
    assert found["b"] == "ignored, as asked"
    assert found["a"] == "ignored, as asked"
    assert network.unit_count == 0
    assert network.group_sizes == ()


REFUSED = {
    "a module called twice": (
        lambda m, x: F.relu(m.c(F.relu(m.c(F.relu(m.a(x)))))),
        {},
        "c: this module is called more than once",
    ),
    "a depthwise convolution called twice": (
        lambda m, x: F.relu(m.next(F.relu(m.next(F.relu(m.a(x)))))),
        {"next": nn.Conv2d(4, 4, 1, groups=4)},
        "next: this module is called more than once",
    ),
    "a batch norm called twice": (
        lambda m, x: F.relu(m.norm(m.c(F.relu(m.norm(m.a(x)))))),
        {"norm": nn.BatchNorm2d(4)},
        "norm: this module is called more than once",
    ),
    "a maximum with a number": (
        lambda m, x: torch.maximum(m.a(x), torch.ones(())),
        {},
        "maximum: a maximum or minimum of other than two values of the network",
    ),
    "an addition with broadcasting": (
        lambda m, x: F.relu(m.a(x) + x),
        {},
        "add: an addition of other than two values of one shape",
    ),
    "an addition with a factor": (
        lambda m, x: F.relu(torch.add(m.a(x), m.b(x), alpha=2)),
        {},
        "add: an addition of other than two values of one shape",
    ),
    "a concatenation along another axis": (
        lambda m, x: F.relu(torch.cat([m.a(x), m.b(x)], 2)),
        {},
        "cat: a concatenation along axis 2. Only one along the channels (axis 1) is read.",
    ),
    "a concatenation of the batch": (
        lambda m, x: F.relu(torch.cat([m.a(x), m.b(x)])),
        {},
        "cat: a concatenation along axis 0",
    ),
    "a transposed convolution of a size": (
        lambda m, x: F.relu(m.up(F.relu(m.a(x)), output_size=(5, 5))),
        {"up": nn.ConvTranspose2d(4, 2, 2)},
        "up: a transposed convolution with an output_size",
    ),
    "all parts at once": (
        lambda m, x: torch.cat(F.relu(m.a(x)).chunk(2, 1), 1),
        {},
        "cat: it reads all parts of a tensor at once",
    ),
    "cubic upsampling": (
        lambda m, x: F.interpolate(F.relu(m.a(x)), scale_factor=2, mode="bicubic"),
        {},
        "interpolate: upsampling of 2 axes in the mode 'bicubic'",
    ),
    "an index that is a list": (
        lambda m, x: F.relu(m.a(x))[:, [0, 2]],
        {},
        "getitem: an index of slice, list",
    ),
    "the batch transposed": (
        lambda m, x: F.relu(m.a(x)).transpose(0, 1),
        {},
        "transpose: it turns (3, 4, 4, 4) into (4, 3, 4, 4)",
    ),
    "positions and channels padded at once": (
        lambda m, x: F.pad(F.relu(m.a(x)), (1, 1, 0, 0, 1, 1)),
        {},
        "pad: padding by (1, 1, 0, 0, 1, 1)",
    ),
    "a max pool that returns indices": (
        lambda m, x: F.max_pool2d(F.relu(m.a(x)), 2, return_indices=True)[0],
        {},
        "max_pool2d",
    ),
    "a difference of other shapes": (
        lambda m, x: F.relu(m.a(x) - x),
        {},
        "sub: a subtraction of other than two values of one shape",
    ),
    "a product": (lambda m, x: F.relu(m.a(x)) * F.relu(m.b(x)), {}, "mul: it combines two values of the network"),
    "a square": (lambda m, x: (y := F.relu(m.a(x))) * y, {}, "mul: it combines two values of the network"),
    "a division by values": (lambda m, x: 1 / F.relu(m.a(x) + 9), {}, "truediv: a division by values of the network"),
    "a division by zero": (
        lambda m, x: F.relu(m.a(x)) / 0,
        {},
        "truediv: a division by values of the network, or by",
    ),
    "a rounded division": (
        lambda m, x: torch.div(m.a(x), 2, rounding_mode="floor"),
        {},
        "div: it multiplies by alpha",
    ),
    "a constant with a factor": (lambda m, x: torch.add(m.a(x), 1, alpha=2), {}, "add: it multiplies by alpha"),
    "a constant per position": (
        lambda m, x: F.relu(m.a(x)) + torch.arange(4.0),
        {},
        "add: it combines (batch, 4, 4, 4) with a constant of shape (4,). A constant is read that is one number",
    ),
    "a constant that adds an axis": (lambda m, x: F.relu(m.a(x)) * torch.ones(1, 1, 1, 1, 1), {}, "mul: it combines"),
    "a number that depends on the batch": (
        lambda m, x: F.relu(m.a(x)) / x.shape[0],
        {},
        "truediv: it calculates with a",
    ),
    "a number that depends on the units": (
        lambda m, x: (y := F.relu(m.a(x))) / (y.shape[1] ** 0.5),
        {},
        "truediv: it calculates with a size, which may be another for other data or once units are removed",
    ),
    "a constant made from a size": (
        lambda m, x: F.relu(m.a(x)) * torch.ones(x.shape[1]),
        {},
        "mul: it reads a tensor that does not come from the input",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_graphs_that_are_refused(case):
    forward, modules, message = REFUSED[case]
    assert refuse(forward, **modules).startswith(message)


def test_shared_weights_are_refused_by_name():
    model = build(lambda m, x: F.relu(m.c(F.relu(m.a(x)))) + F.relu(m.d(F.relu(m.b(x)))), d=nn.Conv2d(4, 4, 1))
    model.d.weight = model.c.weight
    with pytest.raises(UnreadableModelError, match=r"^d: it shares weights with c\. Layers that share weights"):
        read_network(model, example())


CONTROL = {
    "values": lambda m, x: F.relu(m.a(x)) if x.sum() > 0 else F.relu(m.b(x)),
    "as many steps as the sum": lambda m, x: [F.relu(m.a(x)) for _ in range(int(x.abs().sum()))][-1],
}


@pytest.mark.parametrize("case", CONTROL)
def test_control_flow_that_depends_on_values_is_explained(case):
    message = refuse(CONTROL[case])
    assert message.startswith("Graph: the forward cannot be traced by torch.fx (")
    assert "Control flow that depends on values or sizes must go" in message
    assert "@reads" in message


def test_a_reader_may_name_its_own_obstacle():
    """Mixes with an obstacle: neither what it reads nor what it gives can be removed."""
    from critical_neurons.readers import registry
    from critical_neurons.readers.linear_maps import DenseMap
    from critical_neurons.readers.registry import Mixes

    class Odd(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    before = dict(registry._readers)
    try:

        @cn.reads(Odd)
        def read_odd(call):
            weight, bias = call.module.weight.detach().numpy(), call.module.bias.detach().numpy()
            return Mixes(DenseMap(weight, bias), obstacle="an odd layer")

        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Odd(3, 3), nn.ReLU(), nn.Linear(3, 2))
        found = {layer.name: layer.reason for layer in read_network(model, torch.rand(2, 4)).layers}
    finally:
        registry._readers.clear()
        registry._readers.update(before)
    assert found["0"] == "it feeds 2, an odd layer"
    assert found["2"] == "it is an odd layer"


def test_constants_are_what_a_removed_unit_leaves():
    """0 through a batch norm is its offset; through a ReLU what is positive of it; an average leaves it alone."""
    model = build(lambda m, x: F.relu(m.c(F.avg_pool2d(F.relu(m.norm(F.relu(m.a(x)))), 2))), norm=nn.BatchNorm2d(4))
    network = read_network(model, example())
    (wiring,) = [wiring for wiring in network.structure.wirings if wiring.module == "c"]
    with torch.no_grad():
        expected = F.relu(model.norm(torch.zeros(1, 4, 1, 1, dtype=torch.float64))).reshape(-1).numpy()
    assert np.allclose(wiring.constants, expected, rtol=0, atol=ROUNDING)
    assert (expected > 0).any()
    assert (expected == 0).any()
    assert all(not other.constants.any() for other in network.structure.wirings if other is not wiring)


def test_constants_meet_in_a_sum_and_a_concatenation():
    model = build(
        lambda m, x: torch.cat([m.n(F.relu(m.a(x))) + m.o(F.relu(m.b(x))), F.relu(m.d(x))], 1),
        n=nn.BatchNorm2d(4),
        o=nn.BatchNorm2d(4),
        d=nn.Conv2d(1, 2, 1),
    )
    network = read_network(model, example())
    (wiring,) = [wiring for wiring in network.structure.wirings if wiring.module == "head"]
    zero = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
    with torch.no_grad():
        left = (model.n(zero) + model.o(zero)).reshape(-1).numpy()
    assert np.allclose(wiring.constants, np.repeat([*left, 0.0, 0.0], 16), rtol=0, atol=ROUNDING)
    go_the_whole_way(model)


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_consumers_take_up_constants(bias):
    """The constant of an input channel goes to the outputs of its own group."""
    model = build(
        lambda m, x: F.relu(m.next(m.norm(F.relu(m.a(x))))),
        norm=nn.BatchNorm2d(4),
        next=nn.Conv2d(4, 4, 2, groups=2, bias=bias),
    )
    go_the_whole_way(model)


def draw_plans(model, count=8):
    """Plans of random scores, made as users make them."""
    scores = cn.score(model, example(), solver=cn.Solver(threads=1))
    for seed in range(count):
        yield cn.plan(scores, units=0.5).random(seed=seed)


def test_blocks_follow_the_channels_of_the_layer_that_is_grouped():
    """The parts of a concatenation added to `c` are numbered in another order than they stand in."""

    def forward(m, x):
        first, second = m.two(x), m.four(x)
        return F.relu(m.grouped(F.relu(m.six(x) + torch.cat([second, first], 1))))

    model = build(
        forward,
        two=nn.Conv2d(1, 2, 1),
        four=nn.Conv2d(1, 4, 1),
        six=nn.Conv2d(1, 6, 1),
        grouped=nn.Conv2d(6, 6, 1, groups=2),
    )
    for plan in draw_plans(model):
        cn.prune(model, plan, example())


def test_blocks_that_cut_through_a_unit_keep_their_layers():
    """A depthwise convolution makes two channels of every unit; the middle one lies in both blocks."""
    model = build(
        lambda m, x: F.relu(m.grouped(F.relu(m.doubling(F.relu(m.three(x)))))),
        three=nn.Conv2d(1, 3, 1),
        doubling=nn.Conv2d(3, 6, 1, groups=3),
        grouped=nn.Conv2d(6, 4, 1, groups=2),
    )
    go_the_whole_way(model)


def test_a_plan_of_unequal_blocks_is_refused_by_name():
    model = build(lambda m, x: F.relu(m.grouped(F.relu(m.a(x)))), grouped=nn.Conv2d(4, 4, 1, groups=2))
    structure = cn.inspect(model, example())
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    stays[structure.layers[0].units[3]] = False
    plan = Plan(structure, stays, {}, "", {})
    with pytest.raises(PlanMismatchError, match="a: it keeps 2, 1 channels of its blocks"):
        cn.prune(model, plan, example())


NEGATIVE = {
    "behind a batch norm behind the ReLU": lambda m, x: F.max_pool2d(m.norm(F.relu(m.a(x))), 2),
    "of the input": lambda m, x: F.relu(m.a(F.max_pool2d(x, 2))),
    "of a sum with the input": lambda m, x: F.relu(m.a(F.max_pool2d(F.relu(m.one(x)) + x, 2))),
}


def read_if_accepted(model, inputs, obstacle):
    """The network; none if the model is refused because of the obstacle."""
    try:
        return read_network(model, inputs)
    except UnreadableModelError as error:
        if obstacle not in str(error):
            raise
        return None


@pytest.mark.parametrize("case", NEGATIVE)
def test_a_max_pool_of_negative_values_is_refused_or_right(case):
    """Its value is not above zero: either the reader says so, or the forward pass is a feasible point."""
    model = build(NEGATIVE[case], norm=nn.BatchNorm2d(4), one=nn.Conv2d(1, 1, 1))
    with torch.no_grad():
        model.norm.bias.fill_(-3.0)
    inputs = example() - 3
    network = read_if_accepted(model, inputs, "max pool")
    if network is None:
        return
    bounds = bound_network(network, inputs.numpy())
    for encode in (encode_paper, encode_literal):
        program = encode(network, bounds, np.zeros(3, dtype=int), Objective()).write_out()
        values = program.rows.matrix @ program.start
        assert np.all(program.rows.lower - ROUNDING <= values)
        assert np.all(values <= program.rows.upper + ROUNDING)
        assert np.all(program.lower <= program.start)
        assert np.abs(program.term.logits(program.start) - network.forward(inputs.numpy())).max() <= ROUNDING

"""Law: a residual stream is charged once. At s = 1 nothing changes, at s = 0 all of the group is zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import critical_neurons as cn
from critical_neurons.core.network import Relu
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import PaperGates, encode_paper
from critical_neurons.readers import read_network
from tests.zoo import GRAPHS, ZOO, build_model, draw_inputs, first_or_slow, share_case

ROUNDING = 1e-10
BLOCKS = 3

KERNELS = {"resnet": (9, 9, 9, 9), "sum of three": (1,), "densenet": (9, 9, 9, 1), "mobilenet": (9, 4, 1)}
"""Positions of the largest kernel among the layers of each group: in stage2 of the residual network the shortcut has
1, in the mobilenet the pointwise convolution that shares its units with a depthwise one."""


class Stream(nn.Module):
    """A stream of units whose branches read another layer, `base`: they do not feel it when the stream is pruned."""

    def __init__(self, layer, step, channels, head):
        super().__init__()
        self.base, self.stem = layer(channels), layer(channels)
        self.branches = nn.ModuleList(
            nn.Sequential(layer(4), norm(4)) for norm in [nn.Identity, *[NORMS[layer]] * (BLOCKS - 1)]
        )
        self.filters = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(BLOCKS))
        self.head, self.step = nn.Linear(head, 2), step

    def forward(self, x):
        base, stream = F.relu(self.base(x)), F.relu(self.stem(x))
        for number in range(BLOCKS):
            base, stream = self.step(self, number, base, stream)
        return self.head(stream.flatten(1))


def linear(size):
    return nn.Linear(size, 4)


def convolution(channels):
    return nn.Conv2d(channels, 4, 3, padding=1)


NORMS = {linear: nn.BatchNorm1d, convolution: nn.BatchNorm2d}


def add(m, number, base, stream):
    return base, F.relu(stream + m.branches[number](base))


def add_twice(m, number, base, stream):
    return base, F.relu(m.branches[number](base) + stream + stream)


def add_up_to_six(m, number, base, stream):
    return base, F.relu6(m.branches[number](base) + stream)


def pool(m, number, base, stream):
    base, stream = (F.max_pool2d(value, 2, stride=1) for value in (base, stream))
    return base, F.relu(stream + m.branches[number](base))


def average(m, number, base, stream):
    base, stream = (F.avg_pool2d(value, 2, stride=1) for value in (base, stream))
    return base, F.relu(stream + m.branches[number](base))


def filter_depthwise(m, number, base, stream):
    return base, F.relu(m.filters[number](stream) + m.branches[number](base))


def rectify_again(m, number, base, stream):
    return base, F.relu(F.relu(stream + m.branches[number](base)))


def add_leaky(m, number, base, stream):
    return base, F.leaky_relu(stream + m.branches[number](base), 0.3)


def take_absolute(m, number, base, stream):
    return base, (stream - m.branches[number](base)).abs()


STREAMS = {
    "leaky relus": (linear, add_leaky, (3,), 4),
    "absolute values": (convolution, take_absolute, (1, 4, 4), 64),
    "linear layers": (linear, add, (3,), 4),
    "the stream twice": (linear, add_twice, (3,), 4),
    "relu6": (linear, add_up_to_six, (3,), 4),
    "relu twice": (linear, rectify_again, (3,), 4),
    "convolutions": (convolution, add, (1, 4, 4), 64),
    "max pools": (convolution, pool, (1, 4, 4), 4),
    "average pools": (convolution, average, (1, 4, 4), 4),
    "depthwise convolutions": (convolution, filter_depthwise, (1, 4, 4), 64),
}


def draw_stream(kind, seed=0):
    """The network of a stream, inputs, and the units of the stream."""
    layer, step, shape, head = STREAMS[kind]
    torch.manual_seed(seed)
    model = Stream(layer, step, shape[0], head).double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.mul_(3)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
                module.weight.normal_(0.5, 1.0)
                module.bias.normal_(0, 0.3)
    inputs = torch.randn(3, *shape, dtype=torch.float64)
    network = read_network(model, inputs)
    (stem,) = [layer for layer in network.layers if layer.name == "stem"]
    return model, network, inputs.numpy(), stem.units


def resolve(network, inputs, formulation=None):
    return AffineNetwork(network, bound_network(network, inputs), formulation or PaperGates())


def find_activations(network, affine, point, units):
    """Of the given units, at every ReLU."""
    shrunk = affine.evaluate(point).shrunk
    for index, gate in affine.gates.items():
        own = np.broadcast_to(np.isin(network.ops[index].units, units), gate.live.shape)
        if own.any():
            yield np.where(gate.live, shrunk[index], 0.0)[own], gate.live[own]


def score_stream(affine, units, score):
    """The stream at this score, all else at 1, and what max pools have left open as these scores give it."""
    point = np.ones(affine.column_count)
    point[units] = score
    return affine.complete(point)[0]


@pytest.mark.parametrize("seed", first_or_slow(0, 1, 2))
@pytest.mark.parametrize("kind", STREAMS)
def test_at_zero_every_activation_of_the_stream_is_zero(kind, seed):
    _, network, inputs, units = draw_stream(kind, seed)
    affine = resolve(network, inputs)
    found = list(find_activations(network, affine, score_stream(affine, units, 0.0), units))
    assert sum(live.any() for _, live in found) >= 1 + BLOCKS
    for activations, _ in found:
        assert np.abs(activations).max() <= ROUNDING


@pytest.mark.parametrize("kind", STREAMS)
def test_at_one_nothing_has_changed(kind):
    _, network, inputs, units = draw_stream(kind)
    affine, values = resolve(network, inputs), network.evaluate(inputs)
    there = affine.evaluate(affine.columns_of(values))
    for index in affine.gates:
        assert np.abs(there.shrunk[index] - values[network.ops[index].source]).max() <= ROUNDING
    changed = affine.evaluate(
        np.where(np.isin(np.arange(affine.column_count), units), 0.5, affine.columns_of(values))
    )
    assert np.abs(changed.logits - there.logits).max() > 1e-3


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_at_one_are_the_network(name):
    case = share_case(name)
    affine = resolve(case.network, case.inputs)
    expected = case.network.forward(case.inputs)
    assert np.allclose(affine.logits(np.ones(affine.column_count)), expected, rtol=0, atol=ROUNDING)


class Naive(PaperGates):
    """Every ReLU subtracts (1 - s) U of its own."""

    def shrinks(self, network, bounds):
        return {
            index: np.where(network.ops[index].units != NO_UNIT, np.maximum(interval.upper, 0.0), 0.0)
            for index, interval in bounds.before_relu.items()
        }


def worst_violation(network, inputs, formulation, units, score):
    """Over all rows of all ReLUs, with the stream at this score and all else at 1."""
    affine = resolve(network, inputs, formulation)
    shrunk = affine.evaluate(score_stream(affine, units, score)).shrunk
    return max(
        float(
            np.maximum(
                np.minimum(interval.lower, 0) - shrunk[index], shrunk[index] - np.maximum(interval.upper, 0)
            ).max()
        )
        for index, interval in bound_network(network, inputs).before_relu.items()
    )


def test_a_stream_is_not_charged_again_at_every_block():
    """Branches of zero leave 1 + BLOCKS live ReLUs with the same U: naively, s >= 1 - 1 / (1 + BLOCKS)."""
    model, _, inputs, units = draw_stream("linear layers")
    with torch.no_grad():
        for branch in model.branches:
            branch[0].weight.zero_()
            branch[0].bias.zero_()
        for branch in list(model.branches)[1:]:
            branch[1].running_mean.zero_()
            branch[1].bias.zero_()
    network = read_network(model, torch.from_numpy(inputs))
    least = 1 - 1 / (1 + BLOCKS)
    assert worst_violation(network, inputs, Naive(), units, least) <= ROUNDING
    assert worst_violation(network, inputs, Naive(), units, least - 0.05) > 1e-3
    for score in (least - 0.05, 0.3, 0.0):
        assert worst_violation(network, inputs, PaperGates(), units, score) <= ROUNDING


@pytest.mark.parametrize("seed", first_or_slow(0, 1, 2))
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_can_be_pruned_where_their_branches_do_not_read_them(kind, seed):
    """With any score of the stream, as long as nothing else changes."""
    _, network, inputs, units = draw_stream(kind, seed)
    for score in np.random.default_rng(seed).uniform(size=(3, len(units))):
        assert worst_violation(network, inputs, PaperGates(), units, score) <= ROUNDING


COUPLED = {
    "resnet": [{"stem", "stage1.second"}, {"stage1.first"}, {"stage2.first"}, {"stage2.second", "stage2.shortcut.0"}],
    "pre-activation resnet": [{"stem", "block1.second", "block2.second"}, {"block1.first"}, {"block2.first"}],
    "mobilenet": [{"0", "3"}, {"6", "9"}, {"11"}],
    "densenet": [{"stem"}, {"first"}, {"second"}, {"transition"}],
    "concatenation on a stream": [{"stem", "one", "other"}],
    "concatenation": [{"stem"}, {"one"}, {"other"}],
    "sum of three": [{"stem", "one", "other"}],
    "addition to itself": [{"stem"}, {"one"}, {"other"}],
    "grouped convolutions": [{"0"}, {"2"}, {"5"}],
    "max pool on a stream": [{"stem", "branch"}],
}


@pytest.mark.parametrize("name", COUPLED)
def test_layers_that_share_units(name):
    network = share_case(name).network
    together = [set(group.layers) for group in network.structure.groups]
    assert together == COUPLED[name]
    assert network.group_sizes == tuple(
        len({u for layer in network.removable if layer.name in names for u in layer.units} - {NO_UNIT})
        for names in together
    )


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "sum of three"])
def test_every_member_s_name_gives_the_shared_scores(name):
    model, inputs = build_model(name), draw_inputs(name, 3)
    scores = cn.score(model, inputs, solver=cn.Solver(threads=1))
    network = cn.inspect(model, inputs)
    assert set(scores) == set().union(*COUPLED[name])
    for layer in network.removable:
        assert np.array_equal(scores[layer.name], scores.per_unit[layer.units])
        company = [other for other in network.removable if other is not layer and layer.units[0] in other.units]
        said = f"yes, together with {', '.join(other.name for other in company)}" if company else "yes"
        assert any(line.startswith(f"{layer.name} ") and line.endswith(said) for line in str(network).splitlines())
    assert len(scores.per_unit) == network.unit_count < sum(layer.size for layer in network.removable)
    assert np.ptp(scores.per_unit) > 0.1


def test_depthwise_channels_share_their_producer_s_scores():
    layers = {layer.name: layer.units.tolist() for layer in share_case("mobilenet").network.layers}
    assert layers["3"] == layers["0"] == [0, 1]
    assert layers["6"] == [2, 3, 4]
    assert layers["9"] == [2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("objective", ["balanced", "authors", "paper"])
def test_shared_units_count_once_in_the_objective(name, objective):
    case = share_case(name)
    network, bounds = case.network, bound_network(case.network, case.inputs)
    program = encode_paper(network, bounds, case.labels, Objective(objective))
    sizes = network.group_sizes
    weights = {
        "balanced": [1 / size for size in sizes],
        "authors": [1 / (size * kernel) for size, kernel in zip(sizes, KERNELS[name], strict=True)],
        "paper": [1 / sum(sizes)] * len(sizes),
    }[objective]
    expected = -np.repeat(np.diag(weights) if len(sizes) == 1 else (1 - np.eye(len(sizes))) * weights, sizes, axis=1)
    found = program.rows.matrix.toarray()[: len(sizes), : network.unit_count]
    assert np.allclose(found, expected, rtol=0, atol=ROUNDING)
    assert program.blocks["score"] == slice(0, sum(sizes))


@pytest.mark.parametrize(
    "rule", [{"threshold": 0.5}, {"threshold": "mean"}, {"units": 0.5}, {"units": 0.75, "scope": "global"}], ids=str
)
def test_grouped_convolutions_lose_as_many_units_in_every_block(rule):
    model, inputs = build_model("grouped convolutions"), draw_inputs("grouped convolutions", 3)
    scores = cn.score(model, inputs, formulation=cn.Paper(loss_weight=0.05), solver=cn.Solver(threads=1))
    plan = cn.plan(scores, **rule)
    assert plan.removed
    for chosen in (plan, plan.random(seed=1), plan.critical(scores)):
        for layer in chosen.layers[:3]:
            halves = [np.count_nonzero(layer.kept < 2), np.count_nonzero(layer.kept >= 2)]
            assert halves[0] == halves[1] > 0
        smaller = cn.prune(model, chosen, inputs)
        assert smaller[2].in_channels == len(chosen.kept["0"])
        assert smaller[2].groups == 2


def test_every_relu_of_a_stream_gates_the_same_units():
    network = share_case("resnet").network
    gated = [set(op.units.reshape(-1).tolist()) for op in network.ops if isinstance(op, Relu)]
    assert gated == [{0, 1}, {2, 3}, {0, 1}, {4, 5, 6}, {7, 8, 9}]


def test_the_relu6_of_the_zoo_reach_their_ceiling():
    """Otherwise they would be ReLUs."""
    for name in ("mobilenet", "concatenation", "max pool of a relu6"):
        case = share_case(name)
        values = case.network.evaluate(case.inputs)
        assert max(values[index].max() for index, op in enumerate(case.network.ops) if isinstance(op, Relu)) > 6
        assert ZOO[name].gain > 1

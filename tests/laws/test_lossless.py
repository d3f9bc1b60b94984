"""Law: on the whole box the smaller network is the original, and states are those that enumeration finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import nn

import critical_neurons as cn
from critical_neurons.core.bounds import Interval
from critical_neurons.core.stability import State
from critical_neurons.formulations.bound_propagation import bound_network, bound_values
from critical_neurons.readers import read_network
from critical_neurons.stability.reach import ReachSearch
from critical_neurons.stability.relaxation import relax
from tests.zoo import CORE, ZOO, build_model, draw_inputs, first_or_slow

SAME_OUTPUTS = 1e-9
"""Largest relative difference of outputs in float64."""

EDGE = 1e-6
"""How near to its largest value a function is asked about."""


def draw_points(lower, upper, count=60, seed=5):
    """Half of them corners."""
    generator = np.random.default_rng(seed)
    shares = generator.random((count, *lower.shape))
    shares[::2] = shares[::2].round()
    return torch.from_numpy(lower + shares * (upper - lower))


def assert_same_on(box, model, smaller):
    with torch.no_grad():
        expected, found = (each(draw_points(*box)) for each in (model, smaller))
    assert (expected - found).abs().max() <= SAME_OUTPUTS * max(1.0, float(expected.abs().max()))


def draw_mlp(seed, sizes=(3, 4, 3, 2), bias=0.4):
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layer = nn.Linear(inputs, outputs).double()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64))
            layer.bias.copy_(bias * torch.randn(outputs, generator=generator, dtype=torch.float64))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def enumerate_extremes(model, lower, upper, depth):
    """The lowest and highest pre-activations of hidden layer `depth`, one program for every activation pattern."""
    layers = [(m.weight.detach().numpy(), m.bias.detach().numpy()) for m in model if isinstance(m, nn.Linear)]
    lowest, highest = np.full(len(layers[depth][0]), np.inf), np.full(len(layers[depth][0]), -np.inf)
    widths = [len(weight) for weight, _ in layers[:depth]]
    for pattern in itertools.product((0, 1), repeat=sum(widths)):
        matrix, offset, rows, ends, at = np.eye(len(lower)), np.zeros(len(lower)), [], [], 0
        for (weight, bias), width in zip(layers, widths, strict=False):
            gates, at = np.array(pattern[at : at + width]), at + width
            matrix, offset = weight @ matrix, weight @ offset + bias
            signs = np.where(gates, -1.0, 1.0)
            rows.append(signs[:, None] * matrix)
            ends.append(-signs * offset)
            matrix, offset = gates[:, None] * matrix, gates * offset
        weight, bias = layers[depth]
        matrix, offset = weight @ matrix, weight @ offset + bias
        for unit, sign in itertools.product(range(len(weight)), (1, -1)):
            box = list(zip(lower, upper, strict=True))
            limits = {"A_ub": np.concatenate(rows), "b_ub": np.concatenate(ends)} if rows else {}
            found = linprog(-sign * matrix[unit], **limits, bounds=box)
            if found.status == 0:
                value = -sign * found.fun + offset[unit]
                lowest[unit], highest[unit] = min(lowest[unit], value), max(highest[unit], value)
    return lowest, highest


@pytest.mark.networks(
    *("mlp", "nest", "clamps", "resnet", "concatenation on a stream", "grouped convolutions"),
    *("shortcut of slices and zeros", "tokens", "leaky relus", "maxima", "vgg", "max pool on a stream"),
)
@pytest.mark.parametrize("name", CORE)
def test_the_same_on_the_box(name):
    model, centre = build_model(name), draw_inputs(name, 1)[0].numpy()
    box = centre - 0.2, centre + 0.2
    found = cn.lossless(model, box, time_limit=10)
    assert_same_on(box, model, found.model)
    assert not found.stability.count()[State.UNDECIDED]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ZOO)
def test_the_same_on_the_box_on_all_of_the_zoo(name, seed):
    model, centre = build_model(name, seed), draw_inputs(name, 1, seed)[0].numpy()
    box = centre - 0.3, centre + 0.1
    assert_same_on(box, model, cn.lossless(model, box, time_limit=30).model)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), half=st.floats(0.05, 1.0))
def test_states_are_those_of_enumeration(seed, half):
    model, centre = draw_mlp(seed), np.random.default_rng(seed).normal(size=3)
    lower, upper = centre - half, centre + half
    found = cn.lossless(model, (lower, upper))
    units = iter(found.stability.units)
    for depth in range(2):
        for low, high in zip(*enumerate_extremes(model, lower, upper, depth), strict=True):
            each = next(units)
            if min(abs(low), abs(high)) > EDGE:
                assert each.state is (State.OFF if high < 0 else State.ON if low > 0 else State.UNSTABLE)
            assert each.lower <= low + EDGE
            assert each.upper >= high - EDGE
            assert low - EDGE <= each.lowest <= each.highest <= high + EDGE
    assert_same_on((lower, upper), model, found.model)


@pytest.mark.parametrize("seed", first_or_slow(*range(3)))
def test_search_finds_the_largest_value(seed):
    """A little above it the answer is yes, with proof; a little below it is no, with a point."""
    model, lower, upper = draw_mlp(seed, (3, 5, 4, 2)), -np.ones(3), np.ones(3)
    network = read_network(model, torch.zeros(2, 3))
    intervals = bound_values(network, Interval(lower[None], upper[None]))
    values = {at: Interval(interval.lower[0], interval.upper[0]) for at, interval in intervals.items()}
    index = [op.source for op in network.ops if type(op).__name__ == "Relu"][1]
    search = ReachSearch(relax(network, index, np.arange(4), Interval(lower, upper), values))
    lowest, highest = enumerate_extremes(model, lower, upper, 1)
    for unit, (sign, top) in itertools.product(range(4), ((1.0, highest), (-1.0, -lowest))):
        above = search.ask(unit, sign, top[unit] + EDGE, np.inf, 10**6)
        below = search.ask(unit, sign, top[unit] - EDGE, np.inf, 10**6)
        assert above.seen <= top[unit] + EDGE
        assert top[unit] - EDGE <= above.bound <= top[unit] + EDGE
        assert below.seen > top[unit] - EDGE
        reached = network.evaluate(below.inputs[None])[index][0, unit] * sign
        assert reached == pytest.approx(below.seen)


def test_bounds_and_programs_agree():
    """What backward substitution proves is among what is proved; programs prove more, and nothing else."""
    more = 0
    for seed in range(6):
        model, box = draw_mlp(seed, (4, 6, 6, 6, 2), bias=1.0), (-0.4 * np.ones(4), 0.4 * np.ones(4))
        network = read_network(model, torch.zeros(2, 4))
        bounds = bound_network(network, np.zeros((1, 4)), box=Interval(box[0][None], box[1][None]), method="backward")
        units = iter(cn.lossless(model, box).stability.units)
        for interval in bounds.before_relu.values():
            for low, high in zip(interval.lower[0], interval.upper[0], strict=True):
                each = next(units)
                if high <= 0 or low >= 0:
                    assert each.state is (State.OFF if high <= 0 else State.ON)
                more += each.method in ("linear program", "integer program")
    assert more > 0


def test_several_boxes():
    """Every box around a data point counts: a unit is off if it is off in all of them."""
    model, inputs = draw_mlp(4, (3, 8, 8, 2), bias=1.0), np.random.default_rng(1).normal(size=(6, 3))
    found = cn.lossless(model, inputs=inputs, radius=0.05)
    for row in inputs:
        assert_same_on((row - 0.05, row + 0.05), model, found.model)
    one = cn.lossless(model, inputs=inputs[:1], radius=0.05).stability
    for each, every in zip(one.units, found.stability.units, strict=True):
        assert every.state in (each.state, State.UNSTABLE)
    assert found.parameters[1] < found.parameters[0]

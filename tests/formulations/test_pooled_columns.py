"""Undecided activations behind which average pooling stands share a column, and the optimum stays the same."""

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.core.network import Relu
from critical_neurons.core.solution import Status
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.first_layer import find_least_scores
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.lazy_rows import SumRows
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import PaperGates, encode_paper
from critical_neurons.formulations.pooled_columns import find_deal
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.zoo import first_or_slow

EXACT = 1e-9
SAME = 1e-4


def build(*pools, channels=3):
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), *pools)
    size = features(torch.zeros(1, 1, 8, 8)).numel()
    return nn.Sequential(features, nn.Flatten(), nn.Linear(size, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()


POOLED = {
    "pool": build(nn.AvgPool2d(4)),
    "pool of a pool": build(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)),
    "elements left out": build(nn.AvgPool2d(3)),
    "batch norm between": build(nn.AvgPool2d(2), nn.BatchNorm2d(3), nn.AvgPool2d(2)),
}
"""Networks whose first activations are read by their sums alone."""

UNPOOLED = {
    "windows overlap": build(nn.AvgPool2d(3, stride=2)),
    "a convolution": build(nn.Conv2d(3, 2, 3), nn.AvgPool2d(2)),
    "negative weights": build(nn.BatchNorm2d(3), nn.AvgPool2d(2)),
    "no pooling": build(),
}
with torch.no_grad():
    UNPOOLED["negative weights"][0][2].weight.fill_(-1.0)


def encode_case(model, encode=encode_paper, radius=0.05, **settings):
    inputs = torch.rand(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    network = read_network(model, inputs)
    bounds = bound_network(network, inputs.numpy(), radius=radius)
    labels = model(inputs).argmax(1).numpy()
    return network, bounds, encode(network, bounds, labels, Objective(loss_weight=20.0), integer=False, **settings)


def find_first_relu(network):
    return next(index for index, op in enumerate(network.ops) if isinstance(op, Relu))


@pytest.mark.parametrize("name", POOLED)
def test_every_element_is_dealt_as_the_pooling_does(name):
    network, _, _ = encode_case(POOLED[name])
    relu = find_first_relu(network)
    deal = find_deal(network.ops, relu)
    values = np.random.default_rng(0).uniform(size=(1, *network.ops[relu].shape))
    pooled = values
    for op in network.ops[relu + 1 : deal.index + 1]:
        pooled = op.map.apply_linear(pooled)
    assert np.allclose(np.bincount(deal.owners, deal.weights * values.reshape(-1)), pooled.reshape(-1))


@pytest.mark.parametrize("name", UNPOOLED)
def test_what_is_read_one_by_one_keeps_its_columns(name):
    network, bounds, program = encode_case(UNPOOLED[name])
    assert find_deal(network.ops, find_first_relu(network)) is None
    undecided = sum(int(((each.lower < 0) & (each.upper > 0)).sum()) for each in bounds.before_relu.values())
    assert program.blocks["activation"].stop - program.blocks["activation"].start == undecided == program.gate_count


@pytest.mark.parametrize("radius", first_or_slow(5e-2, 1e-2, 0.2))
@pytest.mark.parametrize("name", first_or_slow(*POOLED, first=2))
def test_the_optimum_is_that_of_the_literal_program(name, radius):
    _, _, summed = encode_case(POOLED[name], radius=radius)
    _, _, literal = encode_case(POOLED[name], encode_literal, radius=radius)
    limits = Limits(gap=1e-6, time_limit=60.0, threads=1)
    found, expected = (find_solver("highs").solve(program, limits, ignore_progress) for program in (summed, literal))
    assert found.status is expected.status is Status.OPTIMAL
    assert found.objective == pytest.approx(expected.objective, rel=SAME, abs=SAME)
    assert found.objective < summed.value(summed.start) - SAME
    assert summed.column_count < literal.column_count / 4


@pytest.mark.parametrize("name", POOLED)
def test_sums_range_over_what_their_activations_leave(name):
    """Activations drawn from their intervals give sums that keep the rows; their ends are the ends of the sums."""
    network, bounds, program = encode_case(POOLED[name], radius=0.2)
    affine = AffineNetwork(network, bounds, PaperGates(), summed=True)
    (sums,) = affine.sums.values()
    rows = SumRows(affine.sums, program.column_count)
    generator = np.random.default_rng(0)
    gate, interval = affine.gates[sums.relu], bounds.before_relu[sums.relu]
    for _ in range(5):
        point = np.zeros(program.column_count)
        scores = generator.uniform(find_least_scores(affine), 1.0)
        point[: len(scores)] = scores
        q = affine.evaluate(point).shrunk[sums.relu]
        lower, upper = np.maximum(q, 0.0), interval.upper * (q - interval.lower) / (interval.upper - interval.lower)
        for share in (0.0, 1.0, generator.uniform(size=q.shape)):
            point[sums.columns] = sums.gather(lower + share * (upper - lower))
            assert rows.violations(point).max() <= EXACT
        count = len(sums.explicit)
        point[sums.columns] = sums.gather(upper) + 1e-3
        assert np.all(rows.violations(point)[:count] > 0)
        point[sums.columns] = sums.gather(lower) - 1e-3
        violated = np.bincount(sums.owners, rows.violations(point)[count:] > 0)
        assert np.all((violated > 0) | (point[sums.columns] < 0))
        assert np.any(violated > 0)
    assert gate.explicit.size == 0


def test_rows_written_out_are_those_judged():
    _, _, program = encode_case(POOLED["pool"])
    source = program.sources[-1]
    point = np.random.default_rng(0).uniform(size=program.column_count)
    rows = source.build(np.arange(source.count))
    values = rows.matrix @ point
    assert np.allclose(np.maximum(rows.lower - values, values - rows.upper), source.violations(point))

"""Max pools: windows as torch has them; a window is decided only where its winner cannot lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from critical_neurons.core.network import NO_POSITION, MaxPool, pool_maximum, spread_windows
from critical_neurons.core.solution import Status
from critical_neurons.formulations import max_pooling
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.max_pooling import resolve_windows
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import PaperGates, encode_paper
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.zoo import MAX_POOLED, draw_case, first_or_slow, share_case

ROUNDING = 1e-10
SOLVED = Limits(gap=1e-5, time_limit=60.0, threads=1)

OPTIONS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 2, "dilation": 3},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True},
]
OPTIONS_2D = [
    *OPTIONS,
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    {"kernel_size": (2, 3), "stride": (2, 1), "dilation": (1, 2), "ceil_mode": True},
]


def read_pool(pool, shape):
    """The op of a max pool behind a ReLU on an input of the shape."""
    layer = (nn.Conv1d if len(shape) == 2 else nn.Conv2d)(shape[0], 2, 1)
    features = pool(torch.zeros(1, 2, *shape[1:])).flatten(1).shape[1]
    model = nn.Sequential(layer, nn.ReLU(), pool, nn.Flatten(), nn.Linear(features, 2))
    network = read_network(model, torch.rand(2, *shape))
    (op,) = [op for op in network.ops if isinstance(op, MaxPool)]
    return op


def assert_pools_like(op, values, expected):
    assert np.array_equal(pool_maximum(op, values.numpy()), expected.numpy())
    inside = op.windows[op.windows != NO_POSITION]
    assert inside.min() >= 0
    assert inside.max() < values[0, 0].numel()
    assert np.all((op.windows != NO_POSITION).any(axis=1))


@pytest.mark.parametrize("size", [6, 7, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_windows_in_one_dimension(options, size):
    values = torch.rand(3, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    assert_pools_like(read_pool(nn.MaxPool1d(**options), (1, size)), values, F.max_pool1d(values, **options))


@pytest.mark.parametrize("size", [(6, 6), (7, 8)])
@pytest.mark.parametrize("options", OPTIONS_2D, ids=str)
def test_windows_in_two_dimensions(options, size):
    values = torch.rand(3, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_pools_like(read_pool(nn.MaxPool2d(**options), (1, *size)), values, F.max_pool2d(values, **options))


FORMS = {
    "all by keyword": lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=True),
    "all by position": lambda x: F.max_pool2d(x, 3, 2, 1, 1, True),
    "stride left out": lambda x: F.max_pool2d(x, (2, 3)),
    "of torch itself": lambda x: torch.max_pool2d(x, 2, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_functional_windows(form):
    class Functional(nn.Module):
        def forward(self, x):
            return FORMS[form](x)

    values = torch.rand(3, 2, 7, 6, dtype=torch.float64)
    assert_pools_like(read_pool(Functional(), (1, 7, 6)), values, FORMS[form](values))


def test_windows_side_by_side():
    op = MaxPool("pool", 0, (1, 2), np.array([[NO_POSITION, 0], [1, 2]]))
    values = np.array([[[3.0, 1.0, 2.0]]])
    assert spread_windows(op, values).tolist() == [[[[-np.inf, 3.0], [1.0, 2.0]]]]
    assert pool_maximum(op, values).tolist() == [[[3.0, 2.0]]]


def test_windows_with_at_most_one_live_element_are_decided():
    op = MaxPool("pool", 0, (1, 3), np.array([[0, 1], [2, 3], [4, NO_POSITION]]))
    upper = np.array([[[-1.0, 2.0, 3.0, 1.0, 5.0]], [[-1.0, -2.0, 0.0, 4.0, -3.0]]])
    pool = resolve_windows(op, upper, upper, np.zeros(upper.shape, dtype=bool), first=7)
    assert pool.winners.tolist() == [[[1, 2, 4]], [[5, 8, 9]]]
    assert pool.explicit.tolist() == [1]
    assert pool.tops.tolist() == [3.0]
    assert pool.rivals.tolist() == [2, 3]
    assert pool.rivalries.tolist() == [0, 0]
    assert pool.columns == slice(7, 8)
    values = np.arange(10.0).reshape(2, 1, 5)
    columns = np.full(8, 0.5)
    assert pool.apply(values, columns).tolist() == [[[1.0, 1.5, 4.0]], [[5.0, 8.0, 9.0]]]
    decided = pool.settle(np.array([True]))
    assert len(decided.explicit) == len(decided.rivals) == 0
    assert decided.apply(values, columns).tolist() == [[[1.0, 2.0, 4.0]], [[5.0, 8.0, 9.0]]]


def resolve(case, radius):
    bounds = bound_network(case.network, case.inputs, radius=radius)
    return bounds, AffineNetwork(case.network, bounds, PaperGates())


def beaten_winners(case, bounds, affine, point):
    """By how much live elements exceed the winner of their window, over all decided windows; and their number."""
    pooled, worst, contested = affine.evaluate(point).pooled, -np.inf, 0
    for index, pool in affine.pools.items():
        op, values = case.network.ops[index], pooled[index]
        live = spread_windows(op, bounds.before_pool[index].upper) > 0
        elements = np.where(live, spread_windows(op, values), -np.inf)
        winners = values.reshape(-1)[pool.winners]
        chosen = pool.decided & (live.sum(axis=3) > 1)
        contested += int(chosen.sum())
        if chosen.any():
            worst = max(worst, float((elements.max(axis=3) - winners)[chosen].max()))
    return worst, contested


@pytest.mark.parametrize("seed", first_or_slow(*range(4)))
@pytest.mark.parametrize("radius", [0.0, 0.02])
@pytest.mark.parametrize("name", MAX_POOLED)
def test_decided_winners_never_lose(name, radius, seed):
    """Whatever the scores and the explicit values: nobody in the window exceeds its winner."""
    case = share_case(name, count=2, seed=seed)
    bounds, affine = resolve(case, radius)
    generator = np.random.default_rng(seed)
    for _ in range(10):
        point = generator.choice([0.0, 1.0, generator.uniform()], size=affine.column_count)
        assert beaten_winners(case, bounds, affine, point)[0] <= ROUNDING


def test_some_windows_are_decided_and_some_are_not():
    """Otherwise the law above would be empty, or hold only because nothing needs a decision."""
    decided = undecided = 0
    for seed in range(4):
        case = draw_case("vgg", count=2, seed=seed)
        bounds, affine = resolve(case, 0.0)
        decided += beaten_winners(case, bounds, affine, np.ones(affine.column_count))[1]
        undecided += sum(len(pool.explicit) for pool in affine.pools.values())
    assert decided > 10
    assert undecided > 5


def test_undecided_winners_do_lose():
    """That a winner has the highest bound does not decide its window."""
    lost = 0
    for seed in range(4):
        case = draw_case("vgg", count=2, seed=seed)
        _, affine = resolve(case, 0.0)
        index, pool = max(affine.pools.items())
        point = np.random.default_rng(seed).uniform(size=affine.column_count)
        values = affine.evaluate(point).pooled[index].reshape(-1)
        winners = values[pool.winners.reshape(-1)[pool.explicit]][pool.rivalries]
        lost += int(np.sum(values[pool.rivals] > winners + ROUNDING))
    assert lost > 0


@pytest.mark.parametrize("name", MAX_POOLED)
def test_pooled_values_of_the_optimum_are_the_maxima(name):
    """With the rows satisfied and the choices integer, every max pool gives the maximum of what it reads."""
    case = share_case(name, count=2)
    bounds, affine = resolve(case, 0.02)
    program = encode_paper(case.network, bounds, case.labels, Objective(), integer=True)
    solution = find_solver("highs").solve(program, SOLVED, ignore_progress)
    assert solution.status is Status.OPTIMAL
    columns = solution.point[: affine.column_count]
    for index, pool in affine.pools.items():
        read = affine.evaluate(columns).pooled[index]
        op = case.network.ops[index]
        expected = pool_maximum(op, read)
        found = pool.apply(read, columns).reshape(expected.shape)
        assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


def test_too_many_pairs_are_not_compared(monkeypatch):
    case = share_case("overlapping max pool")
    _, compared = resolve(case, 0.0)
    monkeypatch.setattr(max_pooling, "PAIR_LIMIT", 0)
    bounds, left = resolve(case, 0.0)
    (some,), (more,) = compared.pools.values(), left.pools.values()
    assert len(some.explicit) == 0
    live = spread_windows(case.network.ops[min(left.pools)], next(iter(bounds.before_pool.values())).upper) > 0
    assert len(more.explicit) == np.count_nonzero(live.sum(axis=3) > 1) > 0


@pytest.mark.parametrize("bias", [0.0, 0.4])
def test_a_tiny_radius_opens_no_gates_where_values_tie(bias):
    """On a black background a padded convolution has its bias everywhere: windows of equal values, whose bounds
    differ at the border, and without a bias units whose pre-activation is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, 2)),
    ).double()
    with torch.no_grad():
        model[0].bias.fill_(bias)
        model[3].bias.fill_(bias)
    inputs = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    inputs[0, 0, 3, 3:5] = 1.0
    network = read_network(model, inputs)
    points, tiny = (
        encode_paper(network, bound_network(network, inputs.numpy(), radius=radius), np.array([0]), Objective())
        for radius in (0.0, 1e-9)
    )
    assert points.gate_count == tiny.gate_count == 0
    optima = [find_solver("highs").solve(program, SOLVED, ignore_progress).objective for program in (points, tiny)]
    assert optima[1] == pytest.approx(optima[0], abs=1e-4)
    assert optima[0] < points.value(points.start) - 1e-3

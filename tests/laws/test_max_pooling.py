"""Law of max pooling: literal relaxed <= eliminated relaxed <= integer optimum, which is the same for both."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.core.solution import Status
from critical_neurons.formulations import max_pooling
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.zoo import MAX_POOLED, Case, first_or_slow, share_case

SAME_OPTIMUM = 1e-4
SOLVED = Limits(gap=1e-5, time_limit=60.0, threads=1)
SOLVED_ROUGHLY = Limits(gap=5e-5, time_limit=60.0, threads=1)
"""Where a large loss weight multiplies what is left of the gates' tolerance."""

RADII = [0.0, 0.02]

TINIEST = ["max pool before the relu", "padded max pool", "max pool in one dimension", "max pool of a relu6", "vgg"]
"""Solved as integer programs with every gate and choice a column."""


def solve(encoder, name, radius, *, integer):
    return solve_case(encoder, share_case(name, count=2), radius, Objective(), integer=integer)


def solve_case(encoder, case, radius, objective, *, integer, limits=SOLVED):
    bounds = bound_network(case.network, case.inputs, radius=radius)
    program = encoder(case.network, bounds, case.labels, objective, integer=integer)
    solution = find_solver("highs").solve(program, limits, ignore_progress)
    assert solution.status is Status.OPTIMAL
    return solution.objective


def draw_one_window(rectifier, seed):
    """Two hidden layers, one window over all positions of the second: some of them dead, the others rivals."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Conv1d(3, 3, 1), rectifier, nn.MaxPool1d(4)),
        *(nn.Flatten(), nn.Linear(3, 2)),
    ).double()
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.Conv1d | nn.Linear):
                module.weight.normal_(0.0, 1.5)
                module.bias.normal_(0.0, 0.3)
    inputs = 0.5 + torch.randn(2, 2, 4, dtype=torch.float64)
    labels = np.random.default_rng(seed).integers(2, size=2)
    return Case(model, read_network(model, inputs), inputs.numpy(), labels)


eliminated_relaxed = cache(lambda name, radius: solve(encode_paper, name, radius, integer=False))
eliminated_integer = cache(lambda name, radius: solve(encode_paper, name, radius, integer=True))


def slack(value):
    return SAME_OPTIMUM * max(1.0, abs(value))


@pytest.mark.parametrize(
    ("name", "radius"),
    [
        *(("vgg", 0.0), *((name, 0.02) for name in MAX_POOLED)),
        *(pytest.param(name, 0.0, marks=pytest.mark.slow) for name in MAX_POOLED if name != "vgg"),
    ],
)
def test_relaxations_are_ordered(name, radius):
    literal = solve(encode_literal, name, radius, integer=False)
    relaxed, integer = eliminated_relaxed(name, radius), eliminated_integer(name, radius)
    assert literal <= relaxed + slack(relaxed)
    assert relaxed <= integer + slack(integer)


def assert_ordered(case, radius, objective):
    literal = solve_case(encode_literal, case, radius, objective, integer=False, limits=SOLVED_ROUGHLY)
    relaxed = solve_case(encode_paper, case, radius, objective, integer=False, limits=SOLVED_ROUGHLY)
    integer = solve_case(encode_paper, case, radius, objective, integer=True, limits=SOLVED_ROUGHLY)
    assert literal <= relaxed + slack(relaxed)
    assert relaxed <= integer + slack(integer)


@pytest.mark.parametrize("loss_weight", first_or_slow(500.0, 50.0))
@pytest.mark.parametrize("radius", [0.0, 0.3])
@pytest.mark.parametrize("seed", first_or_slow(6, 11))
@pytest.mark.parametrize("rectifier", [nn.ReLU(), nn.Hardtanh(0.0, 1.0)], ids=["relu", "clip"])
def test_relaxations_are_ordered_where_the_loss_counts_most(rectifier, seed, radius, loss_weight):
    """There the value of a window wants to be higher than any activation in it."""
    assert_ordered(draw_one_window(rectifier, seed), radius, Objective(loss_weight=loss_weight))


@pytest.mark.parametrize("label", [0, 1], ids=["the higher the better", "the lower the better"])
def test_an_undecided_clip_is_not_a_winner(label):
    """While its two ReLUs are relaxed their difference may leave [0, 1], though all its rivals are dead. Beside it
    there is a channel of zeros: that of a layer with one cannot be removed."""
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Hardtanh(0.0, 1.0), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim > 1 else 0.0)
        model[0].weight[1] = 0.0
        model[4].weight[1] = -1.0
    inputs = torch.tensor([[[0.9, -3.0]]], dtype=torch.float64)
    case = Case(model, read_network(model.double(), inputs), inputs.numpy(), np.array([label]))
    assert_ordered(case, 2.0, Objective(loss_weight=50.0))


@pytest.mark.parametrize("radius", first_or_slow(*RADII))
@pytest.mark.parametrize("name", TINIEST)
def test_integer_optima_are_the_same(name, radius):
    expected = solve(encode_literal, name, radius, integer=True)
    assert eliminated_integer(name, radius) == pytest.approx(expected, rel=SAME_OPTIMUM, abs=SAME_OPTIMUM)


def test_windows_too_many_to_compare_relax_more(monkeypatch):
    """No rival is compared with its winner: the relaxation is weaker, the integer optimum the same."""
    names = [name for name in TINIEST if name != "vgg"]
    compared = {name: (eliminated_relaxed(name, 0.0), eliminated_integer(name, 0.0)) for name in names}
    monkeypatch.setattr(max_pooling, "PAIR_LIMIT", 0)
    gains = []
    for name, (relaxed, integer) in compared.items():
        weaker = solve(encode_paper, name, 0.0, integer=False)
        assert solve(encode_literal, name, 0.0, integer=False) <= weaker + slack(weaker)
        assert weaker <= relaxed + slack(relaxed)
        assert solve(encode_paper, name, 0.0, integer=True) == pytest.approx(integer, rel=SAME_OPTIMUM)
        gains.append(relaxed - weaker)
    assert max(gains) > 10 * SAME_OPTIMUM


def test_elimination_tightens_somewhere():
    """Otherwise the law would hold for an elimination that decides nothing."""
    gains = (eliminated_relaxed(name, 0.0) - solve(encode_literal, name, 0.0, integer=False) for name in MAX_POOLED)
    assert any(gain > 10 * SAME_OPTIMUM for gain in gains)


def test_relaxing_matters_somewhere():
    gains = (
        eliminated_integer(name, radius) - eliminated_relaxed(name, radius) for name in MAX_POOLED for radius in RADII
    )
    assert any(gain > 10 * SAME_OPTIMUM for gain in gains)

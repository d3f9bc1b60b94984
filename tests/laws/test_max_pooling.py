"""Law of max pooling: literal relaxed <= eliminated relaxed <= integer optimum, which is the same for both."""

from __future__ import annotations

from functools import cache

import pytest

from critical_neurons.bounding import bound_network
from critical_neurons.encoding import pools
from critical_neurons.encoding.literal import encode_literal
from critical_neurons.encoding.objective import Objective
from critical_neurons.encoding.paper import encode_paper
from critical_neurons.network import MaxPool
from critical_neurons.solution import Status
from critical_neurons.solving import Limits, find_solver, ignore_progress
from tests.zoo import MAX_POOLED, ZOO, share_case

SAME_OPTIMUM = 1e-4
SOLVED = Limits(gap=1e-5, time_limit=60.0, threads=1)
RADII = [0.0, 0.02]

TINIEST = ["max pool before the relu", "padded max pool", "max pool in one dimension", "max pool of a relu6", "vgg"]
"""Solved as integer programs with every gate and choice a column."""


def solve(encoder, name, radius, *, integer):
    case = share_case(name, count=2)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    program = encoder(case.network, bounds, case.labels, Objective(), integer=integer)
    solution = find_solver("highs").solve(program, SOLVED, ignore_progress)
    assert solution.status is Status.OPTIMAL
    return solution.objective


eliminated_relaxed = cache(lambda name, radius: solve(encode_paper, name, radius, integer=False))
eliminated_integer = cache(lambda name, radius: solve(encode_paper, name, radius, integer=True))


def slack(value):
    return SAME_OPTIMUM * max(1.0, abs(value))


def test_the_zoo_knows_its_max_pools():
    pooled = [name for name in ZOO if any(isinstance(op, MaxPool) for op in share_case(name).network.ops)]
    assert pooled == list(MAX_POOLED)


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("name", MAX_POOLED)
def test_relaxations_are_ordered(name, radius):
    literal = solve(encode_literal, name, radius, integer=False)
    relaxed, integer = eliminated_relaxed(name, radius), eliminated_integer(name, radius)
    assert literal <= relaxed + slack(relaxed)
    assert relaxed <= integer + slack(integer)


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("name", TINIEST)
def test_integer_optima_are_the_same(name, radius):
    expected = solve(encode_literal, name, radius, integer=True)
    assert eliminated_integer(name, radius) == pytest.approx(expected, rel=SAME_OPTIMUM, abs=SAME_OPTIMUM)


def test_windows_too_many_to_compare_relax_more(monkeypatch):
    """No rival is compared with its winner: the relaxation is weaker, the integer optimum the same."""
    names = [name for name in MAX_POOLED if name != "vgg"]
    compared = {name: (eliminated_relaxed(name, 0.0), eliminated_integer(name, 0.0)) for name in names}
    monkeypatch.setattr(pools, "PAIR_LIMIT", 0)
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
    gains = [eliminated_relaxed(name, 0.0) - solve(encode_literal, name, 0.0, integer=False) for name in MAX_POOLED]
    assert max(gains) > 10 * SAME_OPTIMUM


def test_relaxing_matters_somewhere():
    gains = [
        eliminated_integer(name, radius) - eliminated_relaxed(name, radius) for name in MAX_POOLED for radius in RADII
    ]
    assert max(gains) > 10 * SAME_OPTIMUM

"""Law: without max pooling, the eliminated program and the literal one have the same optimum, whoever solves them."""

from __future__ import annotations

from itertools import product

import pytest

from critical_neurons.core.solution import Status
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.zoo import CHAINS, GRAPHS, share_case

SAME_OPTIMUM = 1e-4
"""Relative difference of two optima that count as the same."""

SOLVED = Limits(gap=1e-5, time_limit=300.0, threads=1)
RADII = [0.0, 1e-3, 1e-2, 5e-2]
UNPOOLED = [*CHAINS, *GRAPHS]

OPERATIONS = (
    *("mlp", "stride, padding and dilation", "constants of every channel", "clamps", "resnet"),
    *("concatenation on a stream", "grouped convolutions", "leaky relus", "maxima"),
)
"""Every kind of operation and of shared unit. Which linear map a layer is does not matter to an optimum; that all
maps are right is the law of the logits."""

TOO_LARGE = ["resnet", "pre-activation resnet", "mobilenet", "densenet"]
"""Clarabel breaks down on some of their literal programs."""


def encode_both(name, radius, objective):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    return [
        encode(case.network, bounds, case.labels, Objective(objective), integer=False)
        for encode in (encode_paper, encode_literal)
    ]


def optimum(program, solver):
    solution = find_solver(solver).solve(program, SOLVED, ignore_progress)
    assert solution.status is Status.OPTIMAL or (solver.startswith("cvxpy") and solution.status is Status.FEASIBLE)
    return solution.objective


def same(value):
    return pytest.approx(value, rel=SAME_OPTIMUM, abs=SAME_OPTIMUM)


@pytest.mark.networks(*OPERATIONS)
@pytest.mark.parametrize(
    ("radius", "objective"),
    [
        (5e-2, "balanced"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(RADII[:-1], ["balanced"])),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(RADII, ["paper"])),
    ],
)
@pytest.mark.parametrize("name", UNPOOLED)
def test_eliminated_and_literal_have_the_same_optimum(name, radius, objective):
    assert_same_optimum(name, radius, objective)


@pytest.mark.parametrize("name", ["mlp", "nest", "clamps", "concatenation on a stream"])
def test_by_the_printed_objective_too(name):
    assert_same_optimum(name, 0.0, "paper")


def assert_same_optimum(name, radius, objective):
    eliminated, literal = encode_both(name, radius, objective)
    referee = "highs" if name in TOO_LARGE else "cvxpy:CLARABEL"
    expected = optimum(literal, referee)
    assert optimum(eliminated.write_out(), referee) == same(expected)
    for solver in ("highs", "barrier"):
        assert optimum(eliminated, solver) == same(expected)


@pytest.mark.parametrize("name", ["mlp", "nest", "batch norm behind the relu", "concatenation"])
def test_rows_added_when_violated_are_enough(name):
    eliminated, literal = encode_both(name, 5e-2, "balanced")
    assert optimum(literal, "highs") == same(optimum(eliminated, "highs"))
    assert optimum(eliminated.write_out(), "highs") == same(optimum(eliminated, "highs"))


@pytest.mark.parametrize("radius", [0.0, 0.3])
@pytest.mark.parametrize("name", ["mlp", "clamps", "nest", "addition behind relus"])
def test_the_optimum_is_the_same_where_the_loss_counts_most(name, radius):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    eliminated, literal = (
        encode(case.network, bounds, case.labels, Objective(loss_weight=500.0), integer=False)
        for encode in (encode_paper, encode_literal)
    )
    assert (eliminated.gate_count > 0) == (radius > 0)
    assert optimum(eliminated, "highs") == same(optimum(literal, "highs"))


@pytest.mark.parametrize("radius", [1e-2, 5e-2])
def test_the_radii_leave_gates_open(radius):
    """Otherwise the law above would only speak about stable units."""
    gates = [encode_both(name, radius, "paper")[0].gate_count for name in OPERATIONS]
    assert sum(count > 0 for count in gates) >= len(OPERATIONS) // 2


def test_scores_move():
    """Otherwise all optima would be the start."""
    moved = 0
    for name in OPERATIONS:
        program = encode_both(name, 0.0, "balanced")[0]
        moved += optimum(program, "highs") < program.value(program.start) - SAME_OPTIMUM
    assert moved >= len(OPERATIONS) // 2

"""Law: the integer optimum is the best over all gates and choices of max pools, and the relaxation is below it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from critical_neurons.core.solution import Status
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.zoo import share_case

SAME_OPTIMUM = 1e-4
MOST_GATES = 8
SOLVED = Limits(gap=1e-5, time_limit=30.0, threads=1)

CASES = [
    ("mlp", 0.1, 0),
    ("mlp of three hidden layers", 0.1, 0),
    ("mlp without biases", 0.1, 0),
    ("batch norm without parameters", 0.1, 0),
    ("stride, padding and dilation", 0.1, 0),
    ("groups", 0.1, 0),
    ("nest", 0.03, 0),
    ("view by number", 0.03, 0),
    ("mean method", 0.1, 0),
]
"""Network, radius, seed: between 2 and 6 gates each."""

POOLED = [("two windows", 0.1, 5), ("two windows", 0.3, 2), ("two windows", 0.3, 5)]
"""On one data point: up to 4 gates, and 2 choices in each of 2 windows. The last has all of them open."""

USUAL = [
    case if case[0] in ("mlp", "nest") or case == POOLED[-1] else pytest.param(*case, marks=pytest.mark.slow)
    for case in CASES + POOLED
]


def encode(encoder, name, radius, seed, *, integer=True, objective="balanced"):
    case = share_case(name, count=1 if name == "two windows" else 3, seed=seed)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    return encoder(case.network, bounds, case.labels, Objective(objective), integer=integer)


def enumerate_gates(program):
    """The smallest optimum over all 0/1 patterns of the integer columns, each fixed by its bounds.

    Patterns that do not choose one element of every window are left out.
    """
    gates = np.flatnonzero(program.integer)
    assert 2 <= len(gates) <= MOST_GATES
    solver = find_solver("cvxpy:CLARABEL")
    optima = []
    windows = np.flatnonzero((program.rows.lower == 1) & (program.rows.upper == 1))
    choices = program.rows.matrix[windows][:, gates]
    for pattern in product([0.0, 1.0], repeat=len(gates)):
        if np.any(choices @ np.array(pattern) != 1):
            continue
        lower, upper = program.lower.copy(), program.upper.copy()
        lower[gates] = upper[gates] = pattern
        fixed = replace(program, lower=lower, upper=upper, integer=np.zeros_like(program.integer), start=None)
        solution = solver.solve(fixed, SOLVED, ignore_progress)
        assert solution.status in (Status.OPTIMAL, Status.FEASIBLE, Status.INFEASIBLE)
        if solution.status is not Status.INFEASIBLE:
            optima.append(solution.objective)
    return min(optima)


def solve_with_highs(program):
    solution = find_solver("highs").solve(program, SOLVED, ignore_progress)
    assert solution.status is Status.OPTIMAL
    return solution


@pytest.mark.parametrize(("name", "radius", "seed"), USUAL)
def test_integer_optimum_is_that_of_enumeration(name, radius, seed):
    expected = enumerate_gates(encode(encode_literal, name, radius, seed))
    solution = solve_with_highs(encode(encode_paper, name, radius, seed))
    assert solution.objective == pytest.approx(expected, rel=SAME_OPTIMUM, abs=SAME_OPTIMUM)
    assert solution.bound <= expected + SAME_OPTIMUM * max(1.0, abs(expected))


def test_printed_objective_agrees_with_enumeration():
    program = encode(encode_literal, "mlp", 0.05, 0, objective="paper")
    solution = solve_with_highs(encode(encode_paper, "mlp", 0.05, 0, objective="paper"))
    assert solution.objective == pytest.approx(enumerate_gates(program), rel=SAME_OPTIMUM)


@pytest.mark.parametrize("encoder", [encode_paper, encode_literal])
@pytest.mark.parametrize(("name", "radius", "seed"), USUAL)
def test_relaxation_is_below_the_integer_optimum(name, radius, seed, encoder):
    relaxed = solve_with_highs(encode(encoder, name, radius, seed, integer=False))
    integer = solve_with_highs(encode(encoder, name, radius, seed))
    slack = SAME_OPTIMUM * max(1.0, abs(integer.objective))
    assert relaxed.objective <= integer.objective + slack
    gates = integer.point[encode(encoder, name, radius, seed).integer]
    assert np.allclose(gates, np.round(gates), atol=SAME_OPTIMUM)


def test_integrality_matters_somewhere():
    """Otherwise the law above would hold for a solver that ignores it."""
    differences = (
        solve_with_highs(encode(encode_paper, *case)).objective
        - solve_with_highs(encode(encode_paper, *case, integer=False)).objective
        for case in CASES
    )
    assert any(difference > 10 * SAME_OPTIMUM for difference in differences)


def test_choices_of_windows_are_enumerated_too():
    for encoder in (encode_paper, encode_literal):
        program = encode(encoder, *POOLED[-1])
        assert program.integer.sum() == MOST_GATES
        assert np.sum((program.rows.lower == 1) & (program.rows.upper == 1)) == 2
    relaxed = solve_with_highs(encode(encode_paper, *POOLED[-1], integer=False)).objective
    assert solve_with_highs(encode(encode_paper, *POOLED[-1])).objective > relaxed + 10 * SAME_OPTIMUM

"""Law: with most gates open, relaxed programs have one optimum, whoever solves them and whatever is eliminated."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.program import SHARED
from critical_neurons.core.solution import Status
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE
from tests.zoo import first_or_slow

GAP = 1e-7
SAME = 1e-6
SOUND = 1e-8
LIMITS = Limits(gap=GAP, time_limit=100.0, threads=1)
IMAGES = 3


def head(channels, side):
    return [
        nn.Conv2d(channels, 4, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * side * side, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    ]


def stem(pool, *, bias=True):
    return [nn.Conv2d(2, 3, 3, bias=bias), nn.ReLU(), pool]


NETWORKS = {
    "pooled part": (0.05, lambda: [nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), *head(5, 2)]),
    "part": (0.3, lambda: [nn.Conv2d(2, 9, 3, stride=3), nn.ReLU(), *head(9, 2)]),
    "two convolutions": (0.1, lambda: [*stem(nn.AvgPool2d(2)), nn.Conv2d(3, 4, 2), nn.ReLU(), *head(4, 2)]),
    "max pool": (0.02, lambda: [*stem(nn.MaxPool2d(2)), nn.Flatten(), nn.Linear(27, 6), nn.ReLU(), nn.Linear(6, 3)]),
    "no biases": (0.02, lambda: [*stem(nn.MaxPool2d(3), bias=False), nn.Flatten(), nn.Linear(12, 3, bias=False)]),
}
"""Radius and layers."""


@cache
def make_case(name):
    radius, layers = NETWORKS[name]
    torch.manual_seed(1)
    model, inputs = nn.Sequential(*layers()).eval(), torch.rand(IMAGES, 2, 8, 8)
    network = read_network(model, inputs)
    return model, inputs, network, bound_network(network, inputs.double().numpy(), radius=radius), radius


def encode(name, encode_program=encode_paper, *, loss_weight=20.0, **settings):
    _, _, network, bounds, _ = make_case(name)
    labels = np.arange(IMAGES)
    return encode_program(
        network, bounds, labels, Objective(loss_weight=loss_weight), **{"integer": False, **settings}
    )


def solve(program, solver):
    found = find_solver(solver).solve(program, LIMITS, ignore_progress)
    assert found.status is Status.OPTIMAL
    return found


@pytest.mark.parametrize(
    "name", first_or_slow("two convolutions", "max pool", "pooled part", "part", "no biases", first=2)
)
def test_interior_points_and_cutting_planes_agree(name):
    program = encode(name)
    assert program.gate_count > 50
    assert np.any(program.origins.points != SHARED)
    expected = solve(program, "highs")
    found = solve(program, "barrier")
    assert found.objective == pytest.approx(expected.objective, rel=SAME)
    assert found.bound <= expected.objective + SOUND
    assert found.objective < program.value(program.start) - SAME
    assert max(source.violations(found.point).max() for source in program.sources) <= FEASIBILITY_TOLERANCE


@pytest.mark.parametrize("name", first_or_slow("two convolutions", "pooled part", "part"))
def test_the_literal_program_agrees(name):
    expected = solve(encode(name, encode_literal), "highs")
    assert solve(encode(name), "barrier").objective == pytest.approx(expected.objective, rel=SAME)


@pytest.mark.parametrize("name", first_or_slow("no biases", "max pool"))
def test_choices_need_no_column(name):
    """Those of the integer program, relaxed, have one each; and the literal one is no tighter."""
    whole = encode(name, integer=True)
    with_columns = replace(whole, integer=np.zeros_like(whole.integer))
    found = solve(encode(name), "barrier").objective
    assert whole.column_count > encode(name).column_count
    assert found == pytest.approx(solve(with_columns, "highs").objective, rel=SAME)
    assert solve(encode(name, encode_literal), "highs").bound <= found + SOUND


@pytest.mark.parametrize("name", NETWORKS)
def test_proposals_keep_the_scores_and_the_rows(name):
    """With scores near 1 they are feasible, and the later ones have the smaller loss."""
    program = encode(name)
    point = program.start.copy()
    point[program.blocks["activation"]] = np.random.default_rng(0).uniform(
        size=len(point[program.blocks["activation"]])
    )
    proposed = [program.raise_term(each) for each in program.propose(point)]
    for each in proposed:
        assert np.array_equal(each[program.blocks["score"]], point[program.blocks["score"]])
        assert max(source.violations(each).max() for source in program.sources) <= FEASIBILITY_TOLERANCE
    assert min(map(program.value, proposed[1:])) < program.value(proposed[0])
    kept = next(program.propose(program.start))
    assert np.allclose(kept, program.start)


def test_no_row_has_columns_of_two_data_points():
    program = encode("two convolutions")
    whole = program.write_out().rows.matrix
    forms = program.term.affine_forms()[0]
    for matrix, row in [(whole, row) for row in range(whole.shape[0])] + [
        (forms, row) for row in range(forms.shape[0])
    ]:
        points = program.origins.points[matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]]
        assert len(np.unique(points[points != SHARED])) <= 1


@pytest.mark.parametrize("solver", ["highs", "barrier", "auto"])
def test_however_little_time_there_is_a_point_and_a_bound(solver):
    model, inputs, _, _, radius = make_case("two convolutions")
    program, limits = cn.Paper(integer=False, input_radius=radius), cn.Solver(solver, time_limit=1e-3)
    found = cn.score(model, inputs, np.arange(IMAGES), formulation=program, solver=limits)
    assert found.status is Status.FEASIBLE
    assert np.isfinite(found.bound)
    assert found.bound <= solve(encode("two convolutions", loss_weight=5.0), "highs").objective

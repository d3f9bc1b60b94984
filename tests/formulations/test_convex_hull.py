"""Rows of the convex hull: no mask breaks one, and with whole scores below they leave the masked network alone."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

import critical_neurons as cn
from critical_neurons.formulations import reduced_space
from tests.zoo import ZOO, share_case

KEPT = 1e-9
EXACT = 1e-6


def encode_exact(name):
    case = share_case(name)
    bounds = cn.bound_network(case.network, case.inputs, pruned=True)
    return cn.encode(case.network, bounds, case.labels, formulation="exact", binary=True)


def draw_masks(program, count, seed=0):
    """Points of the program: forward passes with units removed at random."""
    generator = np.random.default_rng(seed)
    points = []
    for _ in range(count):
        point = np.zeros(program.column_count)
        score = program.blocks["score"]
        point[score] = generator.integers(0, 2, score.stop) if len(points) else 1.0
        points.append(program.complete(point))
    return np.array(points)


@pytest.mark.parametrize("name", ZOO)
def test_no_mask_breaks_a_row(name):
    program = encode_exact(name)
    points = draw_masks(program, 12)
    generator = np.random.default_rng(1)
    for _ in range(10):
        mixture = generator.dirichlet(np.ones(len(points))) @ points
        for point in (generator.random(program.column_count), mixture):
            rows = program.branching.hulls.separate(point)
            values = rows.matrix @ points.T
            assert np.all(values >= rows.lower[:, None] - KEPT)
            assert np.all(values <= rows.upper[:, None] + KEPT)


@pytest.mark.parametrize("name", ["mlp", "mlp without biases", "resnet", "vgg"])
def test_rows_cut_off_the_point_they_were_found_at(name):
    program = encode_exact(name)
    point = np.random.default_rng(0).random(program.column_count)
    rows = program.branching.hulls.separate(point)
    assert len(rows)
    values = rows.matrix @ point
    assert np.all((values < rows.lower) | (values > rows.upper))


def test_a_mask_is_not_cut_off():
    program = encode_exact("mlp")
    for point in draw_masks(program, 5):
        assert len(program.branching.hulls.separate(point)) == 0


def test_whole_scores_leave_the_masked_network_alone():
    """The largest activation of the second layer under the rows, gates free, is that of the forward pass."""
    program = encode_exact("mlp")
    score, gate = program.blocks["score"], program.blocks["gate"]
    (point,) = draw_masks(program, 2)[1:]
    lower, upper = np.zeros(program.column_count), np.ones(program.column_count)
    lower[score] = upper[score] = point[score]
    whole = program.write_out()
    for column in range(program.blocks["activation"].start, program.blocks["activation"].stop):
        parts, cost = [whole.rows], -np.eye(program.column_count)[column]
        for _ in range(30):
            found = maximise(parts, cost, lower, upper)
            rows = program.branching.hulls.separate(found)
            if not len(rows):
                break
            parts.append(rows)
        assert found[column] <= point[column] + 1.01 * 1e-2
    assert gate.stop > gate.start


def maximise(parts, cost, lower, upper):
    matrix, sides = [], []
    for rows in parts:
        for sign, side in ((1, rows.upper), (-1, -rows.lower)):
            finite = np.isfinite(side)
            matrix.append(sign * rows.matrix.toarray()[finite])
            sides.append(side[finite])
    upper = np.where(lower == upper, upper, np.inf)
    answer = linprog(cost, np.concatenate(matrix), np.concatenate(sides), bounds=np.stack([lower, upper], axis=1))
    assert answer.status == 0
    return answer.x


def test_programs_too_large_go_without(monkeypatch):
    monkeypatch.setattr(reduced_space, "MOST_NUMBERS", 10)
    program = encode_exact("mlp")
    assert program.branching.hulls is None
    assert cn.solve(program, cn.Solver(threads=1)).status is cn.Status.OPTIMAL

"""One network of two inputs, two units and two classes, with every row of both programs worked out by hand.

    x = (1, 1), radius 1/2       p = (x1 + 2 x2, 2 x1 - 2 x2) = (3, 0), in [1.5, 4.5] and [-2, 2]
    logits = (h1 + h2, 2 h2 + 1), label 0

Unit 1 is live: h1 = 3 - 4.5 (1 - s1) = 4.5 s1 - 1.5. Unit 2 is unstable: q2 = 0 - 2 (1 - s2) = 2 s2 - 2, and the
eliminated program has y2 = h2 / 2 for it. Neither p depends on a score, so the rows q >= min(L, 0) are bounds of the
scores: 4.5 s1 - 1.5 >= 0 and 2 s2 - 2 >= -2.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress

INFINITY = np.inf
EXACT = 1e-12
SOLVED = 1e-5


@pytest.fixture
def case():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0], [2.0, -2.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        model[2].bias.copy_(torch.tensor([0.0, 1.0]))
    inputs = torch.ones(1, 2, dtype=torch.float64)
    network = read_network(model, inputs)
    bounds = bound_network(network, inputs.numpy(), radius=0.5)
    return network, bounds, np.array([0]), Objective("balanced", loss_weight=5.0, rescale=2.0)


@pytest.fixture
def programs(case):
    return {encode.__name__: encode(*case) for encode in (encode_paper, encode_literal)}


def test_eliminated_program(programs):
    program = programs["encode_paper"].write_out()
    #   s1    s2    y2    z2    t    softmax
    expected = [
        ([-0.5, -0.5, 0.0, 0.0, 1.0, 0.0], -2.0, INFINITY),  # t >= (s1 - 2)/2 + (s2 - 2)/2
        ([0.0, 0.0, 1.0, -1.0, 0.0, 0.0], -INFINITY, 0.0),  # y2 <= z2
        ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1.5 / 4.5, 6.0 / 4.5),  # 0 <= 4.5 s1 - 1.5 <= 4.5, divided by 4.5
        ([0.0, 1.0, -1.0, -1.0, 0.0, 0.0], 0.0, INFINITY),  # 2 y2 - (1 - z2) 2 <= 2 s2 - 2, divided by 2
        ([0.0, 1.0, -1.0, 0.0, 0.0, 0.0], -INFINITY, 1.0),  # 2 s2 - 2 <= 2 y2, divided by 2
    ]
    start = [1, 1, 0, 0, -1, np.log1p(np.exp(-2.0))]
    assert_program(program, expected, integer=[3], start=start, least=[1 / 3, 0], bounded=range(4))
    matrix, offset, loss = program.term.affine_forms()
    assert np.allclose(matrix.toarray(), [[4.5, 0, 2, 0, 0, 0], [0, 0, 4, 0, 0, 0]], rtol=0, atol=EXACT)
    assert np.allclose(offset, [-1.5, 1.0], rtol=0, atol=EXACT)
    assert loss.labels.tolist() == [0]


def test_relaxed_program(case):
    """Without z2: 2 y2 - (1 - z2) 2 <= q2 is weakest where z2 is least, and y2 <= z2 is all that keeps it up."""
    program = encode_paper(*case, integer=False).write_out()
    #   s1    s2    y2    t    softmax
    expected = [
        ([-0.5, -0.5, 0.0, 1.0, 0.0], -2.0, INFINITY),  # t >= (s1 - 2)/2 + (s2 - 2)/2
        ([1.0, 0.0, 0.0, 0.0, 0.0], 1.5 / 4.5, 6.0 / 4.5),  # 0 <= 4.5 s1 - 1.5 <= 4.5, divided by 4.5
        ([0.0, 0.5, -1.0, 0.0, 0.0], 0.0, INFINITY),  # 2 y2 - (1 - y2) 2 <= 2 s2 - 2, divided by 4
        ([0.0, 1.0, -1.0, 0.0, 0.0], -INFINITY, 1.0),  # 2 s2 - 2 <= 2 y2, divided by 2
    ]
    start = [1, 1, 0, -1, np.log1p(np.exp(-2.0))]
    assert_program(program, expected, integer=[], start=start, least=[1 / 3, 0], bounded=[0, 1, 2])
    assert program.gate_count == 1


def test_literal_program(programs):
    program = programs["encode_literal"]
    #   s1    s2   h1    h2   z1    z2    t    softmax
    expected = [
        ([-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0], -2.0, INFINITY),  # t >= (s1 - 2)/2 + (s2 - 2)/2
        ([4.5, 0.0, -1.0, 0.0, 1.5, 0.0, 0.0, 0.0], 3.0, INFINITY),  # h1 + (1 - z1) 1.5 <= 3 - (1 - s1) 4.5
        ([0.0, 2.0, 0.0, -1.0, 0.0, -2.0, 0.0, 0.0], 0.0, INFINITY),  # h2 - (1 - z2) 2 <= 0 - (1 - s2) 2
        ([4.5, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0], -INFINITY, 1.5),  # h1 >= 3 - (1 - s1) 4.5
        ([0.0, 2.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0], -INFINITY, 2.0),  # h2 >= 0 - (1 - s2) 2
        ([0.0, 0.0, 1.0, 0.0, -4.5, 0.0, 0.0, 0.0], -INFINITY, 0.0),  # h1 <= z1 · 4.5
        ([0.0, 0.0, 0.0, 1.0, 0.0, -2.0, 0.0, 0.0], -INFINITY, 0.0),  # h2 <= z2 · 2
    ]
    start = [1, 1, 3, 0, 1, 0, -1, np.log1p(np.exp(-2.0))]
    assert_program(program, expected, integer=[5], start=start, least=[0, 0], bounded=[0, 1, 4, 5])
    matrix, offset, loss = program.term.affine_forms()
    logits = [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 2, 0, 0, 0, 0]]
    assert np.allclose(matrix.toarray(), logits, rtol=0, atol=EXACT)
    assert np.allclose(offset, [0.0, 1.0], rtol=0, atol=EXACT)
    assert loss.labels.tolist() == [0]


@pytest.mark.parametrize("name", ["encode_paper", "encode_literal"])
def test_optimum(programs, name):
    """Unit 2 only helps the wrong class: s2 = 0. For s1 the slope 1/2 - 22.5 sigmoid(2.5 - 4.5 s1) is negative."""
    solution = find_solver("highs").solve(programs[name], Limits(gap=0.1 * SOLVED), ignore_progress)
    assert solution.objective == pytest.approx(-1.5 + 5.0 * np.log1p(np.exp(-2.0)), abs=SOLVED)
    assert solution.point[:2] == pytest.approx([1.0, 0.0], abs=SOLVED)


def assert_program(program, rows, *, integer, start, least, bounded):
    """`least`: the lower bounds of the scores; `bounded`: the columns that are at most 1."""
    width = program.column_count
    assert np.allclose(program.rows.matrix.toarray(), [row for row, _, _ in rows], rtol=0, atol=EXACT)
    assert np.allclose(program.rows.lower, [lower for _, lower, _ in rows], rtol=0, atol=EXACT)
    assert np.allclose(program.rows.upper, [upper for _, _, upper in rows], rtol=0, atol=EXACT)
    assert np.flatnonzero(program.integer).tolist() == integer
    assert np.allclose(program.start, start, rtol=0, atol=EXACT)
    assert program.cost.tolist() == [0.0] * (width - 2) + [1.0, 5.0]
    assert np.allclose(program.lower, [*least, *[0.0] * (width - 4), -INFINITY, 0.0], rtol=0, atol=EXACT)
    assert program.upper.tolist() == [1.0 if column in bounded else INFINITY for column in range(width)]

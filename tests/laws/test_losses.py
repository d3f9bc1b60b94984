"""Law: whatever the loss, all solvers find one optimum, and the exact program's is the best mask's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import critical_neurons as cn
from critical_neurons.core.loss import LogisticLoss, SquaredLoss
from critical_neurons.core.solution import Status
from critical_neurons.errors import InvalidSettingError
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress

SAME_OPTIMUM = 1e-4
SOLVED = Limits(gap=1e-5, time_limit=60.0, threads=1)
BATCH = 4


def draw(width, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.Linear(3, width))
    inputs = torch.randn(BATCH, 3, dtype=torch.float64)
    return model.double(), inputs


def draw_targets(width):
    return np.random.default_rng(0).normal(size=(BATCH, width))


LIMITS = cn.Solver(threads=1, gap=1e-6)
LABELS = np.array([0, 1, 1, 0])
LOSSES = {
    "logistic": (1, LogisticLoss(LABELS), LABELS),
    "squared": (1, SquaredLoss(draw_targets(1)), draw_targets(1)[:, 0]),
    "squared of two": (2, SquaredLoss(draw_targets(2)), draw_targets(2)),
}


@pytest.mark.parametrize("radius", [0.0, 0.05])
@pytest.mark.parametrize("name", LOSSES)
def test_all_solvers_find_one_optimum(name, radius):
    width, loss, _ = LOSSES[name]
    model, inputs = draw(width)
    network = read_network(model, inputs)
    bounds = bound_network(network, inputs.numpy(), radius=radius)
    literal = encode_literal(network, bounds, loss, Objective(), integer=False)
    eliminated = encode_paper(network, bounds, loss, Objective(), integer=False)
    referee = find_solver("cvxpy:CLARABEL").solve(literal, SOLVED, ignore_progress)
    assert referee.status is Status.OPTIMAL
    for solver in ("highs", "barrier", "cvxpy:CLARABEL"):
        found = find_solver(solver).solve(eliminated, SOLVED, ignore_progress)
        assert found.status is Status.OPTIMAL
        assert found.objective == pytest.approx(referee.objective, rel=SAME_OPTIMUM, abs=SAME_OPTIMUM)


@pytest.mark.parametrize("name", LOSSES)
def test_the_exact_optimum_is_the_best_mask(name):
    width, loss, labels = LOSSES[name]
    model, inputs = draw(width)
    scores = cn.score(model, inputs, labels, formulation=cn.Exact(binary=True), solver=LIMITS)
    best = np.inf
    for mask in product([0.0, 1.0], repeat=7):
        first, second = torch.tensor(mask[:4]).double(), torch.tensor(mask[4:]).double()
        with torch.no_grad():
            hidden = F.relu(model[0](inputs)) * first
            outputs = model[4](F.leaky_relu(model[2](hidden), 0.1) * second).numpy()
        means = [np.mean(mask[:4]) - 2, np.mean(mask[4:]) - 2]
        best = min(best, max(means) + 5.0 * loss.values(outputs).mean())
    assert scores.status is cn.Status.OPTIMAL
    assert scores.objective == pytest.approx(best, rel=SAME_OPTIMUM, abs=SAME_OPTIMUM)


@pytest.mark.parametrize("end", ["(batch, 1)", "(batch,)", "sigmoid"])
def test_one_output_is_two_with_a_row_of_zeros(end):
    model, inputs = draw(1)
    pair = nn.Sequential(*model[:4], nn.Linear(3, 2)).double()
    with torch.no_grad():
        pair[4].weight.copy_(torch.cat([torch.zeros(1, 3), model[4].weight]))
        pair[4].bias.copy_(torch.cat([torch.zeros(1), model[4].bias]))
    ends = {"(batch, 1)": [], "(batch,)": [nn.Flatten(0)], "sigmoid": [nn.Sigmoid()]}[end]
    single = cn.score(nn.Sequential(*model, *ends), inputs, LABELS, solver=LIMITS)
    double = cn.score(pair, inputs, LABELS, solver=LIMITS)
    assert single.objective == pytest.approx(double.objective, rel=1e-5)
    assert np.allclose(single.per_unit, double.per_unit, rtol=0, atol=1e-3)


def test_scores_of_a_regression_prune_it():
    model, inputs = draw(2)
    scores = cn.score(model, inputs, draw_targets(2), solver=cn.Solver(threads=1))
    assert scores.settings["labels"] == draw_targets(2).tolist()
    smaller = cn.prune(model, cn.plan(scores, units=0.5), inputs)
    assert smaller[0].out_features < 4


def test_squares_are_of_outputs_without_classes():
    model, inputs = draw(2)
    with pytest.raises(InvalidSettingError, match="ByClass: the squared loss has targets"):
        cn.score(model, inputs, draw_targets(2), formulation=cn.ByClass())
    with pytest.raises(InvalidSettingError, match=r"softmax.* is left out"):
        cn.score(nn.Sequential(*model, nn.Softmax(1)), inputs, draw_targets(2))
    with pytest.raises(InvalidSettingError, match="loss: found 'hinge'"):
        cn.score(model, inputs, formulation=cn.Paper(loss="hinge"))

"""The first-order method: sound bounds, the optima of HiGHS, feasible points, and adjoints that match."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.core.loss import LogisticLoss, SoftmaxLoss, SquaredLoss
from critical_neurons.core.solution import Status
from critical_neurons.errors import InvalidSettingError
from critical_neurons.formulations import encode
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, auto, find_solver, ignore_progress
from critical_neurons.solvers.first_order import FirstOrderSolver, minimise_near
from critical_neurons.solvers.implied_bounds import imply_bounds
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE

GAPS = {"make_dense": 1e-4, "make_pooled": 1e-2}
"""With sums, of whose pieces one at a time is a row, the method converges slowly."""

SOUND = 1e-8
"""By how much rounding may push a bound above the optimum."""

LIMITS = Limits(gap=1e-7, time_limit=60.0, threads=1)
COUNT = 4


def make_dense():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 4)), (12,)


def make_pooled():
    layers = [nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3), nn.Conv2d(5, 4, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)), (2, 6, 6)


def make_program(make, radius, objective="authors", **settings):
    torch.manual_seed(0)
    model, shape = make()
    inputs = torch.rand(COUNT, *shape)
    network = read_network(model.eval(), inputs)
    bounds = bound_network(network, inputs.double().numpy(), radius=radius)
    labels = model(inputs).argmax(1).numpy()
    return encode(network, bounds, labels, Objective(objective), **{"integer": False, **settings})


CASES = [(make, radius) for make in (make_dense, make_pooled) for radius in (0.0, 1e-2, 1e-1)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def case(request):
    return request.param


@pytest.fixture
def program(case):
    return make_program(*case)


def solve(program, solver, limits=LIMITS, report=ignore_progress):
    return find_solver(solver).solve(program, limits, report)


def test_the_optimum_of_highs(case, program):
    gap = GAPS[case[0].__name__]
    expected, found = solve(program, "highs"), solve(program, "first-order", replace(LIMITS, gap=gap))
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(expected.objective, abs=2 * gap * max(1.0, abs(expected.objective)))
    assert max(step.bound for step in found.history) <= expected.objective + SOUND
    assert found.objective >= expected.bound - SOUND
    assert found.objective == program.value(program.raise_term(found.point))
    for source in program.sources:
        assert source.violations(found.point).max() <= FEASIBILITY_TOLERANCE
    assert np.all((found.point >= program.lower - SOUND) & (found.point <= program.upper + SOUND))


def test_any_multipliers_give_a_sound_bound(program):
    optimum = solve(program, "highs").objective
    saddle, term, random = program.saddle, program.term, np.random.default_rng(0)
    weights = program.cost[term.columns]
    for size in (0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0):
        logits = 3.0 * random.standard_normal(term.logits(program.start).shape)
        seeds = weights[:, None] * term.loss.gradients(logits)
        multipliers = size * random.standard_normal(len(saddle.limits[0]))
        bound = saddle.bound(multipliers, seeds, *imply_bounds(program))
        bound += weights @ term.loss.values(logits) - (seeds * logits).sum()
        assert np.isfinite(bound)
        assert bound <= optimum + SOUND


def test_the_adjoint_is_that_of_the_rows(program):
    saddle, random = program.saddle, np.random.default_rng(0)
    count = program.term.columns.start
    saddle.aim(random.random(count))
    at, step = random.random((2, count))
    (rows, logits), (moved_rows, moved_logits) = saddle.apply(at), saddle.apply(at + step)
    multipliers, seeds = random.standard_normal(len(rows)), random.standard_normal(logits.shape)
    change = multipliers @ (moved_rows - rows) + (seeds * (moved_logits - logits)).sum()
    assert saddle.adjoint(multipliers, seeds) @ step == pytest.approx(change, rel=1e-9)


def test_rows_hold_where_the_sources_hold(program):
    """Every feasible point of the program satisfies the rows of the saddle point form."""
    lower, upper = program.saddle.limits
    rows, _ = program.saddle.apply(program.start[: program.term.columns.start])
    slack = 1e-9 * max(1.0, np.abs(rows).max())
    assert np.all((rows >= lower - slack) & (rows <= upper + slack))


@pytest.mark.parametrize(
    "loss",
    [
        SoftmaxLoss(np.array([0, 2, 1])),
        LogisticLoss(np.array([0, 1, 1])),
        SquaredLoss(np.arange(6.0).reshape(3, 2)),
    ],
    ids=lambda loss: type(loss).__name__,
)
@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e3])
def test_the_nearest_minimum(loss, strength):
    random = np.random.default_rng(0)
    classes = {SoftmaxLoss: 3, LogisticLoss: 1, SquaredLoss: 2}[type(loss)]
    near, weights = 5.0 * random.standard_normal((3, classes)), np.array([0.5, 1.0, 2.0])
    strengths = np.full(near.shape, strength)
    found = minimise_near(loss, weights, near, strengths, np.zeros(near.shape))
    slope = weights[:, None] * loss.gradients(found) + strengths * (found - near)
    assert np.abs(slope).max() <= 1e-9 * max(1.0, strength)


def test_a_time_limit_leaves_the_best_so_far():
    program = make_program(make_pooled, 1e-1)
    found = solve(program, "first-order", replace(LIMITS, gap=0.0, time_limit=0.5))
    assert found.status is Status.FEASIBLE
    assert found.seconds < 2.5
    assert found.bound <= found.objective <= program.value(program.start)


def test_an_interrupt_leaves_the_best_so_far():
    def interrupt(step):
        raise KeyboardInterrupt

    program = make_program(make_pooled, 1e-1)
    found = solve(program, "first-order", report=interrupt)
    assert found.interrupted
    assert found.objective <= program.value(program.start)


def make_max_pooled():
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers), (2, 6, 6)


@pytest.mark.parametrize(("make", "integer"), [(make_dense, True), (make_max_pooled, False)])
def test_programs_it_does_not_take(make, integer):
    with pytest.raises(InvalidSettingError, match="first-order takes relaxed programs"):
        solve(make_program(make, 1e-2, integer=integer), "first-order")


def test_auto_chooses_it_for_many_gates(monkeypatch):
    program, used = make_program(make_dense, 1e-1), []

    def solve_and_note(self, *args):
        used.append(self.name)
        return FirstOrderSolver._solve(self, *args)

    monkeypatch.setattr(FirstOrderSolver, "_solve", FirstOrderSolver.solve, raising=False)
    monkeypatch.setattr(FirstOrderSolver, "solve", solve_and_note)
    limits = replace(LIMITS, gap=1e-3)
    assert solve(program, "auto", limits).status is Status.OPTIMAL
    assert not used
    monkeypatch.setattr(auto, "MANY_GATES", program.gate_count)
    assert solve(program, "auto", limits).status is Status.OPTIMAL
    assert used == ["first-order"]

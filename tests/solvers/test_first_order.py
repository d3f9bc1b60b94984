"""The first-order method: sound bounds, the optima of HiGHS, feasible points, and adjoints that match."""

import os
import signal
import threading
from dataclasses import replace
from itertools import pairwise

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
from critical_neurons.formulations.saddle_point import project_on_simplex
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, auto, find_solver, ignore_progress
from critical_neurons.solvers.first_order import FirstOrderSolver
from critical_neurons.solvers.implied_bounds import imply_bounds
from critical_neurons.solvers.saddle_scaling import scale_saddle
from critical_neurons.solvers.saddle_steps import StepTaker, minimise_near
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE
from tests.zoo import first_or_slow

SOUND = 1e-8
"""By how much rounding may push a bound above the optimum."""

LIMITS = Limits(gap=1e-7, time_limit=60.0, threads=1)
COUNT = 4


def make_dense():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 4)), (12,)


def make_pooled():
    layers = [nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3), nn.Conv2d(5, 4, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)), (2, 6, 6)


def make_program(make, radius, objective="authors", seed=0, **settings):
    torch.manual_seed(seed)
    model, shape = make()
    inputs = torch.rand(COUNT, *shape)
    network = read_network(model.eval(), inputs)
    bounds = bound_network(network, inputs.double().numpy(), radius=radius)
    labels = model(inputs).argmax(1).numpy()
    goal = Objective(objective) if isinstance(objective, str) else objective
    return encode(network, bounds, labels, goal, **{"integer": False, **settings})


CASES = [(make, radius) for make in (make_dense, make_pooled) for radius in (0.0, 1e-2, 1e-1)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def case(request):
    return request.param


@pytest.fixture
def program(case):
    return make_program(*case)


def solve(program, solver, limits=LIMITS, report=ignore_progress):
    return find_solver(solver).solve(program, limits, report)


def assert_certified(program, found, expected):
    """Every bound is below the optimum, every incumbent is feasible and above it."""
    scale = max(1.0, abs(expected.objective))
    for step in found.history:
        assert step.bound <= expected.objective + SOUND * scale
        assert step.objective >= expected.bound - FEASIBILITY_TOLERANCE * scale
    assert found.objective == program.value(program.raise_term(found.point))
    for source in program.sources:
        assert source.violations(found.point).max() <= FEASIBILITY_TOLERANCE
    assert np.all((found.point >= program.lower) & (found.point <= program.upper))


@pytest.mark.parametrize(
    ("case", "gap"),
    [
        ((make_dense, 1e-1), 1e-4),
        ((make_pooled, 1e-1), 1e-4),
        *(pytest.param(each, 1e-5, marks=pytest.mark.slow) for each in CASES),
    ],
    indirect=["case"],
)
def test_the_optimum_of_highs(program, gap):
    expected = solve(program, "highs")
    found = solve(program, "first-order", replace(LIMITS, gap=gap, time_limit=300.0))
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(expected.objective, abs=2 * gap * max(1.0, abs(expected.objective)))
    assert_certified(program, found, expected)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(36, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(nn.functional.avg_pool2d(torch.relu(x + self.inner(x)), 2).flatten(1))


def make_residual():
    return Residual(), (2, 6, 6)


def make_sparse():
    """Rows without a single coefficient: a neuron with no weights in every layer."""
    model, shape = make_dense()
    with torch.no_grad():
        for layer in model[2::2]:
            layer.weight[0] = 0.0
    return model, shape


@pytest.mark.parametrize("rounds", first_or_slow(4, 2, 12))
@pytest.mark.parametrize("loss_weight", first_or_slow(50.0, 5.0))
@pytest.mark.parametrize("objective", first_or_slow("authors", "balanced"))
@pytest.mark.parametrize("make", [make_dense, make_pooled, make_residual, make_sparse])
def test_certificates_whenever_it_is_stopped(make, objective, loss_weight, rounds):
    def stop_later(step):
        steps.append(step)
        if len(steps) == rounds:
            raise KeyboardInterrupt

    steps = []
    program = make_program(make, 3e-2, Objective(objective, loss_weight=loss_weight))
    found = solve(program, "first-order", report=stop_later)
    assert_certified(program, found, solve(program, "highs"))


@pytest.mark.parametrize("make", [make_dense, make_residual])
def test_wide_boxes_begin_near_the_optimum(make):
    """All scores at their lower bounds leave no output; a little more leaves every output possible."""
    program = make_program(make, 100.0)
    found = solve(program, "first-order", replace(LIMITS, gap=0.1))
    assert found.history[0].objective <= solve(program, "highs").objective + 0.1


@pytest.mark.parametrize("make", [make_dense, make_residual])
def test_multipliers_of_a_step_are_the_nearest(make):
    """Nothing else that is allowed is nearer; the multipliers of the sparsity term are minus shares."""
    saddle = make_program(make, 1e-2).saddle
    lower, upper = saddle.limits
    random = np.random.default_rng(0)
    is_share = np.isin(np.arange(len(lower)), saddle.shares)
    strides = np.where(is_share, 0.5, random.uniform(0.1, 1.0, len(lower)))

    def judge(y, moved):
        """By row: h(y) + (y - moved)² / (2 strides)."""
        highest = np.where(y > 0, upper, lower)
        return np.where(y == 0, 0.0, y * np.where(y == 0, 0.0, highest)) + (y - moved) ** 2 / (2 * strides)

    for _ in range(20):
        moved = random.standard_normal(len(lower))
        found = saddle.project_multipliers(moved, strides)
        others = np.where(np.isfinite(np.where(moved > 0, upper, lower)), moved * random.random(len(lower)), 0.0)
        assert np.all((judge(found, moved) <= judge(others, moved) + 1e-12)[~is_share])
        assert found[is_share].max() <= 0.0
        assert found[is_share].sum() == pytest.approx(-1.0)
        for shares in random.dirichlet(np.ones(is_share.sum()), 20):
            others[is_share] = -shares
            assert judge(found, moved)[is_share].sum() <= judge(others, moved)[is_share].sum() + 1e-12


def test_the_simplex_for_values_of_any_size():
    assert project_on_simplex(np.array([0.5, 0.9, -3.0]), 1.0) == pytest.approx([0.3, 0.7, 0.0])
    assert project_on_simplex(np.array([1e17, 0.0]), 1.0).tolist() == [1.0, 0.0]
    assert project_on_simplex(np.array([-1e17, -1e17]), 1.0).tolist() == [0.5, 0.5]
    assert np.isnan(project_on_simplex(np.array([np.nan, 0.0]), 1.0)).any()


def test_a_norm_estimated_far_too_low_halves_the_step_size(monkeypatch):
    def estimate(*args):
        found = scale_saddle(*args)
        return replace(found, norm=1e-200 * found.norm)

    monkeypatch.setattr("critical_neurons.solvers.first_order.scale_saddle", estimate)
    program = make_program(make_dense, 1e-1)
    found = solve(program, "first-order", replace(LIMITS, time_limit=10.0))
    assert found.status is Status.FEASIBLE
    assert found.bound <= found.objective


def test_rows_without_coefficients_do_not_matter():
    """Their multipliers were rounding errors times huge scales, and no bound was better than the first."""
    program = make_program(make_sparse, 1e-2)
    found = solve(program, "first-order", replace(LIMITS, gap=1e-3))
    assert found.status is Status.OPTIMAL


def test_a_bound_with_an_activation_at_its_upper_bound():
    """Its reduced cost is negative at the optimum, and optimal multipliers must be taken as they are."""

    def make():
        layers = [nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(8, 4)), (10,)

    program = make_program(make, 3e-3, seed=7)
    found = solve(program, "first-order", replace(LIMITS, gap=1e-2))
    assert found.point[program.blocks["activation"]].max() > 0.99
    assert found.status is Status.OPTIMAL


def test_repairs_move_scores_where_no_gate_is_undecided():
    program = make_program(make_dense, 0.0)
    point = np.zeros(program.column_count)
    repaired = program.saddle.repair(point)
    score = program.blocks["score"]
    assert np.any(repaired[score] > program.lower[score])
    assert np.all((repaired[score] >= program.lower[score]) & (repaired[score] <= 1.0))


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
    at, step = random.random((2, count))
    (rows, logits), (moved_rows, moved_logits) = saddle.apply(at), saddle.apply(at + step)
    multipliers, seeds = random.standard_normal(len(rows)), random.standard_normal(logits.shape)
    change = multipliers @ (moved_rows - rows) + (seeds * (moved_logits - logits)).sum()
    assert saddle.adjoint(multipliers, seeds) @ step == pytest.approx(change, rel=1e-9)


def test_rows_hold_where_the_sources_hold(program):
    """Every feasible point of the program satisfies the rows of the saddle point form, and is its own projection."""
    lower, upper = program.saddle.limits
    columns = program.start[: program.term.columns.start]
    rows, _ = program.saddle.apply(columns)
    slack = 1e-9 * max(1.0, np.abs(rows).max())
    assert np.all((rows >= lower - slack) & (rows <= upper + slack))
    projected = program.saddle.project(columns, np.ones(len(columns)), *imply_bounds(program))
    assert projected == pytest.approx(columns, abs=1e-9)


@pytest.mark.parametrize("radius", [1e-2, 1e-1, 1.0])
def test_projections_are_the_nearest_points(radius):
    """No point of the set lies on the given point's side: (given - projected) · (other - projected) / stride <= 0."""
    program, random = make_program(make_pooled, radius), np.random.default_rng(0)
    lower, upper = imply_bounds(program)
    sums = next(source for source in program.sources if type(source).__name__ == "SumRows")
    activations = program.blocks["activation"]
    for size in (0.1, 1.0, 10.0):
        given = lower + (upper - lower) * (0.5 + size * random.standard_normal(len(lower)))
        strides = random.uniform(0.1, 10.0, len(lower)) ** 2
        projected = program.saddle.project(given, strides, lower, upper)
        assert np.all((projected >= lower) & (projected <= upper))
        assert sums.violations(np.append(projected, np.zeros(COUNT))).max() <= 1e-9
        for _ in range(50):
            other = random.uniform(lower, upper)
            other[activations] = random.integers(0, 2, activations.stop - activations.start)
            other = program.saddle.project(other, np.where(np.arange(len(lower)) < 15, 1e-9, 1.0), lower, upper)
            assert (given - projected) @ ((other - projected) / strides) <= 1e-7 * size**2


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


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_losses_of_huge_coefficients(classes):
    """Almost nothing holds the logits: the matrix of a step would be singular but for rounding."""
    random = np.random.default_rng(0)
    for strength in 10.0 ** random.uniform(-40, -10, 20):
        loss = SoftmaxLoss(random.integers(classes, size=10))
        near = random.standard_normal((10, classes))
        found = minimise_near(loss, np.ones(10), near, np.full(near.shape, strength), near)
        assert np.abs(loss.gradients(found)).max() <= 1e-8


@pytest.mark.parametrize("seconds", first_or_slow(0.0, 0.2, 1.0, first=2))
def test_a_time_limit_leaves_the_best_so_far(seconds):
    program = make_program(make_pooled, 1e-1)
    found = solve(program, "first-order", replace(LIMITS, gap=0.0, time_limit=seconds))
    assert found.status is Status.FEASIBLE
    assert found.seconds < seconds + 1.0
    assert found.bound <= found.objective <= program.value(program.start)


@pytest.mark.parametrize("where", ["report", "advance", "bound"])
def test_an_interrupt_leaves_the_best_so_far(monkeypatch, where):
    def interrupt(*args, **settings):
        raise KeyboardInterrupt

    program = make_program(make_pooled, 1e-1)
    if where == "advance":
        monkeypatch.setattr(StepTaker, "advance", interrupt)
    if where == "bound":
        monkeypatch.setattr(type(program.saddle), "bound", interrupt)
    found = solve(program, "first-order", report=interrupt if where == "report" else ignore_progress)
    assert found.interrupted
    assert found.status is Status.FEASIBLE
    assert found.objective <= program.value(program.start)


def test_a_real_interrupt():
    program = make_program(make_pooled, 1e-1)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        found = solve(program, "first-order", replace(LIMITS, gap=0.0))
    finally:
        timer.join()
    assert found.interrupted
    assert found.status is Status.FEASIBLE
    assert found.seconds < LIMITS.time_limit


def test_progress_never_gets_worse():
    steps = []
    found = solve(make_program(make_pooled, 1e-1), "first-order", replace(LIMITS, gap=1e-2), steps.append)
    assert len(steps) == len(found.history) > 2
    for before, after in pairwise(steps):
        assert after.seconds >= before.seconds
        assert after.objective <= before.objective
        assert after.bound >= before.bound
        assert after.time_limit == LIMITS.time_limit


@pytest.mark.parametrize("make", first_or_slow(make_pooled, make_dense))
def test_the_same_program_gives_the_same_bits(make):
    one, other = (solve(make_program(make, 1e-1), "first-order", replace(LIMITS, gap=1e-2)) for _ in range(2))
    assert one.point.tobytes() == other.point.tobytes()
    assert (one.objective, one.bound, one.sizes) == (other.objective, other.bound, other.sizes)


@pytest.mark.parametrize("bad", first_or_slow(np.nan, np.inf, 1e300))
def test_numbers_that_overflow_halve_the_step_size(monkeypatch, bad):
    def advance(taker, at):
        reached = genuine(taker, at)
        steps.append(taker.step_size)
        return (
            replace(reached, multipliers=reached.multipliers * bad)
            if len(steps) % 7 == 0 and len(steps) < 30
            else reached
        )

    genuine, steps = StepTaker.advance, []
    monkeypatch.setattr(StepTaker, "advance", advance)
    program = make_program(make_dense, 1e-1)
    found = solve(program, "first-order", replace(LIMITS, gap=1e-2))
    assert found.status is Status.OPTIMAL
    assert min(steps) < max(steps)
    assert np.isfinite(found.point).all()


def test_nothing_but_overflow_ends_the_search(monkeypatch):
    def advance(taker, at):
        return replace(at, columns=at.columns * np.nan)

    monkeypatch.setattr(StepTaker, "advance", advance)
    program = make_program(make_dense, 1e-1)
    found = solve(program, "first-order")
    assert found.status is Status.FEASIBLE
    assert found.seconds < LIMITS.time_limit / 2


def make_max_pooled():
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers), (2, 6, 6)


REFUSED = {
    "integer": (lambda: make_program(make_dense, 1e-1, integer=True), r"found \d+ integer columns.*integer=False"),
    "max pool": (lambda: make_program(make_max_pooled, 1e-2), "found a program .*with max pools.*barrier"),
    "linearised": (
        lambda: make_program(make_dense, 0.0, formulation="linearised"),
        "found a program of another formulation",
    ),
    "budget": (lambda: replace(make_program(make_dense, 1e-2), start=None), "found a program whose budget excludes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_programs_it_does_not_take(case):
    build, message = REFUSED[case]
    with pytest.raises(InvalidSettingError, match=f"solver: first-order {message}") as caught:
        solve(build(), "first-order")
    assert "Accepted: relaxed programs of the paper's formulation" in str(caught.value)


@pytest.mark.parametrize("many", [True, False])
def test_auto_chooses_it_for_many_gates_and_for_a_steep_loss(monkeypatch, many):
    program, used = make_program(make_dense, 1e-1), []

    def solve_and_note(self, *args):
        used.append(self.name)
        return FirstOrderSolver._solve(self, *args)

    monkeypatch.setattr(FirstOrderSolver, "_solve", FirstOrderSolver.solve, raising=False)
    monkeypatch.setattr(FirstOrderSolver, "solve", solve_and_note)
    limits = replace(LIMITS, gap=1e-3)
    assert solve(program, "auto", limits).status is Status.OPTIMAL
    assert not used
    monkeypatch.setattr(auto, "MANY_GATES" if many else "SOME_GATES", program.gate_count)
    if not many:
        monkeypatch.setattr(auto, "MOST_LOSS", 0.0)
    assert solve(program, "auto", limits).status is Status.OPTIMAL
    assert used == ["first-order"]

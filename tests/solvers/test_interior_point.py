"""Interior points: the same optima as HiGHS, sound bounds, and a way out where there is no inside."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.program import Rows, stack_rows
from critical_neurons.core.solution import Status
from critical_neurons.errors import InvalidSettingError
from critical_neurons.formulations import encode
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective, budget_network
from critical_neurons.readers import read_network
from critical_neurons.solvers import Limits, find_solver, ignore_progress, interior_point, newton_steps
from critical_neurons.solvers.auto import LEAST_SHARED, MANY
from critical_neurons.solvers.highs import HighsSolver
from critical_neurons.solvers.interior_point import MOST_STEPS, find_obstacle
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE, SearchRecord
from tests.settings import settle

GAP = 1e-6
SAME = 2 * GAP
"""Relative difference of two optima, both solved to the gap."""

SOUND = 1e-9
"""By how much rounding may push a bound above the optimum."""

LIMITS = Limits(gap=GAP, time_limit=60.0, threads=1)


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    inputs = torch.rand(3 * MANY, 12)
    return model, inputs, model(inputs).argmax(1)


@cache
def encode_case(case, *, count=MANY, objective="balanced", radius=0.0, budget=None, **settings):
    model, inputs, labels = case
    network = read_network(model, inputs[:count])
    pruned = settings.get("formulation") == "exact"
    bounds = bound_network(network, inputs[:count].double().numpy(), radius=radius, pruned=pruned)
    goal = Objective(objective) if budget is None else budget_network(network, cn.Budget(units=budget))
    return encode(network, bounds, labels[:count].numpy(), goal, **{"integer": False, **settings})


def solve(program, solver, limits=LIMITS, report=ignore_progress):
    return find_solver(solver).solve(program, limits, report)


@pytest.mark.parametrize(
    "settings",
    [
        {"count": 10},
        {"count": 3 * MANY},
        {"objective": "paper"},
        {"radius": 1e-2, "count": 20},
        {"formulation": "linearised", "budget": 0.5},
        {"formulation": "exact", "count": 5},
    ],
    ids=str,
)
def test_the_optimum_of_highs(case, settings):
    program = encode_case(case, **settings)
    expected, found = solve(program, "highs"), solve(program, "barrier")
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(expected.objective, rel=SAME, abs=SAME)
    assert found.bound <= expected.objective + SOUND
    assert found.gap <= GAP
    assert found.objective == program.value(program.raise_term(found.point))
    for source in program.sources:
        assert source.violations(found.point).max() <= FEASIBILITY_TOLERANCE
    assert np.all((found.point >= program.lower - SOUND) & (found.point <= program.upper + SOUND))
    assert found.objective < program.value(program.unpruned) or program.start is None


@pytest.mark.parametrize(
    "settings", [{}, {"objective": "paper"}, {"formulation": "linearised", "budget": 0.5}], ids=str
)
def test_sorted_rows_give_the_same(case, settings, monkeypatch):
    """Rows are sorted only if there are many columns."""
    program = encode_case(case, count=20, **settings)
    expected = solve(program, "barrier")
    monkeypatch.setattr(newton_steps, "FEW_COLUMNS", 0)
    found = solve(program, "barrier")
    assert found.sizes == expected.sizes
    assert found.objective == pytest.approx(expected.objective, rel=SAME, abs=SAME)
    assert found.bound == pytest.approx(expected.bound, rel=SAME, abs=SAME)


def test_every_bound_on_the_way_is_sound(case):
    program = encode_case(case)
    optimum = solve(program, "highs").objective
    history = solve(program, "barrier").history
    bounds = [step.bound for step in history]
    assert bounds == sorted(bounds)
    assert bounds[0] < optimum - 1e-3 < bounds[-1] <= optimum + SOUND


def test_what_was_learnt_bounds_as_well(case):
    """As a linear program, by HiGHS."""
    program = encode_case(case)
    found = solve(program, "barrier")
    linear = replace(program, rows=stack_rows([program.rows, found.learnt], program.column_count), sources=())
    free = replace(linear, cost=linear.cost * (np.arange(linear.column_count) < linear.term.columns.start))
    assert len(found.learnt) > MANY
    values = found.learnt.matrix @ found.point
    assert np.all(values >= found.learnt.lower - FEASIBILITY_TOLERANCE)
    assert solve(free, "highs").status is Status.OPTIMAL


def test_ties_go_to_the_smallest_scores(case):
    """As printed, the largest layer's scores do not count; only what the rows ask for is left of them."""
    program = encode_case(case, objective="paper", count=10)
    scores = program.blocks["score"]
    limits = replace(LIMITS, gap=1e-4)
    found, expected = (solve(program, solver, limits).point[scores] for solver in ("barrier", "highs"))
    assert found.sum() == pytest.approx(expected.sum(), abs=0.05)
    untied = solve(replace(program, tie_break=None), "barrier", limits).point[scores]
    assert untied.sum() > found.sum() + 0.5


class TestObstacles:
    def test_none(self, case):
        assert find_obstacle(encode_case(case)) is None

    def test_integer_columns(self, case):
        program = encode_case(case, radius=1e-2, integer=True)
        assert find_obstacle(program) == "integer columns"
        with pytest.raises(
            InvalidSettingError, match=r"barrier takes no program with integer columns. Use solver='highs'"
        ):
            solve(program, "barrier")

    def test_equations(self, case):
        program = encode_case(case)
        rows = Rows(program.rows.matrix[:1], np.zeros(1), np.zeros(1))
        assert (
            find_obstacle(replace(program, rows=stack_rows([program.rows, rows], program.column_count)))
            == "equations"
        )

    def test_a_column_that_nothing_bounds(self, case):
        program = encode_case(case)
        upper = program.upper.copy()
        upper[0] = np.inf
        assert find_obstacle(replace(program, upper=upper)) == "columns that nothing bounds"

    def test_options(self, case):
        with pytest.raises(InvalidSettingError, match=r"barrier has none. Found: presolve"):
            find_solver("barrier").check_options({"presolve": "off"})


def test_no_time_leaves_the_start(case):
    program = encode_case(case)
    found = solve(program, "barrier", replace(LIMITS, time_limit=0.0))
    assert found.status is Status.FEASIBLE
    assert np.array_equal(found.point, program.start)
    assert found.bound <= solve(program, "highs").objective


@pytest.mark.parametrize("solver", ["barrier", "auto"])
def test_an_interruption_leaves_the_best_so_far(case, solver):
    program = encode_case(case)
    steps = []

    def interrupt(step):
        steps.append(step)
        if len(steps) == 5:
            raise KeyboardInterrupt

    found = solve(program, solver, report=interrupt)
    assert found.interrupted
    assert len(found.history) == 5
    assert found.point is not None
    assert found.bound == steps[-1].bound


class TestMovingToBounds:
    """Steps end a little inside the bounds. Ranks must not depend on how far."""

    @pytest.mark.parametrize("budget", [None, 0.5])
    def test_scores_next_to_a_bound_are_moved_onto_it(self, case, budget, monkeypatch):
        program = encode_case(case, formulation="linearised", budget=budget)
        moved = solve(program, "barrier")
        monkeypatch.setattr(interior_point, "AT_A_BOUND", ())
        inside = solve(program, "barrier")
        assert _count_next_to_a_bound(program, inside) > 0 == _count_next_to_a_bound(program, moved)
        assert moved.status is Status.OPTIMAL
        assert moved.objective == pytest.approx(inside.objective, rel=SAME, abs=SAME)
        assert np.all(program.rows.matrix @ moved.point <= program.rows.upper + FEASIBILITY_TOLERANCE)

    def test_a_score_that_matters_stays(self, case, monkeypatch):
        program = encode_case(case, radius=1e-2)
        monkeypatch.setattr(interior_point, "AT_A_BOUND", ())
        inside = solve(program, "barrier")
        monkeypatch.setattr(interior_point, "AT_A_BOUND", (1.0,))
        moved = solve(program, "barrier")
        assert np.array_equal(moved.point, inside.point)


def _count_next_to_a_bound(program, found):
    scores = found.point[program.blocks["score"]]
    return np.sum(((scores > 0) & (scores < 1e-5)) | ((scores < 1) & (scores > 1 - 1e-5)))


class TestAuto:
    def test_many_points_go_to_the_barrier(self, case):
        few, many = (solve(encode_case(case, count=count), "auto") for count in (MANY - 1, MANY))
        assert "steps" not in few.sizes
        assert 0 < many.sizes["steps"] < MOST_STEPS

    @pytest.mark.parametrize(
        "settings", [{}, {"formulation": "linearised", "budget": cn.Budget(units=0.5)}], ids=["paper", "linearised"]
    )
    def test_wide_networks_go_to_the_barrier(self, settings):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, LEAST_SHARED), nn.ReLU(), nn.Linear(LEAST_SHARED, 3)).double()
        inputs = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        wide = cn.score(model, inputs, **settle(threads=1, gap=GAP, **settings))
        assert "steps" in wide.sizes
        assert wide.status is Status.OPTIMAL
        same = cn.score(model, inputs, **settle(threads=1, gap=GAP, solver="highs", **settings))
        assert wide.objective == pytest.approx(same.objective, rel=SAME, abs=SAME)

    def test_gates_that_must_be_whole_go_to_highs(self, case):
        found = solve(encode_case(case, radius=1e-2, integer=True), "auto", replace(LIMITS, gap=1e-3))
        assert "steps" not in found.sizes

    def test_a_program_without_points_is_proved_infeasible(self, case):
        """The barrier goes in circles there and hands over."""
        program = encode_case(case, budget=0.1)
        assert solve(program, "barrier").status is not Status.OPTIMAL
        assert solve(program, "auto").status is Status.INFEASIBLE

    def test_interior_points_take_over_what_highs_leaves_open(self, case, monkeypatch):
        program = encode_case(case, count=10)
        known = solve(program, "highs")
        open_end = replace(known, status=Status.FEASIBLE, bound=known.objective - 1.0)
        monkeypatch.setattr(HighsSolver, "solve", lambda *arguments: open_end)
        found = solve(program, "auto")
        assert found.status is Status.OPTIMAL
        assert found.objective == pytest.approx(known.objective, rel=SAME, abs=SAME)

    def test_scores(self, case):
        model, inputs, labels = case
        scores = [cn.score(model, inputs, labels, solver=cn.Solver(solver, gap=GAP)) for solver in ("auto", "highs")]
        assert scores[0].objective == pytest.approx(scores[1].objective, rel=SAME, abs=SAME)
        assert scores[0].status is Status.OPTIMAL
        assert scores[0].gap <= GAP


def test_blocks_of_data_points(case, monkeypatch):
    """Searched block by block, with the network restricted to each: the same violated rows, logits and optimum."""
    whole, expected = encode_case(case, count=3 * MANY), solve(encode_case(case, count=3 * MANY), "barrier")
    monkeypatch.setattr("critical_neurons.formulations.affine.BLOCK_ELEMENTS", 1)
    program = encode_case.__wrapped__(case, count=3 * MANY)
    (source,) = program.sources
    assert source.block_count > 5
    point = np.maximum(np.full(program.column_count, 0.4), program.lower)
    violations = whole.sources[0].violations(point)
    found = [source.find_violated(point, block, FEASIBILITY_TOLERANCE) for block in range(source.block_count)]
    numbers = np.sort(np.concatenate([each for each, _ in found]))
    assert np.array_equal(numbers, np.flatnonzero(violations > FEASIBILITY_TOLERANCE))
    assert np.allclose(
        np.concatenate([by for _, by in found]), np.concatenate([violations[each] for each, _ in found])
    )
    assert np.allclose(program.term.logits(point), whole.term.logits(point))
    outside = expected.point.copy()
    outside[0] = program.upper[0] + 2 * FEASIBILITY_TOLERANCE
    for each in (point, program.raise_term(program.start), expected.point, program.lower, outside):
        judged = [SearchRecord(every, LIMITS, ignore_progress).is_feasible(each) for every in (whole, program)]
        worst = max((each - program.upper).max(), *(source.violations(each).max() for source in whole.sources))
        assert judged == 2 * [worst <= FEASIBILITY_TOLERANCE]
    assert solve(program, "barrier").objective == pytest.approx(expected.objective, rel=SAME, abs=SAME)

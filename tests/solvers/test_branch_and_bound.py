"""Branch and bound on the scores of the exact program, by linear programs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.solvers import branch_and_bound as branching
from tests.zoo import first_or_slow, share_case

SAME = 1e-5
QUICK = {"threads": 1, "gap": 1e-6}


def encode_exact(name, goal=None, **settings):
    case = share_case(name)
    bounds = cn.bound_network(case.network, case.inputs, pruned=True)
    program = cn.encode(case.network, bounds, case.labels, goal, formulation="exact", binary=True, **settings)
    return use_linear_programs(program)


def use_linear_programs(program):
    if program.branching is None:
        return program
    return replace(program, branching=replace(program.branching, nodes=None))


@cache
def encode_random(width, seed=0):
    """A network of two hidden layers and as many data points, larger than what the root decides."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 3)
    ).double()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.normal_(0.0, 3.0 / layer.in_features**0.5)
    inputs = torch.randn(width, 8, dtype=torch.float64)
    network = cn.read_network(model, inputs)
    labels = model(inputs).argmax(dim=1).numpy()
    bounds = cn.bound_network(network, inputs.numpy(), pruned=True)
    return use_linear_programs(cn.encode(network, bounds, labels, formulation="exact", binary=True))


@cache
def solve_random():
    return cn.solve(encode_random(8), cn.Solver(**QUICK))


@pytest.mark.parametrize("name", ["mlp", "mlp of three hidden layers", "groups", "max pool before the relu"])
def test_the_tree_and_the_solver_find_the_same(name):
    """The solver's own branch and bound goes over gates too."""
    program = encode_exact(name)
    tree = cn.solve(program, cn.Solver(**QUICK))
    gates = cn.solve(replace(program, branching=None, improve=None), cn.Solver(**QUICK))
    assert tree.status is gates.status is cn.Status.OPTIMAL
    assert tree.objective == pytest.approx(gates.objective, abs=SAME)
    assert tree.bound <= gates.objective + SAME


@pytest.mark.parametrize("search", first_or_slow("forgetful", "whole", "no hulls", "no incumbents"))
def test_parts_of_the_search_change_no_optimum(search, monkeypatch):
    program = encode_random(8)
    expected = solve_random().objective
    if search == "no hulls":
        program = replace(program, branching=replace(program.branching, hulls=None))
    elif search == "no incumbents":
        program = replace(program, improve=None)
    elif search == "forgetful":
        monkeypatch.setattr(branching, "MOST_LEARNT", 20)
    solution = cn.solve(program, cn.Solver(**QUICK))
    assert solution.status is cn.Status.OPTIMAL
    assert solution.objective == pytest.approx(expected, abs=SAME)
    bounds = [step.bound for step in solution.history if step.bound is not None]
    assert bounds == sorted(bounds)


def test_the_network_is_larger_than_the_root_decides():
    """Otherwise the tests above would say nothing of branching."""
    program = encode_random(8)
    relaxed = cn.solve(
        replace(program, integer=np.zeros_like(program.integer), branching=None, improve=None), cn.Solver(**QUICK)
    )
    assert relaxed.objective < solve_random().objective - 1e-2


def test_budgets():
    case = share_case("mlp")
    goal = cn.budget_network(case.network, cn.Budget(units=0.5))
    program = encode_exact("mlp", goal)
    solution = cn.solve(program, cn.Solver(**QUICK))
    gates = cn.solve(replace(program, branching=None, improve=None), cn.Solver(**QUICK))
    assert np.all(goal.weights @ solution.point[program.blocks["score"]] <= goal.limits + SAME)
    assert solution.objective == pytest.approx(gates.objective, abs=SAME)


def give(program, mask):
    point = np.zeros(program.column_count)
    point[program.blocks["score"]] = mask
    return replace(program, given=program.raise_term(program.complete(point)))


def test_masks_are_tried_from_the_point_given_and_from_the_unpruned_network():
    program = encode_random(8)
    score = program.blocks["score"]
    mask = np.tile([1.0, 0.0], score.stop // 2)
    tried = []

    def watch(point, *, seconds, seed):
        tried.append((point[score].round(), seed))
        return program.improve(point, seconds=seconds, seed=seed)

    solution = cn.solve(replace(give(program, mask), improve=watch), cn.Solver(**QUICK))
    starts, seeds = zip(*tried, strict=True)
    assert np.array_equal(starts[0], mask)
    assert np.array_equal(starts[1], np.ones(len(mask)))
    assert len(set(seeds)) == len(seeds)
    rivals = [program.raise_term(program.improve(program.unpruned, seconds=60.0, seed=1))]
    rivals.append(program.raise_term(program.improve(give(program, mask).given, seconds=60.0, seed=0)))
    assert solution.history[1].objective == pytest.approx(min(map(program.value, rivals)), abs=SAME)
    assert solution.objective == pytest.approx(solve_random().objective, abs=SAME)


@pytest.mark.parametrize("branching", [True, False], ids=["tree", "gates"])
def test_the_point_given_is_there_without_time(branching):
    program = encode_random(8)
    best = solve_random()
    given = give(program, best.point[program.blocks["score"]])
    solution = cn.solve(given if branching else replace(given, branching=None), cn.Solver(time_limit=1e-9))
    assert solution.status is cn.Status.FEASIBLE
    assert solution.objective == pytest.approx(best.objective, abs=SAME)
    assert solution.objective < program.value(program.start)


def test_a_leaf_that_is_not_accepted_keeps_the_bound_honest():
    """A completion that never gives a feasible point: nothing may be called solved."""
    program = encode_random(4)
    open_without_gates = np.zeros(program.column_count)
    open_without_gates[program.blocks["activation"]] = 1.0
    broken = replace(program, complete=lambda point: open_without_gates, improve=None)
    optimum = cn.solve(program, cn.Solver(**QUICK)).objective
    solution = cn.solve(broken, cn.Solver(**QUICK))
    assert solution.bound <= optimum + SAME
    assert solution.objective > optimum + SAME
    assert solution.status is not cn.Status.OPTIMAL


def test_the_time_limit_is_kept_and_the_best_so_far_given():
    program = encode_random(24)
    solution = cn.solve(program, cn.Solver(time_limit=2.0, threads=1, gap=1e-9))
    assert solution.seconds < 6.0
    assert solution.status is cn.Status.FEASIBLE
    assert solution.objective < program.value(program.start)
    assert solution.bound < solution.objective


def test_ctrl_c_leaves_the_best_so_far(monkeypatch):
    def interrupt(loop):
        raise KeyboardInterrupt

    monkeypatch.setattr(branching.BranchLoop, "_branch", interrupt)
    solution = cn.solve(encode_random(12), cn.Solver(time_limit=60.0, threads=1, gap=1e-9))
    assert solution.interrupted
    assert solution.objective is not None
    assert solution.bound < solution.objective


def test_the_same_seed_gives_the_same_scores():
    program = encode_random(8)
    first, again = solve_random(), cn.solve(program, cn.Solver(**QUICK))
    assert np.array_equal(first.point, again.point)
    assert first.bound == again.bound


def test_relaxed_gates_are_left_to_the_solver():
    assert encode_exact("mlp", integer=False).branching is None

"""Branch and bound on the scores with Lagrangian bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import critical_neurons as cn
from critical_neurons.solvers import dual_tree
from critical_neurons.solvers.base import Limits
from critical_neurons.solvers.highs import HighsEngine
from tests.formulations.test_score_dual import WIDTHS, encode_two_layers, evaluate_masks
from tests.zoo import first_or_slow

SAME = 1e-6
QUICK = {"threads": 1, "gap": 1e-6}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """So that the root alone does not decide."""
    monkeypatch.setattr(dual_tree, "MOST_ROOT_STEPS", 20)
    monkeypatch.setattr(dual_tree, "EARLY_STEPS", 1)
    monkeypatch.setattr(dual_tree, "STEPS", 10)


@pytest.mark.parametrize("seed", first_or_slow(2, 0, 1))
@pytest.mark.parametrize("budget", [None, cn.Budget(units=0.5)], ids=["sparsity", "budget"])
def test_the_optimum_is_that_of_enumeration_and_bounds_hold_at_all_times(budget, seed):
    program = encode_two_layers(budget, seed)
    optimum = evaluate_masks(program).min()
    solution = cn.solve(replace(program, improve=None), cn.Solver(**QUICK))
    assert solution.status is cn.Status.OPTIMAL
    assert solution.objective == pytest.approx(optimum, abs=SAME)
    bounds = [step.bound for step in solution.history if step.bound is not None]
    assert bounds == sorted(bounds)
    assert max(bounds) <= optimum + SAME
    assert solution.bound <= optimum + SAME


def test_too_many_open_nodes_change_no_optimum(monkeypatch):
    program = replace(encode_two_layers(seed=2), improve=None)
    monkeypatch.setattr(dual_tree, "TOGETHER", 2)
    monkeypatch.setattr(dual_tree, "MOST_OPEN", 1)
    counts, take = [], dual_tree.DualLoop._take
    monkeypatch.setattr(dual_tree.DualLoop, "_take", lambda loop: counts.append(len(loop._open)) or take(loop))
    assert cn.solve(program, cn.Solver(**QUICK)).objective == pytest.approx(evaluate_masks(program).min(), abs=SAME)
    assert max(counts) > 1


def test_a_completion_that_is_not_accepted_keeps_the_bound_honest():
    program = encode_two_layers()
    wrong = np.zeros(program.column_count)
    wrong[program.blocks["activation"]] = 1.0
    solution = cn.solve(replace(program, complete=lambda point: wrong, improve=None), cn.Solver(**QUICK))
    optimum = evaluate_masks(program).min()
    assert solution.bound <= optimum + SAME
    assert solution.status is not cn.Status.OPTIMAL or solution.objective == pytest.approx(optimum, abs=SAME)


def test_without_time_the_unpruned_network_is_left():
    program = encode_two_layers()
    solution = cn.solve(program, cn.Solver(time_limit=1e-9))
    assert solution.status is cn.Status.FEASIBLE
    assert solution.objective == program.value(program.start)


@pytest.mark.parametrize("budget", [cn.Budget(units=0.5), None], ids=["excluded", "not accepted"])
def test_fixed_scores_that_the_budget_excludes_lower_no_bound(budget):
    program = encode_two_layers(budget)
    broken = replace(program, complete=lambda point: np.ones(program.column_count))
    loop = dual_tree.DualLoop(HighsEngine, broken, Limits(), lambda step: None)
    loop._end(np.ones(sum(WIDTHS)), -1.0)
    assert loop._closed_at == (-1.0 if budget is None else np.inf)


def test_without_an_incumbent_no_node_is_lost():
    """As long as no mask is accepted nothing may be pruned."""
    program = encode_two_layers(cn.Budget(units=0.5))
    refusing = replace(program, complete=lambda point: np.full(program.column_count, 2.0))
    loop = dual_tree.DualLoop(HighsEngine, refusing, Limits(), lambda step: None)
    assert loop._cutoff() == np.inf
    loop._open_root(np.zeros(sum(WIDTHS)), np.ones(sum(WIDTHS)))
    assert len(loop._open) == 1

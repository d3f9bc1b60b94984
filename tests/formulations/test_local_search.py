"""Masks found by trial: their objective is that of the program, and the search does not depend on the clock."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.formulations import local_search as masks_file
from critical_neurons.formulations.local_search import MaskSearch
from critical_neurons.formulations.objective import Objective
from tests.zoo import ZOO, share_case

SAME = 1e-6
LONG = 60.0


def make_search(name, goal=None):
    case = share_case(name)
    return MaskSearch(case.network, case.inputs, case.labels, goal or Objective()), case


def all_masks(case):
    return np.array(list(product([0.0, 1.0], repeat=case.network.unit_count)))


def encode_exact(case, goal=None):
    bounds = cn.bound_network(case.network, case.inputs, pruned=True)
    return cn.encode(case.network, bounds, case.labels, goal, formulation="exact", binary=True)


@pytest.mark.parametrize("objective", ["balanced", "authors", "paper"])
@pytest.mark.parametrize("name", ZOO)
def test_values_are_those_of_the_program(name, objective):
    goal = Objective(objective, loss_weight=2.0)
    search, case = make_search(name, goal)
    program = encode_exact(case, goal)
    masks = np.random.default_rng(0).integers(0, 2, (6, case.network.unit_count)).astype(float)
    for mask, value in zip(masks, search.evaluate(masks), strict=True):
        point = np.zeros(program.column_count)
        point[program.blocks["score"]] = mask
        assert value == pytest.approx(program.value(program.raise_term(program.complete(point))), abs=SAME)


@pytest.mark.parametrize("few", [True, False], ids=["all masks", "descent"])
def test_the_best_mask_is_found(few, monkeypatch):
    search, case = make_search("mlp without biases")
    masks = all_masks(case)
    best = search.evaluate(masks).min()
    if not few:
        monkeypatch.setattr(masks_file, "MOST_MOVES", 60)
    found = search.improve(np.ones(case.network.unit_count), LONG, 0)
    assert search.evaluate(found[None])[0] == pytest.approx(best, abs=SAME)


def test_a_budget_is_kept_from_any_start():
    case = share_case("mlp")
    goal = cn.budget_network(case.network, cn.Budget(units=0.5))
    search = MaskSearch(case.network, case.inputs, case.labels, goal)
    found = search.improve(np.ones(case.network.unit_count), LONG, 0)
    masks = all_masks(case)
    allowed = masks[np.all(masks @ goal.weights.T <= goal.limits, axis=1)]
    assert np.all(goal.weights @ found <= goal.limits)
    assert search.evaluate(found[None])[0] == pytest.approx(search.evaluate(allowed).min(), abs=SAME)


def test_the_search_is_repeatable_and_never_worse(monkeypatch):
    monkeypatch.setattr(masks_file, "MOST_MOVES", 30)
    search, case = make_search("resnet")
    start = np.ones(case.network.unit_count)
    first, again = (search.improve(start, LONG, 7) for _ in range(2))
    assert np.array_equal(first, again)
    assert search.evaluate(first[None])[0] <= search.evaluate(start[None])[0]


def test_no_time_leaves_the_start(monkeypatch):
    monkeypatch.setattr(masks_file, "MOST_MOVES", 30)
    search, case = make_search("resnet")
    start = np.ones(case.network.unit_count)
    assert np.array_equal(search.improve(start, 0.0, 0), start)


def test_scores_between_0_and_1_profit_too():
    """A mask is a point of the exact program, whether or not its scores have to be whole."""
    torch.manual_seed(0)
    case = share_case("mlp")
    bounds = cn.bound_network(case.network, case.inputs, pruned=True)
    program = cn.encode(case.network, bounds, case.labels, formulation="exact")
    better = program.raise_term(program.improve(program.start, seconds=LONG, seed=0))
    assert program.branching is None
    assert program.value(better) < program.value(program.start)
    for source in program.sources:
        assert source.violations(better).max() <= SAME

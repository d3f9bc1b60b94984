"""Lagrangian bounds of the exact program: valid for any multipliers, and exact where everything is fixed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.formulations.score_dual import FIXED
from critical_neurons.formulations.score_dual_data import Multipliers, Nodes
from critical_neurons.formulations.score_dual_probe import probe
from critical_neurons.formulations.score_dual_steps import SAME_CASES
from critical_neurons.formulations.unit_counts import Box, UnitCounts
from tests.zoo import share_case

WIDTHS = (5, 4)
MASKS = np.array(list(product([0.0, 1.0], repeat=sum(WIDTHS))))
ROUNDING = 1e-9


def encode_two_layers(budget=None, seed=0):
    torch.manual_seed(seed)
    first, second = WIDTHS
    model = nn.Sequential(nn.Linear(6, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 3))
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.normal_(0.0, 3.0 / layer.in_features**0.5)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    network = cn.read_network(model.double(), inputs)
    bounds = cn.bound_network(network, inputs.numpy(), pruned=True)
    goal = budget and cn.budget_network(network, budget)
    return cn.encode(network, bounds, model(inputs).argmax(dim=1).numpy(), goal, formulation="exact", binary=True)


def evaluate_masks(program):
    """The objective of every mask by the program's own completion; infinite over the budget."""
    values = []
    for mask in MASKS:
        point = np.zeros(program.column_count)
        point[program.blocks["score"]] = mask
        point = program.raise_term(program.complete(point))
        rows = program.rows.matrix @ point
        feasible = np.all(rows >= program.rows.lower - 1e-6) and np.all(rows <= program.rows.upper + 1e-6)
        values.append(program.value(point) if feasible else np.inf)
    return np.array(values)


def draw_node(generator):
    fixed = generator.random(sum(WIDTHS)) < generator.random()
    mask = MASKS[generator.integers(len(MASKS))]
    return np.where(fixed, mask, 0.0)[None], np.where(fixed, mask, 1.0)[None]


def draw_multipliers(dual, generator):
    start = dual.start()
    return Multipliers(
        start.outputs + generator.normal(size=start.outputs.shape),
        generator.random(start.slopes.shape),
        0.3 * generator.normal(size=start.prices.shape),
    )


@pytest.mark.parametrize("budget", [None, cn.Budget(units=0.5)], ids=["sparsity", "budget"])
def test_bounds_hold_for_any_multipliers(budget):
    program = encode_two_layers(budget)
    nodes, values, generator = program.branching.nodes, evaluate_masks(program), np.random.default_rng(0)
    for _ in range(100):
        lower, upper = draw_node(generator)
        multipliers = draw_multipliers(nodes._dual, generator).join()
        inside = np.all((lower <= MASKS) & (upper >= MASKS), axis=1)
        best = values[inside].min()
        found = nodes.raise_bounds(lower, upper, multipliers, cutoff=1e3, steps=2, check=lambda: None)
        assert found.bounds[0] <= best + ROUNDING
        assert np.all(found.masks[0] >= lower[0])
        assert np.all(found.masks[0] <= upper[0])
        assert found.values[0] == pytest.approx(values[np.all(found.masks[0] == MASKS, axis=1)][0])
        # Columns are fixed only where no mask below the cutoff is lost.
        cutoff = float(np.nextafter(best, -np.inf) if np.isfinite(best) else 1e3) - generator.choice([0.0, 0.1, 1.0])
        fixed = nodes.raise_bounds(lower, upper, multipliers, cutoff=cutoff, steps=2, check=lambda: None)
        left = np.all((fixed.lower <= MASKS) & (fixed.upper >= MASKS), axis=1)
        assert np.all(values[inside & ~left] >= cutoff - ROUNDING)


def test_probing_is_evaluating_with_one_more_score_fixed():
    dual, generator = encode_two_layers().branching.nodes._dual, np.random.default_rng(1)
    lower, upper = draw_node(generator)
    lower[:], upper[:, :3] = 0.0, 1.0
    multipliers = draw_multipliers(dual, generator)
    split = lambda ends: tuple(Box(*parts) for parts in zip(*(np.split(end, [WIDTHS[0]], 1) for end in ends)))  # noqa: E731, B905
    boxes = split((lower, upper))
    elements = dual.bound_elements(boxes[0])
    nodes = Nodes(dual.counts, boxes, elements)
    dual.restrict(multipliers, nodes)
    found = dual.evaluate(multipliers, nodes)
    probes = probe(dual, found, multipliers.prices, nodes, cutoff=-np.inf)
    for column in np.flatnonzero(lower[0] < upper[0]):
        for value in (0, 1):
            ends = lower.copy(), upper.copy()
            ends[0][0, column] = ends[1][0, column] = value
            there = split(ends)
            offsets = dual.bound_elements(there[0]).offsets
            fixed = Nodes(dual.counts, there, replace(elements, offsets=offsets))
            prices = multipliers.prices.copy()
            prices[:, fixed.free[:, 0] == 0] = FIXED
            again = dual.evaluate(replace(multipliers, prices=prices), fixed, found.cases)
            assert probes[value][0, column] == pytest.approx(again.bound[0], abs=ROUNDING)


def test_masks_have_the_value_of_their_forward_pass():
    program = encode_two_layers()
    dual = program.branching.nodes._dual
    assert dual.find_values(*np.split(MASKS, [WIDTHS[0]], axis=1)) == pytest.approx(evaluate_masks(program))


def test_steps_raise_the_bound_and_end_at_the_cutoff():
    nodes = encode_two_layers().branching.nodes
    ends = np.zeros((1, sum(WIDTHS))), np.ones((1, sum(WIDTHS)))
    calls = []
    bounds = [
        nodes.raise_bounds(
            *ends, nodes.start()[None], cutoff=cutoff, steps=steps, check=lambda: calls.append(1)
        ).bounds
        for cutoff, steps in ((10.0, 1), (10.0, 200), (-100.0, 200))
    ]
    assert bounds[1] > bounds[0]
    assert len(calls) == 1 + 200 + SAME_CASES


def test_nodes_together_get_the_bounds_of_each_alone():
    """Some of them reach the cutoff early and are dropped on the way."""
    nodes, generator = encode_two_layers().branching.nodes, np.random.default_rng(3)
    lower, upper = (np.concatenate(ends) for ends in zip(*(draw_node(generator) for _ in range(12)), strict=True))
    starts = np.repeat(nodes.start()[None], len(lower), 0)
    settings = {"steps": 30, "check": lambda: None}
    free = nodes.raise_bounds(lower, upper, starts, cutoff=1e3, **settings).bounds
    cutoff = float(np.median(free))
    together = nodes.raise_bounds(lower, upper, starts, cutoff=cutoff, **settings).bounds
    alone = [
        nodes.raise_bounds(lower[[at]], upper[[at]], starts[[at]], cutoff=cutoff, **settings).bounds[0]
        for at in range(len(lower))
    ]
    assert (together >= cutoff).any()
    assert not (together >= cutoff).all()
    going = np.minimum(alone, cutoff)
    assert np.minimum(together, cutoff) == pytest.approx(going, abs=1e-3 * max(1.0, np.abs(going).max()))


def test_counts_are_minimised_exactly():
    generator = np.random.default_rng(2)
    counts = UnitCounts(np.array([0.0, 0.4, 0.9]), (np.array([1, 2, 4]), np.array([1, 3, 3])))
    first, second = np.split(MASKS, [WIDTHS[0]], axis=1)
    prices = counts.price((first, second))
    for _ in range(30):
        lower, upper = draw_node(generator)
        costs = generator.normal(size=(1, sum(WIDTHS)))
        inside = np.all((lower <= MASKS) & (upper >= MASKS), axis=1)
        expected = (prices + MASKS @ costs[0])[inside].min()
        boxes = tuple(Box(*ends) for ends in zip(np.split(lower, [5], 1), np.split(upper, [5], 1), strict=True))
        value, scores, _ = counts.within(boxes).minimise(
            tuple(np.ascontiguousarray(part) for part in np.split(costs, [5], axis=1))
        )
        if np.isfinite(expected):
            assert value[0] == pytest.approx(expected)
            assert counts.price(scores)[0] + np.concatenate(scores, 1)[0] @ costs[0] == pytest.approx(expected)
        else:
            assert value[0] > 1e3


@pytest.mark.parametrize("name", ["mlp of three hidden layers", "groups", "max pool before the relu"])
def test_other_networks_are_left_to_linear_programs(name):
    case = share_case(name)
    bounds = cn.bound_network(case.network, case.inputs, pruned=True)
    program = cn.encode(case.network, bounds, case.labels, formulation="exact", binary=True)
    assert program.branching.nodes is None

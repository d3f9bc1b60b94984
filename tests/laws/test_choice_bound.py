"""Law: no choice of as many units has an error below the bound, by enumeration of all there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from critical_neurons.selection import lower_bound
from critical_neurons.selection.elimination import measure_error
from critical_neurons.selection.lower_bound import bound_error
from tests.selection.test_elimination import CONSUMERS, draw_consumer, make_reader
from tests.zoo import first_or_slow

ROUNDING = 1e-9
TIGHT = 1e-6
"""Relative distance from the least error, where the relaxation is exact."""


def list_errors(consumers, count, kept, blocks=1):
    errors = []
    for chosen in combinations(range(count), kept):
        stays = torch.zeros(count, dtype=torch.bool)
        stays[list(chosen)] = True
        if len(set(stays.reshape(blocks, -1).sum(1).tolist())) == 1:
            errors.append(measure_error(consumers, stays))
    return errors


@pytest.mark.parametrize("turns", [1, 60])
@pytest.mark.parametrize("name", CONSUMERS)
def test_no_choice_is_better_than_the_bound(monkeypatch, name, turns):
    monkeypatch.setattr(lower_bound, "TURNS", turns)
    consumers = CONSUMERS[name]
    count = int(max(consumer.units.max() for consumer in consumers)) + 1
    for kept in range(count + 1):
        least = min(list_errors(consumers, count, kept))
        bound = bound_error(consumers, count, kept)
        assert 0.0 <= bound <= least * (1 + ROUNDING)
        assert turns == 1 or kept == count or bound > 0


@pytest.mark.parametrize("seed", first_or_slow(*range(3)))
def test_blocks_are_heard(seed):
    consumers = [draw_consumer([*range(8)], seed=seed)]
    bound = bound_error(consumers, 8, 4, blocks=2)
    assert bound_error(consumers, 8, 4) * 0.9 <= bound <= min(list_errors(consumers, 8, 4, blocks=2)) * (1 + ROUNDING)


def test_on_independent_inputs_the_bound_is_the_least_error():
    drawn = draw_consumer([*range(6)])
    apart = make_reader(torch.diag(drawn.squares.diagonal()), drawn.weight, drawn.units)
    assert bound_error([apart], 6, 3) == pytest.approx(min(list_errors([apart], 6, 3)), rel=TIGHT)


def test_without_anything_felt_the_bound_is_nothing():
    consumer = replace(draw_consumer([*range(4)]), weight=torch.zeros(4, 0, dtype=torch.float64))
    assert bound_error([consumer], 4, 2) == 0.0
    assert bound_error([], 4, 2) == 0.0


def test_too_many_columns_have_none(monkeypatch):
    monkeypatch.setattr(lower_bound, "MOST_COLUMNS", 5)
    assert bound_error([draw_consumer([*range(6)])], 6, 3) is None

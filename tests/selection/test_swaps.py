"""Exchanges: always the pair that a fresh least-squares solve would choose, until none helps."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from critical_neurons.selection import swaps
from critical_neurons.selection.elimination import eliminate, measure_error
from critical_neurons.selection.swaps import exchange
from tests.selection.test_elimination import CONSUMERS, SAME_ERROR, draw_consumer, make_reader, solve_anew

NO_BETTER = 10 * swaps.WORTH
"""Relative to the error left: what an exchange may have been too small to save."""


def count_units(consumers):
    return int(max(consumer.units.max() for consumer in consumers)) + 1


def solve_all(consumers, stays):
    gone = (~stays).nonzero().flatten().tolist()
    return sum(solve_anew(consumer, gone) for consumer in consumers)


def swap(stays, pair):
    swapped = stays.clone()
    swapped[list(pair)] ^= True
    return swapped


def list_pairs(stays):
    return product(stays.nonzero().flatten().tolist(), (~stays).nonzero().flatten().tolist())


@pytest.mark.parametrize("name", CONSUMERS)
def test_the_first_exchange_is_the_best_there_is(monkeypatch, name):
    monkeypatch.setattr(swaps, "LEAST_EXCHANGES", 1)
    monkeypatch.setattr(swaps, "EXCHANGES_PER_UNIT", 0.0)
    consumers = CONSUMERS[name]
    stays = torch.arange(count_units(consumers)) < 2
    best = min(
        [solve_all(consumers, stays), *(solve_all(consumers, swap(stays, pair)) for pair in list_pairs(stays))]
    )
    found = exchange(consumers, stays)
    assert solve_all(consumers, found) == pytest.approx(best, rel=SAME_ERROR)


@pytest.mark.parametrize("name", CONSUMERS)
def test_in_the_end_no_exchange_helps(name):
    consumers = CONSUMERS[name]
    stays = torch.arange(count_units(consumers)) < 2
    found = exchange(consumers, stays)
    left = solve_all(consumers, found)
    assert int(found.sum()) == 2
    assert left <= solve_all(consumers, stays) * (1 + SAME_ERROR)
    assert all(solve_all(consumers, swap(found, pair)) >= left * (1 - NO_BETTER) for pair in list_pairs(found))


def test_what_greed_got_wrong_is_mended():
    """The mean of two inputs is the best single one, and useless beside both."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    rows = torch.cat([rows, rows.sum(1, keepdim=True) + 0.5 * torch.randn(200, 1, generator=generator)], 1)
    weight = torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    consumer = make_reader(rows.T @ rows / 200, weight, torch.arange(3))
    stays = torch.tensor([False, True, True])
    assert exchange([consumer], stays).tolist() == [True, True, False]


def test_exchanges_stay_within_blocks_and_leave_the_given_choice_alone():
    consumers = [draw_consumer([*range(8)])]
    stays = torch.tensor([True, False, False, False] * 2)
    found = exchange(consumers, stays, blocks=2)
    assert stays.tolist() == [True, False, False, False] * 2
    assert found.reshape(2, 4).sum(1).tolist() == [1, 1]
    assert solve_all(consumers, found) < solve_all(consumers, stays)


@pytest.mark.parametrize("count", [0, 6])
def test_with_nothing_to_exchange_nothing_is(count):
    stays = torch.arange(6) < count
    assert torch.equal(exchange([draw_consumer([*range(6)])], stays), stays)
    assert torch.equal(exchange([], torch.arange(6) < 3), torch.arange(6) < 3)


@pytest.mark.parametrize("name", CONSUMERS)
def test_the_error_of_a_choice_is_that_of_a_fresh_solve(name):
    consumers = CONSUMERS[name]
    count = count_units(consumers)
    stays = torch.ones(count, dtype=torch.bool)
    stays[eliminate(consumers, count).order[: count // 2]] = False
    assert measure_error(consumers, stays) == pytest.approx(solve_all(consumers, stays), rel=SAME_ERROR)

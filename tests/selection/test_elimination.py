"""Backward elimination: every error is that of a fresh least-squares solve, whatever reads the units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
import torch

from critical_neurons.selection import elimination
from critical_neurons.selection.elimination import Consumer, eliminate
from critical_neurons.selection.inverses import refit, refit_by_inverse

SAME_ERROR = 1e-8
"""Largest relative difference of two errors."""

TWINS_DIFFER = 0.01
"""Noise of inputs that are otherwise the same, beside a spread of 1."""


NONE = -1
"""Instead of a unit's number: a column that cannot be removed."""


@dataclass(frozen=True)
class Reader(Consumer):
    """A consumer beside all that it reads: covariance, weights and unit of every column."""

    squares: torch.Tensor
    all_weights: torch.Tensor
    all_units: torch.Tensor


def make_reader(squares, weights, units):
    free = (units != NONE).nonzero().flatten()
    inverse = torch.linalg.inv(squares)[free[:, None], free]
    return Reader(inverse, weights[free], units[free], squares, weights, units)


def draw_consumer(units, outputs=3, *, seed=0, rank=None):
    generator = torch.Generator().manual_seed(seed)
    columns = len(units)
    rows = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    rows = rows @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns, outputs, generator=generator, dtype=torch.float64)
    slopes = torch.randn(rank or 2 * outputs, outputs, generator=generator, dtype=torch.float64)
    squares = rows.T @ rows / len(rows)
    return make_reader(squares, weight @ slopes.T, torch.tensor(units))


def solve_anew(consumer, gone):
    """The least error without these units, by a solver that knows nothing of elimination."""
    stays = ~torch.isin(consumer.all_units, torch.tensor(gone))
    root = torch.linalg.cholesky(consumer.squares).T  # G = root' root, so the error is a sum of squares
    wanted, given = root @ consumer.all_weights, root[:, stays]
    fitted = np.linalg.lstsq(given.numpy(), wanted.numpy(), rcond=None)[0]
    missing = wanted - given @ torch.from_numpy(fitted)
    return float(missing.square().sum())


CONSUMERS = {
    "a column for every unit": [draw_consumer([*range(7)])],
    "three columns for every unit": [draw_consumer(np.repeat(range(6), 3).tolist())],
    "columns in any order": [draw_consumer([2, 0, 1, 3, 1, 0, 2, 3])],
    "unlike many": [draw_consumer([0, 0, 0, 1, 2, 2, 3])],
    "columns that stay": [draw_consumer([NONE, 0, 1, NONE, 2, 3, 3])],
    "two consumers": [draw_consumer([*range(5)]), draw_consumer(np.repeat(range(5), 2).tolist(), 4, seed=1)],
    "a consumer of some": [draw_consumer([*range(6)]), draw_consumer([1, 4, NONE], seed=1)],
    "few directions felt": [draw_consumer([*range(6)], 4, rank=1)],
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_every_error_is_that_of_a_fresh_solve(name):
    consumers = CONSUMERS[name]
    count = int(max(consumer.units.max() for consumer in consumers)) + 1
    found = eliminate(consumers, count)
    assert sorted(found.order.tolist()) == list(range(count))
    for gone in range(1, count + 1):
        expected = sum(solve_anew(consumer, found.order[:gone].tolist()) for consumer in consumers)
        assert float(found.errors[gone - 1]) == pytest.approx(expected, rel=SAME_ERROR)


@pytest.mark.parametrize("name", CONSUMERS)
def test_the_next_unit_is_the_one_that_adds_least(name):
    consumers = CONSUMERS[name]
    count = int(max(consumer.units.max() for consumer in consumers)) + 1
    order = eliminate(consumers, count).order.tolist()
    for gone in range(count - 1):
        errors = {
            unit: sum(solve_anew(consumer, [*order[:gone], unit]) for consumer in consumers) for unit in order[gone:]
        }
        assert errors[order[gone]] == pytest.approx(min(errors.values()), rel=SAME_ERROR)


@pytest.mark.parametrize("held_back", [1, 4])
@pytest.mark.parametrize("name", CONSUMERS)
def test_what_is_held_back_changes_nothing(monkeypatch, name, held_back):
    consumers = CONSUMERS[name]
    count = int(max(consumer.units.max() for consumer in consumers)) + 1
    together = eliminate(consumers, count)
    monkeypatch.setattr(elimination, "HELD_BACK", held_back)
    found = eliminate(consumers, count)
    assert torch.equal(found.order, together.order)
    assert torch.allclose(found.errors, together.errors, rtol=SAME_ERROR)


@pytest.mark.parametrize("blocks", [1, 2])
def test_of_twins_one_stays(blocks):
    """Alone either of two costs next to nothing; both do not."""
    generator = torch.Generator().manual_seed(0)
    pairs = 60
    single = torch.randn(600, pairs, generator=generator, dtype=torch.float64)
    rows = torch.cat([single, single], 1)
    rows += TWINS_DIFFER * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(pairs, 10, generator=generator, dtype=torch.float64).repeat(2, 1)
    consumer = make_reader(rows.T @ rows / len(rows), weight, torch.arange(2 * pairs))
    order = eliminate([consumer], 2 * pairs, blocks).order
    assert sorted((order[:pairs] % pairs).tolist()) == list(range(pairs))


def test_blocks_lose_as_many_units_each():
    order = eliminate([draw_consumer([*range(9)])], 9, blocks=3).order.reshape(-1, 3)
    assert all(sorted(units // 3 for units in taken) == [0, 1, 2] for taken in order.tolist())


def test_on_independent_inputs_the_choice_is_the_best_there_is():
    consumer = draw_consumer([*range(6)])
    apart = make_reader(torch.diag(consumer.squares.diagonal()), consumer.weight, consumer.units)
    order = eliminate([apart], 6).order.tolist()
    errors = {gone: solve_anew(apart, list(gone)) for gone in combinations(range(6), 3)}
    assert tuple(sorted(order[:3])) == min(errors, key=errors.get)


@pytest.mark.parametrize("gone", [[], [1, 4], [0, 1, 2, 5], [*range(6)]])
def test_refitted_weights_have_the_least_error(gone):
    (consumer,) = CONSUMERS["three columns for every unit"]
    removed = torch.isin(consumer.units, torch.tensor(gone))
    for fitted in (
        refit(consumer.squares, consumer.weight, removed),
        refit_by_inverse(consumer.inverse, consumer.weight, removed),
    ):
        missing = consumer.weight - fitted
        assert (missing[removed] == consumer.weight[removed]).all()
        error = float((missing.T @ consumer.squares @ missing).trace())
        assert error == pytest.approx(solve_anew(consumer, gone), rel=SAME_ERROR, abs=SAME_ERROR)


def test_outputs_nobody_feels_cost_nothing():
    consumer = draw_consumer([*range(4)])
    found = eliminate([replace(consumer, weight=torch.zeros(4, 3, dtype=torch.float64))], 4)
    assert found.order.tolist() == [0, 1, 2, 3]
    assert found.errors.tolist() == [0.0] * 4


def test_inputs_that_hardly_vary_leave_numbers_that_can_be_compared():
    consumer = draw_consumer([*range(4)])
    still = torch.finfo(torch.float32).tiny * torch.eye(4, dtype=torch.float64)
    errors = eliminate([make_reader(still, consumer.weight, consumer.units)], 4).errors
    assert torch.isfinite(errors).all()
    assert (errors.diff() >= 0).all()


@pytest.mark.parametrize("rank", [1, 3, 7, 8, 20])
@pytest.mark.parametrize("indefinite", [False, True])
def test_errors_of_single_removals(rank, indefinite):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 9, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 4, rank, generator=generator, dtype=torch.float64)
    own = rows.mT @ rows
    if indefinite:  # by rounding
        own[2, 0, 0] = -1.0
    expected = torch.stack([torch.trace(w.T @ torch.linalg.inv(h) @ w) for h, w in zip(own, weight, strict=True)])
    assert torch.allclose(elimination._measure_removals(own, weight @ weight.mT), expected, rtol=SAME_ERROR)

"""Shares of a budget: convex losses, the best counts there are, budgets out of reach."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from critical_neurons.core.structure import Group
from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.allocation import make_convex, share_budget
from tests.zoo import first_or_slow


def make_groups(*sizes, blocks=1):
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return [Group((str(place),), units, blocks) for place, units in enumerate(parts)]


def count(kept):
    return float(kept[:-1].sum())


def slope(kept):
    return np.append(np.ones(len(kept) - 1), 0.0)


def test_convex_sequences_lie_below_and_touch():
    values = np.random.default_rng(0).random(30).cumsum() ** 1.5 + np.random.default_rng(1).random(30)
    convex = make_convex(values)
    assert (convex <= values + 1e-12).all()
    assert (np.diff(convex, 2) >= -1e-12).all()
    assert convex[[0, -1]].tolist() == values[[0, -1]].tolist()
    assert np.array_equal(make_convex(convex), convex) or np.allclose(make_convex(convex), convex)


@pytest.mark.parametrize("seed", first_or_slow(*range(4)))
def test_of_convex_losses_the_least_sum_is_found(seed):
    generator = np.random.default_rng(seed)
    groups = make_groups(5, 4, 6)
    losses = [np.sort(generator.random(len(group))).cumsum() for group in groups]
    counts = share_budget(groups, losses, count, slope, 8.0)

    def lose(kept):
        return sum(
            loss[len(group) - left - 1] if left < len(group) else 0.0
            for group, loss, left in zip(groups, losses, kept, strict=True)
        )

    options = product(*(range(1, len(group) + 1) for group in groups))
    assert lose(counts) == pytest.approx(min(lose(each) for each in options if sum(each) <= 8))
    assert sum(counts) == 8


def test_dear_units_go_before_cheap_ones_of_the_same_loss():
    groups = make_groups(4, 4)
    weights = np.array([10.0] * 4 + [1.0] * 4 + [0.0])
    losses = [np.arange(1.0, 5.0), np.arange(1.0, 5.0)]
    counts = share_budget(groups, losses, lambda kept: float(weights @ kept), lambda kept: weights, 24.0)
    assert counts == [2, 4]


def test_what_fits_comes_back():
    """A large unit is the last to go and leaves room for small ones that went before."""
    groups = make_groups(4, 4)
    weights = np.array([10.0] * 4 + [1.0] * 4 + [0.0])
    losses = [100 * np.arange(1.0, 5.0), np.arange(1.0, 5.0)]
    counts = share_budget(groups, losses, lambda kept: float(weights @ kept), lambda kept: weights, 34.5)
    assert counts == [3, 4]


def test_blocks_go_together():
    groups = make_groups(6, blocks=3)
    assert share_budget(groups, [np.arange(6.0)], count, slope, 5.0) == [3]


def test_a_budget_out_of_reach_is_reported():
    with pytest.raises(InvalidSettingError, match="with the fewest units of every layer the cost is 1,"):
        share_budget(make_groups(3), [np.arange(3.0)], count, slope, 0.5)


def test_counts_are_multiples_or_whole():
    """Of a layer of eleven units eleven, eight or four; a layer smaller than a step stays whole."""
    groups = make_groups(11, 8, 3)
    losses = [np.arange(1.0, len(group) + 1) ** 2 for group in groups]
    assert share_budget(groups, losses, count, slope, 22.0, round_to=4) == [11, 8, 3]
    assert share_budget(groups, losses, count, slope, 19.0, round_to=4) == [8, 8, 3]
    assert share_budget(groups, losses, count, slope, 12.0, round_to=4) == [4, 4, 3]
    with pytest.raises(InvalidSettingError, match="with the fewest units of every layer the cost is 11"):
        share_budget(groups, losses, count, slope, 10.0, round_to=4)


def test_steps_are_those_of_blocks_too():
    groups = make_groups(24, blocks=3)
    assert share_budget(groups, [np.arange(24.0)], count, slope, 20.0, round_to=4) == [12]


@pytest.mark.parametrize("seed", first_or_slow(*range(4)))
def test_steps_come_near_the_best_counts(seed):
    generator = np.random.default_rng(seed)
    groups = make_groups(16, 16, 8)
    losses = [np.sort(generator.random(len(group))).cumsum() for group in groups]
    counts = share_budget(groups, losses, count, slope, 28.0, round_to=4)

    def lose(kept):
        envelopes = [np.concatenate([[0.0], loss]) for loss in losses]
        return sum(loss[len(group) - left] for group, loss, left in zip(groups, envelopes, kept, strict=True))

    options = product(*(range(4, len(group) + 1, 4) for group in groups))
    assert lose(counts) == pytest.approx(min(lose(each) for each in options if sum(each) <= 28))

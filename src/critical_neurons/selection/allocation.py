"""Allocation: a budget and what removal costs the loss, group by group, to how many units every group keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np

from critical_neurons.core.structure import Floats, Group
from critical_neurons.errors import InvalidSettingError

ROUNDING = 1e-9

SHIFTS = (2.0, 1.5, 1.25, 1.1)
"""By how much a group grows at the cost of another; first by much."""

MOST_SHIFTS = 100


def share_budget(
    groups: Sequence[Group],
    losses: Sequence[Floats],
    cost: Callable[[Floats], float],
    slope: Callable[[Floats], Floats],
    limit: float,
    start: Sequence[int] | None = None,
) -> list[int]:
    """Counts that keep the cost within the limit, at least the least of every group, with no room for a further one.

    `losses[g][n]`: what n + 1 units removed from group g cost the loss. `cost` and `slope`, its derivative, are those
    of how much of every unit is kept, with a last entry for NO_UNIT. Where the loss rises least for the cost saved,
    the next units go: of one group one of every block, the losses made convex before. Once the limit is met, those
    that fit come back, where the loss falls most for it first. `start`: counts to begin with in place of all.
    """
    kept = np.ones(sum(map(len, groups)) + 1)
    counts = [len(group) for group in groups] if start is None else list(start)
    for group, count in zip(groups, counts, strict=True):
        kept[group.units] = count / len(group)
    rises = [np.diff(make_convex(np.concatenate([[0.0], loss]))) for loss in losses]

    def price(place: int, gone: int, saved: Floats) -> float:
        """What the loss rises by, for the cost saved, when after so many the next of every block go."""
        blocks = groups[place].blocks
        return float(rises[place][gone : gone + blocks].sum() / (blocks * saved[groups[place].units].mean()))

    def move(place: int, step: int) -> None:
        group = groups[place]
        counts[place] += step * group.blocks
        kept[group.units] = counts[place] / len(group)

    while cost(kept) > limit + ROUNDING:
        saved = slope(kept)
        prices = {
            place: price(place, len(group) - counts[place], saved)
            for place, group in enumerate(groups)
            if counts[place] > group.least
        }
        if not prices:
            raise InvalidSettingError(
                f"search: the budget cannot be met; with one unit of every layer the cost is {cost(kept):.4g}, and "
                f"{limit:.4g} is asked for."
            )
        move(min(prices, key=prices.__getitem__), -1)
    tried: set[int] = set()
    while True:
        saved = slope(kept)
        prices = {
            place: price(place, len(group) - counts[place] - group.blocks, saved)
            for place, group in enumerate(groups)
            if counts[place] < len(group) and place not in tried
        }
        if not prices:
            return counts
        place = max(prices, key=prices.__getitem__)
        move(place, +1)
        if cost(kept) > limit + ROUNDING:
            move(place, -1)
            tried.add(place)


def shift_shares(
    groups: Sequence[Group],
    counts: Sequence[int],
    fit: Callable[[Sequence[int]], list[int]],
    loss: Callable[[Sequence[int]], float],
) -> list[int]:
    """Counts with a loss no higher: one group grows and another shrinks, as long as that helps.

    `fit` makes counts that keep to the budget of such as do not, or leave room.
    """
    best, least, trials = list(counts), loss(counts), 0
    for factor in SHIFTS:
        moved = True
        while moved:
            moved = False
            for more, less in permutations(range(len(groups)), 2):
                further = _shift(groups, best, more, less, factor)
                if further is None:
                    continue
                if trials == MOST_SHIFTS:
                    return best
                trials += 1
                further = fit(further)
                if (found := loss(further)) < least:
                    best, least, moved = further, found, True
    return best


def _shift(groups: Sequence[Group], counts: Sequence[int], more: int, less: int, factor: float) -> list[int] | None:
    """One group larger by the factor and the other smaller by it, a unit at least; None where either cannot be."""
    further = list(counts)
    whole, grown, shrunk = len(groups[more]), groups[more].blocks, groups[less].blocks
    further[more] = min(max(round(counts[more] * factor / grown), counts[more] // grown + 1) * grown, whole)
    fewer = min(round(counts[less] / factor / shrunk), counts[less] // shrunk - 1) * shrunk
    further[less] = max(fewer, groups[less].least)
    return further if further[more] > counts[more] and further[less] < counts[less] else None


def make_convex(values: Floats) -> Floats:
    """The largest convex sequence nowhere above the values."""
    hull: list[int] = []
    for index in range(len(values)):
        while len(hull) > 1 and _lies_above(values, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(index)
    return np.interp(np.arange(len(values)), hull, values[hull])


def _lies_above(values: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle one is on or above the line between the others."""
    rise = (values[last] - values[first]) * (middle - first)
    return bool((values[middle] - values[first]) * (last - first) >= rise)

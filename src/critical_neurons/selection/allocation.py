"""Allocation: a budget and what removal costs the loss, group by group, to how many units every group keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from critical_neurons.core.structure import Floats, Group
from critical_neurons.errors import InvalidSettingError

ROUNDING = 1e-9


def share_budget(
    groups: Sequence[Group],
    losses: Sequence[Floats],
    cost: Callable[[Floats], float],
    slope: Callable[[Floats], Floats],
    limit: float,
) -> list[int]:
    """Counts that keep the cost within the limit, at least the least of every group, with no room for a further one.

    `losses[g][n]`: what n + 1 units removed from group g cost the loss. `cost` and `slope`, its derivative, are those
    of how much of every unit is kept, with a last entry for NO_UNIT. Where the loss rises least for the cost saved,
    the next units go: of one group one of every block, the losses made convex before. Once the limit is met, those
    that fit come back, where the loss falls most for it first.
    """
    kept = np.ones(sum(map(len, groups)) + 1)
    counts = [len(group) for group in groups]
    rises = [np.diff(make_convex(np.concatenate([[0.0], loss]))) for loss in losses]

    def price(place: int, gone: int, saved: Floats) -> float:
        """What the loss rises by, for the cost saved, when the next units of every block go."""
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

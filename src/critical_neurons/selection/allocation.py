"""Allocation: how many units every group keeps, from a budget and the loss that removals cost in each group."""

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
    """How many units every group keeps so that the cost stays within the limit and no further unit fits.

    `losses[g][n]` is the loss caused by removing n + 1 units of group g; `cost` maps the kept share of every unit
    (with a last entry for NO_UNIT) to the cost, and `slope` to its gradient. Greedy: remove the next unit of each
    block of the group with the smallest loss per cost saved, where losses are first replaced by their convex
    envelope; once the limit is met, add units back while they fit, those with the largest loss per cost first.
    """
    kept, counts = np.ones(sum(map(len, groups)) + 1), [len(group) for group in groups]
    rises = [np.diff(make_convex(np.concatenate([[0.0], loss]))) for loss in losses]
    units = np.concatenate([group.units for group in groups])
    starts = np.cumsum([0, *counts[:-1]])
    sizes, blocks = np.array(counts), np.array([group.blocks for group in groups])
    next_rise, last_rise = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)

    def note(place: int) -> None:
        """Update the loss added by removing the next unit of every block, and by the last removal."""
        group, gone = groups[place], len(groups[place]) - counts[place]
        left = counts[place] > group.least
        next_rise[place] = rises[place][gone : gone + group.blocks].sum() if left else np.inf
        last_rise[place] = rises[place][gone - group.blocks : gone].sum() if gone else -np.inf

    def price(rise: Floats) -> Floats:
        """The loss per cost saved."""
        saved = blocks * np.add.reduceat(slope(kept)[units], starts) / sizes
        with np.errstate(over="ignore"):
            prices: Floats = rise / np.maximum(saved, np.finfo(float).tiny)
        return prices

    def move(place: int, step: int) -> None:
        group = groups[place]
        counts[place] += step * group.blocks
        kept[group.units] = counts[place] / len(group)
        note(place)

    for place in range(len(groups)):
        note(place)
    while cost(kept) > limit + ROUNDING:
        prices = price(next_rise)
        place = int(prices.argmin())
        if prices[place] == np.inf:
            raise InvalidSettingError(
                f"search: the budget cannot be met; with one unit of every layer the cost is {cost(kept):.4g}, and "
                f"{limit:.4g} is asked for."
            )
        move(place, -1)
    fits = np.ones(len(groups), dtype=bool)
    while True:
        prices = np.where(fits, price(last_rise), -np.inf)
        place = int(prices.argmax())
        if prices[place] == -np.inf:
            return counts
        move(place, +1)
        if cost(kept) > limit + ROUNDING:
            move(place, -1)
            fits[place] = False


def make_convex(values: Floats) -> Floats:
    """The lower convex envelope of a sequence."""
    hull: list[int] = []
    for index in range(len(values)):
        while len(hull) > 1 and _lies_above(values, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(index)
    return np.interp(np.arange(len(values)), hull, values[hull])


def _lies_above(values: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle value is on or above the line through the other two."""
    rise = (values[last] - values[first]) * (middle - first)
    return bool((values[middle] - values[first]) * (last - first) >= rise)

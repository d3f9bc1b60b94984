"""Allocation: how many units every group keeps, from a budget and the loss that removals cost in each group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from critical_neurons.core.structure import Floats, Group
from critical_neurons.errors import InvalidSettingError

ROUNDING = 1e-9

NEXT, LAST = 0, 1
"""The removals that are weighed in every group."""


def share_budget(
    groups: Sequence[Group],
    losses: Sequence[Floats],
    cost: Callable[[Floats], float],
    slope: Callable[[Floats], Floats],
    limit: float,
    *,
    round_to: int = 1,
) -> list[int]:
    """How many units every group keeps so that the cost stays within the limit and no further units fit.

    `losses[g][n]` is the loss caused by removing n + 1 units of group g; `cost` maps the kept share of every unit
    (with a last entry for NO_UNIT) to the cost, and `slope` to its gradient. Counts are multiples of `round_to` and
    of the group's blocks, or all of its units. Greedy: the group with the smallest loss per cost saved goes down to
    its next count, where losses are first replaced by their convex envelope; once the limit is met, groups go up
    again while that fits, the largest loss per cost first.
    """
    kept = np.ones(sum(map(len, groups)) + 1)
    levels = [list_counts(group, round_to) for group in groups]
    places = [0] * len(groups)
    envelopes = [make_convex(np.concatenate([[0.0], loss])) for loss in losses]
    units = np.concatenate([group.units for group in groups])
    sizes = np.array([len(group) for group in groups])
    starts = np.concatenate([[0], sizes.cumsum()[:-1]])
    rises, steps = np.zeros((2, len(groups))), np.ones((2, len(groups)))

    def note(which: int) -> None:
        """Update the loss added by the next removal of a group and by its last one, and the units of either."""
        for row, first in ((NEXT, places[which]), (LAST, places[which] - 1)):
            pair = levels[which][first : first + 2] if first >= 0 else []
            if len(pair) == 2:
                more, less = len(groups[which]) - np.array(pair)
                rises[row, which] = envelopes[which][less] - envelopes[which][more]
                steps[row, which] = less - more
            else:
                rises[row, which] = np.inf if row == NEXT else -np.inf

    def price(row: int) -> Floats:
        """The loss per cost saved."""
        saved = steps[row] * np.add.reduceat(slope(kept)[units], starts) / sizes
        with np.errstate(over="ignore"):
            prices: Floats = rises[row] / np.maximum(saved, np.finfo(float).tiny)
        return prices

    def move(which: int, step: int) -> None:
        places[which] += step
        kept[groups[which].units] = levels[which][places[which]] / len(groups[which])
        note(which)

    for which in range(len(groups)):
        note(which)
    while cost(kept) > limit + ROUNDING:
        prices = price(NEXT)
        which = int(prices.argmin())
        if prices[which] == np.inf:
            raise InvalidSettingError(
                f"search: the budget cannot be met; with the fewest units of every layer the cost is "
                f"{cost(kept):.4g}, and {limit:.4g} is asked for."
            )
        move(which, +1)
    fits = np.ones(len(groups), dtype=bool)
    while True:
        prices = np.where(fits, price(LAST), -np.inf)
        which = int(prices.argmax())
        if prices[which] == -np.inf:
            return [counts[place] for counts, place in zip(levels, places, strict=True)]
        move(which, -1)
        if cost(kept) > limit + ROUNDING:
            move(which, +1)
            fits[which] = False


def list_counts(group: Group, round_to: int) -> list[int]:
    """All units, and the smaller multiples of `round_to` and of the blocks, in descending order."""
    step = math.lcm(round_to, group.blocks)
    return [len(group), *range((len(group) - 1) // step * step, 0, -step)]


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

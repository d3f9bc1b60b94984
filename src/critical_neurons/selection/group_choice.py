"""Group choice: which units of each group stay, by what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from critical_neurons.core.structure import Bools, Group, Ints
from critical_neurons.selection.elimination import Consumer, eliminate, measure_error
from critical_neurons.selection.lower_bound import bound_error
from critical_neurons.selection.swaps import exchange


@dataclass(frozen=True, eq=False)
class Chosen:
    """For every group, its units in the order in which they go, the error with those that stay, and a bound below
    which no choice of as many falls, where it is known. `draft`: the model with them alone, in full size, if there is
    one."""

    orders: tuple[Ints, ...]
    errors: tuple[float, ...]
    bounds: tuple[float | None, ...]
    draft: nn.Module | None = None


class Decisions:
    """What is chosen, group by group. `orders`: given, not looked for; `bounded`: with errors and bounds."""

    def __init__(
        self, groups: Sequence[Group], counts: Sequence[int], orders: Sequence[Ints] | None, bounded: bool
    ) -> None:
        self._groups, self._counts, self._given, self._bounded = groups, counts, orders, bounded
        self._orders: list[Ints] = [np.arange(0)] * len(groups)
        self._errors: list[float] = [0.0] * len(groups)
        self._bounds: list[float | None] = [None] * len(groups)

    def make(self, place: int, maps: Sequence[Consumer], stays: Bools) -> None:
        """For one group, by what reads it; `stays` hears of it."""
        group, count = self._groups[place], self._counts[place]
        order = _order(maps, group, count) if self._given is None else self._given[place]
        kept = keep_last(order, count)
        if self._bounded:
            self._errors[place] = measure_error(maps, torch.from_numpy(kept))
            self._bounds[place] = bound_error(maps, len(group), count, group.blocks)
        self._orders[place], stays[group.units] = order, kept

    def tell(self, draft: nn.Module | None = None) -> Chosen:
        return Chosen(tuple(self._orders), tuple(self._errors), tuple(self._bounds), draft)


def _order(consumers: Sequence[Consumer], group: Group, count: int) -> Ints:
    """The units of the group in the order in which they go; the last `count` are to stay."""
    order = eliminate(consumers, len(group), group.blocks).order.numpy()
    stays = exchange(consumers, torch.from_numpy(keep_last(order, count)), group.blocks)
    return _put_last(order, stays.numpy())


def _put_last(order: Ints, stays: Bools) -> Ints:
    """The same order among those that go, and then among those that stay."""
    return order[np.argsort(stays[order], kind="stable")]


def keep_last(order: Ints, count: int) -> Bools:
    stays = np.zeros(len(order), dtype=bool)
    stays[order[len(order) - count :]] = True
    return stays

"""Budget: a budget to what it leaves of gates, of counts and of costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from critical_neurons.core.costs import Measure, count_cost, count_new_biases, differentiate_cost
from critical_neurons.core.network import Floats, Ints, Network
from critical_neurons.core.settings import BUDGETS
from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.allocation import ROUNDING, share_budget
from critical_neurons.selection.gate_descent import Limit

NAMED_STEP = 1e-4
"""The least share that a message names is a multiple of this."""

SHARE_STEPS = 1000
"""Even shares are tried in steps of one in so many."""


@dataclass(frozen=True)
class Spending:
    """`groups` of units that go together in blocks, as `group_units` gives them. `biases_added`: modules behind
    removed units may be given a bias, which counts as well."""

    network: Network
    groups: list[tuple[Ints, int]]
    budget: dict[str, Any]
    biases_added: bool

    @property
    def by_layer(self) -> bool:
        return self._measure == "units" and "scope" not in self.budget

    def check(self) -> None:
        """Raise where the budget is too small for one unit of every block: before anything is run."""
        kept, limit = np.ones(self.network.unit_count + 1), self._limit(1.0)
        for units, blocks in self.groups:
            kept[units] = blocks / len(units)
        least = self._cost(kept)
        if not self.by_layer and least > limit + ROUNDING:
            share = math.ceil(least / self._limit(0.0) / NAMED_STEP) * NAMED_STEP
            raise InvalidSettingError(
                f"search: the budget cannot be met; with one unit of every layer the cost is {least:.4g}, and "
                f"{limit:.4g} is asked for. Give {self._measure}={share:.4g} or more."
            )

    def share(self, losses: Sequence[Floats], start: Sequence[int] | None = None) -> list[int]:
        """How many units each group keeps; see `share_budget`."""
        return share_budget(self.groups, losses, self._cost, self._slope, self._limit(1.0), start)

    def share_evenly(self) -> list[int]:
        """The largest counts within the budget that are the same share of every group."""

        def count(step: int) -> list[int]:
            return [max(len(units) * step // SHARE_STEPS // blocks, 1) * blocks for units, blocks in self.groups]

        def fits(step: int) -> bool:
            kept = np.ones(self.network.unit_count + 1)
            for (units, _), number in zip(self.groups, count(step), strict=True):
                kept[units] = number / len(units)
            return self._cost(kept) <= self._limit(1.0)

        return count(max(bisect_left(range(SHARE_STEPS + 1), True, key=lambda step: not fits(step)) - 1, 0))

    def limit_gates(self, gates: Floats, way: float) -> list[Limit]:
        """Near these gates, what they may be once so much of the way down to the budget has been gone."""
        if self.by_layer:
            return self.limit_counts([self.budget["units"] * len(units) for units, _ in self.groups], gates, way)
        kept = np.append(gates, 1.0)
        slope = np.maximum(self._slope(kept)[:-1], np.finfo(float).tiny)
        room = slope @ gates + self._limit(way) - self._cost(kept)  # the cost to first order
        scale = slope.mean()
        return [Limit(np.arange(len(gates)), slope / scale, max(room / scale, 0.0))]

    def limit_counts(self, counts: Sequence[float], gates: Floats, way: float) -> list[Limit]:
        """The same, where every group has its own count."""
        return [
            Limit(units, np.ones(len(units)), len(units) - way * (len(units) - count))
            for (units, _), count in zip(self.groups, counts, strict=True)
        ]

    @property
    def _measure(self) -> Measure:
        return next(name for name in BUDGETS if name in self.budget)

    def _limit(self, way: float) -> float:
        """What may be left once so much of the way down to the budget has been gone."""
        everything = np.ones(self.network.unit_count + 1)
        whole = everything[:-1].sum() if self._measure == "units" else self._count(everything)
        return float(whole * (1 - way * (1 - self.budget[self._measure])))

    def _cost(self, kept: Floats) -> float:
        if self._measure == "units":
            return float(kept[:-1].sum())
        added = self.biases_added and self._measure == "params"
        return self._count(kept) + (count_new_biases(self.network.wirings, kept, everywhere=True) if added else 0.0)

    def _count(self, kept: Floats) -> float:
        return count_cost(self.network.wirings, kept, self._measure)

    def _slope(self, kept: Floats) -> Floats:
        if self._measure == "units":
            return np.append(np.ones(len(kept) - 1), 0.0)
        return differentiate_cost(self.network.wirings, kept, self._measure)

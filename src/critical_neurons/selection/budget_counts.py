"""Budget counts: a budget as limits on gates, on units per group and on costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from critical_neurons.core.budget import Budget
from critical_neurons.core.costs import CostModel, count_new_biases
from critical_neurons.core.structure import Floats, Group, Measure, Structure
from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.allocation import ROUNDING, share_budget
from critical_neurons.selection.gate_descent import Limit

NAMED_STEP = 1e-4
"""Error messages round the smallest possible share up to a multiple of this."""


@dataclass(frozen=True)
class Spending:
    """`biases_added`: refitting may add biases to the layers behind removed units; they count as parameters.
    `round_to`: layers keep multiples of it where the budget has room for that."""

    structure: Structure
    budget: Budget
    biases_added: bool
    round_to: int = 1

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.structure.groups

    @property
    def by_layer(self) -> bool:
        return self.budget.by_layer

    def check(self) -> None:
        """Raise before the model is run if the budget does not even allow one unit per block."""
        kept, limit = np.ones(self.structure.unit_count + 1), self._limit(1.0)
        for group in self.groups:
            kept[group.units] = group.least / len(group)
        least = self._cost(kept)
        if self._limit(0.0) == 0:
            raise InvalidSettingError(
                f"{self._measure}: the network has none that was counted. Give units= or params=."
            )
        if not self.by_layer and least > limit + ROUNDING:
            share = math.ceil(least / self._limit(0.0) / NAMED_STEP) * NAMED_STEP
            raise InvalidSettingError(
                f"search: the budget cannot be met; with one unit of every layer the cost is {least:.4g}, and "
                f"{limit:.4g} is asked for. Give {self._measure}={share:.4g} or more."
            )

    def share(self, losses: Sequence[Floats]) -> list[int]:
        """How many units each group keeps; see `share_budget`."""
        share = partial(share_budget, self.groups, losses, self._cost, self._slope, self._limit(1.0))
        try:
            return share(round_to=self.round_to)
        except InvalidSettingError:
            return share(round_to=1)

    def limit_gates(self, gates: Floats, way: float) -> list[Limit]:
        """Linear limits on the gates, valid near the given ones, at a fraction `way` of the descent to the budget."""
        if self.by_layer:
            left = 1 - way * (1 - self.budget.share)
            return [Limit(group.units, np.ones(len(group)), left * len(group)) for group in self.groups]
        kept = np.append(gates, 1.0)
        slope = np.maximum(self._slope(kept)[:-1], np.finfo(float).tiny)
        room = slope @ gates + self._limit(way) - self._cost(kept)  # the cost to first order
        scale = slope.mean()
        return [Limit(np.arange(len(gates)), slope / scale, max(room / scale, 0.0))]

    @property
    def _measure(self) -> Measure:
        return self.budget.measure

    def _limit(self, way: float) -> float:
        """The allowed cost at a fraction `way` of the descent from the whole network to the budget."""
        everything = np.ones(self.structure.unit_count + 1)
        return float(self._count(everything) * (1 - way * (1 - self.budget.share)))

    def _cost(self, kept: Floats) -> float:
        added = self.biases_added and self._measure == "params"
        return self._count(kept) + (count_new_biases(self.structure.wirings, kept, everywhere=True) if added else 0.0)

    def _count(self, kept: Floats) -> float:
        return self._model.count(kept)

    def _slope(self, kept: Floats) -> Floats:
        return self._model.differentiate(kept)

    @cached_property
    def _model(self) -> CostModel:
        return CostModel(self.structure, self._measure)

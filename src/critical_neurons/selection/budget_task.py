"""Budget task: the search for one budget, from what was computed for all budgets to scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from critical_neurons.core.budget import Budget
from critical_neurons.core.progress import Progress, Stage
from critical_neurons.core.scores import LayerChoice
from critical_neurons.core.search_history import Draft, RemovalCost, thin
from critical_neurons.core.structure import Bools, Floats, Structure
from critical_neurons.selection.budget_counts import Spending
from critical_neurons.selection.effort import Effort
from critical_neurons.selection.elimination import Elimination
from critical_neurons.selection.gate_descent import GateSearch
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons.selection.plan_rules import keep_within

REMOVED_BELOW = 0.5
"""Units that stay have at least this score."""


class Prepared(Protocol):
    """What was computed for all budgets, when first needed, and where progress goes."""

    structure: Structure
    effort: Effort
    on_progress: Callable[[Progress], None]

    @property
    def layers(self) -> LayerwiseSearch: ...

    @property
    def ordered(self) -> list[Elimination]: ...

    @property
    def traced(self) -> list[Elimination]: ...

    @property
    def gates(self) -> GateSearch: ...

    def report(self, stage: str) -> Stage:
        """Begin a stage. What is returned receives the progress of it."""


@dataclass(frozen=True)
class BudgetTask:
    """The search for one budget."""

    search: Prepared
    spending: Spending
    started: float

    @property
    def structure(self) -> Structure:
        return self.search.structure

    @property
    def budget(self) -> Budget:
        return self.spending.budget

    def eliminate(self) -> Found:
        """Scores by the order of elimination; revised in rounds, of which the best is returned."""
        layers, rounds, report = self.search.layers, self.search.effort.rounds, self.search.report
        counts, view = self._count(), layers.whole
        per_unit = self._grade(counts, self.search.traced)
        stays, costs = self._keep_best(per_unit), self._list_costs(counts)
        if not rounds:
            report("measuring")
            loss = layers.measure(stays)
            choices = layers.describe(view, stays, self.search.ordered)
            return Found(per_unit, loss, choices, (self._draft(loss),), costs=costs)
        view.inverses.release()
        after = layers.carry_out(stays, report("refitting a draft"))
        best, taken = (per_unit, view, self.search.ordered, after), 0
        drafts = [self._draft(after.loss, after.miss)]
        try:
            for number in range(1, rounds + 1):
                round_ = f"round {number} of {rounds}"
                view = after
                found = layers.order(view, report(f"{round_}, ordering units"))
                view.inverses.release()
                per_unit = self._grade(counts, found)
                carry_out = layers.judge if number == rounds else layers.carry_out
                after = carry_out(self._keep_best(per_unit), report(f"{round_}, refitting a draft"))
                drafts.append(self._draft(after.loss, after.miss))
                if after.miss < best[-1].miss:
                    best, taken = (per_unit, view, found, after), number
        except KeyboardInterrupt:
            self.search.on_progress(Progress("interrupted: the best so far is kept"))
        per_unit, view, found, after = best
        report("bounding choices")
        return Found(per_unit, after.loss, layers.describe(view, after.stays, found), tuple(drafts), taken, costs)

    def _draft(self, loss: float, miss: float | None = None) -> Draft:
        """Where outputs are no classes, networks are judged by the loss itself."""
        known = loss if math.isfinite(loss) else None
        return Draft(time.monotonic() - self.started, known, None if miss == loss else miss)

    def _list_costs(self, counts: Sequence[int]) -> tuple[RemovalCost, ...]:
        pairs = zip(self.structure.groups, self.search.traced, counts, strict=True)
        return tuple(
            RemovalCost(group.layers, len(group), len(group) - count, thin([0.0, *found.errors.tolist()]))
            for group, found, count in pairs
            if found.errors.isfinite().all()
        )

    def trace(self) -> Floats:
        """Scores by the order of elimination in each layer, with all other layers whole."""
        return self._grade(self._count(), self.search.traced)

    def _count(self) -> list[int]:
        """How many units every group keeps: as the budget says, or allocated by what removals cost the loss."""
        if self.spending.by_layer:
            stays = self._keep_best(np.zeros(self.structure.unit_count))
            return [int(stays[group.units].sum()) for group in self.structure.groups]
        return self.spending.share([each.errors.numpy() for each in self.search.traced])

    def _grade(self, counts: Sequence[int], found: Sequence[Elimination]) -> Floats:
        """Scores from orders of removal. Adjusted if a plan would keep other units, as their costs may differ."""
        per_unit = np.zeros(self.structure.unit_count)
        for group, count, each in zip(self.structure.groups, counts, found, strict=True):
            per_unit[group.units[each.order.numpy()]] = _grade(len(group), count)
        stays = self._keep_best(per_unit)[:-1]
        return per_unit if np.array_equal(stays, per_unit >= REMOVED_BELOW) else _rank(per_unit, stays)

    def descend(self) -> Found:
        """Scores by gate descent."""
        drafts: list[Draft] = []
        report = self.search.report("moving gates")
        gates = self.search.gates.descend(
            self.spending.limit_gates, report, lambda loss: drafts.append(self._draft(loss))
        )
        stays = self._keep_best(gates)[:-1]
        loss = self.search.gates.measure(stays)
        kept = (*thin(drafts), self._draft(loss))
        return Found(_rank(gates, stays), loss, drafts=kept, taken=len(kept) - 1)

    def _keep_best(self, values: Floats) -> Bools:
        """The highest-valued units within the budget, with a last entry for NO_UNIT."""
        return keep_within(
            self.structure,
            values,
            self.budget,
            biases_added=self.spending.biases_added,
            round_to=self.spending.round_to,
        )


@dataclass(frozen=True, eq=False)
class Found:
    """Scores, the loss of the smaller model, the choice in every layer, and fields of `SearchHistory`."""

    per_unit: Floats
    loss: float | None
    choices: tuple[LayerChoice, ...] = ()
    drafts: tuple[Draft, ...] = ()
    taken: int = 0
    costs: tuple[RemovalCost, ...] = ()


def _rank(values: Floats, stays: Bools) -> Floats:
    """Scores that rise with the values, higher for all units that stay than for the others."""
    per_unit = np.zeros(len(values))
    per_unit[np.lexsort((values, stays))] = _grade(len(values), int(stays.sum()))
    return per_unit


def _grade(count: int, kept: int) -> Floats:
    """Ascending scores for `count` units in the order of removal; the `kept` last are at least `REMOVED_BELOW`."""
    gone = count - kept
    below = REMOVED_BELOW * np.arange(gone) / max(gone, 1)
    above = REMOVED_BELOW + (1 - REMOVED_BELOW) * (np.arange(kept) + 1) / max(kept, 1)
    return np.concatenate([below, above])

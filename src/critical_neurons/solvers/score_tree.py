"""What the trees over scores have in common: open nodes, the bound of the closed ones, and when the search ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from critical_neurons.core.program import Program
from critical_neurons.core.solution import Status
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.base import Limits, Report
from critical_neurons.solvers.cutting_planes import CutLoop
from critical_neurons.solvers.lp_engine import LinearEngine
from critical_neurons.solvers.search_record import StopSearch


@dataclass(order=True)
class ScoreNode:
    """Bounds on the scores, 0 or 1, and the least objective there can be within them."""

    bound: float
    number: int
    lower: Floats = field(compare=False)
    upper: Floats = field(compare=False)


Node = TypeVar("Node", bound=ScoreNode)


class ScoreTree(CutLoop, Generic[Node]):
    def __init__(
        self, build: Callable[[Program, Limits], LinearEngine], program: Program, limits: Limits, report: Report
    ) -> None:
        super().__init__(build, program, limits, report)
        assert program.branching is not None
        self._branching = program.branching
        self._columns = np.arange(program.branching.columns.start, program.branching.columns.stop)
        self._open: list[Node] = []  # a heap
        self._closed_at = np.inf
        self._numbers = 0

    def _solve_integers(self, relaxed: Floats) -> None:
        self._improve(self.incumbent, relaxed)
        self._open_root(self.program.lower[self._columns], self.program.upper[self._columns])
        while self._open:
            self.raise_bound(min(self._open[0].bound, self._closed_at, self._value()))
            self.record_step()
            if self.gap <= self.target:
                return
            self._branch()
        if self.objective is None:
            raise StopSearch(Status.INFEASIBLE if np.isinf(self._closed_at) else Status.FAILED)
        self.raise_bound(min(self._closed_at, self.objective))

    def _open_root(self, lower: Floats, upper: Floats) -> None:
        raise NotImplementedError

    def _branch(self) -> None:
        """Replace some of the open nodes by their children."""
        raise NotImplementedError

    def _close(self, bound: float) -> None:
        self._closed_at = min(self._closed_at, bound)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _place(self, scores: Floats) -> Floats:
        point = np.zeros(self.program.column_count)
        point[self._columns] = scores
        return point

    def _cutoff(self) -> float:
        """What a bound must reach for its node to be pruned; infinite as long as there is no incumbent."""
        value = self._value()
        return value if np.isinf(value) else value - self.target * max(1.0, abs(value))

    def _value(self) -> float:
        return np.inf if self.objective is None else self.objective

"""The protocol of an LP engine: what the cutting plane loop needs of a solver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from critical_neurons.core.program import Rows
from critical_neurons.core.structure import Bools, Floats, Ints

FEASIBILITY = 1e-9
"""Feasibility tolerance of engines, tighter than their defaults: below the least difference for a new tangent."""

LOOK_SECONDS = 0.1
"""Time between two checks of a running solve for its end, new points and Ctrl-C."""


class Outcome(Enum):
    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class LinearResult:
    """`point` is the optimum, or the best point of an integer program that was stopped. `duals` are the multipliers
    of the rows of a linear program, positive where a lower bound is active."""

    outcome: Outcome
    point: Floats | None
    bound: float
    duals: Floats | None = None


class LinearPart(Protocol):
    """The linear part of a program."""

    @property
    def cost(self) -> Floats: ...

    @property
    def lower(self) -> Floats: ...

    @property
    def upper(self) -> Floats: ...

    @property
    def integer(self) -> Bools: ...

    @property
    def rows(self) -> Rows: ...


Watch: TypeAlias = Callable[[float, Floats | None], None]
"""Called with the bound of a running integer program, and its best point if that is new."""


class LinearEngine(Protocol):
    """A mixed integer linear program that grows by rows. Continuous except during `solve_integer`.

    A KeyboardInterrupt stops the solver underneath and goes on to the caller.
    """

    def add_rows(self, rows: Rows) -> None: ...

    def change_cost(self, cost: Floats) -> None: ...

    def change_bounds(self, columns: Ints, lower: Floats, upper: Floats) -> None: ...

    def solve(self, seconds: float) -> LinearResult: ...

    def solve_integer(self, seconds: float, gap: float, start: Floats | None, watch: Watch) -> LinearResult:
        """`watch` is called in the caller's thread."""


def run_in_thread(action: Callable[[], None]) -> threading.Event:
    """Start a thread and return an event that is set at its end. Unlike joining a thread, waiting for an event can be
    interrupted by Ctrl-C."""
    ended = threading.Event()

    def run() -> None:
        try:
            action()
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended

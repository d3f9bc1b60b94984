"""What a solver is: a name, what it can do, and solve(program, limits, report) -> Solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from critical_neurons.program import Program
from critical_neurons.solution import Solution, Step

Report: TypeAlias = Callable[[Step], None]


class Capability(Enum):
    INTEGER = "integer columns"
    SOURCES = "rows added when violated"


@dataclass(frozen=True)
class Limits:
    """When to stop: at a relative gap, or after so many seconds. `threads=None` leaves the number to the solver."""

    time_limit: float = 300.0
    gap: float = 1e-4
    threads: int | None = None
    seed: int = 0


class Solver(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        """Solve the program, calling `report` with each step of progress.

        A KeyboardInterrupt while solving ends it like a time limit: with the best point so far.
        """


def ignore_progress(step: Step) -> None:
    """A report that nobody reads."""

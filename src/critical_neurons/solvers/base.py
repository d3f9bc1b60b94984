"""The protocol of a solver: a name, its capabilities, and solve(program, limits, report) -> Solution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias

from critical_neurons.core.program import Program
from critical_neurons.core.solution import Solution, Step
from critical_neurons.errors import InvalidSettingError

Report: TypeAlias = Callable[[Step], None]


class Capability(Enum):
    INTEGER = "integer columns"
    SOURCES = "rows added when violated"


@dataclass(frozen=True)
class Limits:
    """When to stop: at a relative gap, or after `time_limit` seconds. `threads=None` leaves the number to the solver.

    `options` are the solver's own, by the names it has for them.
    """

    time_limit: float = 300.0
    gap: float = 1e-4
    threads: int | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise `InvalidSettingError` on an option this solver does not have, or not with this value."""

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        """Solve the program, calling `report` with each step of progress.

        A KeyboardInterrupt while solving ends it like a time limit: with the best point so far.
        """


def ignore_progress(step: Step) -> None:
    """Reports nothing."""


def refuse_options(solver: str, options: Mapping[str, Any]) -> None:
    """For solvers without options of their own."""
    if options:
        raise InvalidSettingError(f"options: {solver} has none. Found: {', '.join(options)}.")


def refuse_settled(solver: str, options: Mapping[str, Any], settled: Mapping[str, str | None]) -> None:
    """Raise on options that are set otherwise. `settled` names the setting to use; None if there is none."""
    for option in options:
        if option in settled:
            setting = settled[option]
            advice = f"Use {setting}= instead." if setting else "Leave it out."
            raise InvalidSettingError(f"options: {option} of {solver} is set here already. {advice}")

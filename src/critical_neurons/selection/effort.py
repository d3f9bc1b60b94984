"""Effort: how much a search may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from critical_neurons.core.settings import EffortName
from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.gate_descent import Steps

SMALL_NUMBERS, MEDIUM_NUMBERS = 10**8, 10**9
"""Numbers in a forward pass of all inputs, up to which "standard" tries many choices, or some."""

MEDIUM_COLUMNS = 1024
"""Weights of a unit, of any module that is refitted, up to which it tries some: the work grows with their cube."""


@dataclass(frozen=True)
class Effort:
    """`temperatures` tried, with `draws` samples of inputs each; `rounds` in which choices are revised; whether
    shares of layers are shifted (`shifts`) and even shares tried too (`even`); gates at so many temperatures, in
    `steps`."""

    temperatures: int
    draws: int
    rounds: int
    shifts: bool
    even: bool
    gate_temperatures: int
    steps: Steps

    @property
    def single(self) -> bool:
        """Whether a single choice is made, with nothing to compare it with."""
        return self.temperatures == 1 and not self.even


QUICK = Effort(1, 1, 0, shifts=False, even=False, gate_temperatures=1, steps=Steps(100, 0))
LARGE = Effort(1, 1, 0, shifts=False, even=False, gate_temperatures=1, steps=Steps())
MEDIUM = Effort(5, 1, 0, shifts=False, even=True, gate_temperatures=1, steps=Steps())
THOROUGH = Effort(5, 6, 2, shifts=True, even=True, gate_temperatures=3, steps=Steps())


def choose_effort(name: EffortName, numbers: int, columns: int) -> Effort:
    """`numbers` in a forward pass of all inputs; `columns`: the most weights of a unit that is refitted."""
    match name:
        case "quick":
            return QUICK
        case "thorough":
            return THOROUGH
        case "standard":
            if numbers <= SMALL_NUMBERS:
                return THOROUGH
            return MEDIUM if numbers <= MEDIUM_NUMBERS and columns <= MEDIUM_COLUMNS else LARGE
        case _:
            accepted = ", ".join(map(repr, get_args(EffortName)))
            raise InvalidSettingError(f"effort: found {name!r}. Accepted: {accepted}.")

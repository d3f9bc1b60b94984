"""Effort: how much a search may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from critical_neurons.core.settings import EffortName
from critical_neurons.errors import InvalidSettingError


@dataclass(frozen=True)
class Effort:
    """`passes` over the inputs to find out what errors of layers are worth; `rounds` in which every layer's choice is
    revised by what reaches it once the others are smaller; `steps` of gates, where nothing is refitted;
    `fisher_share` of the inputs, from which Fisher matrices are made."""

    passes: int
    rounds: int
    steps: int
    fisher_share: float = 0.5


EFFORTS = {"quick": Effort(3, 0, 100, 0.25), "standard": Effort(10, 1, 400), "thorough": Effort(20, 4, 400)}


def choose_effort(name: EffortName) -> Effort:
    if name not in EFFORTS:
        accepted = ", ".join(map(repr, get_args(EffortName)))
        raise InvalidSettingError(f"effort: found {name!r}. Accepted: {accepted}.")
    return EFFORTS[name]

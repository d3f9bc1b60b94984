"""Effort: how much a search may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from critical_neurons.core.settings import EffortName
from critical_neurons.errors import InvalidSettingError


@dataclass(frozen=True)
class Effort:
    """`passes` over the inputs that relate errors of single layers to the loss; `rounds` in which the choice in every
    layer is revised given the smaller other layers; `steps` of gate descent, used without refitting; `fisher_share`
    of the inputs used for Fisher matrices."""

    passes: int
    rounds: int
    steps: int
    fisher_share: float = 0.5


EFFORTS = {"quick": Effort(3, 0, 100, 0.25), "standard": Effort(6, 1, 400), "thorough": Effort(20, 4, 400)}


def choose_effort(name: EffortName) -> Effort:
    if name not in EFFORTS:
        accepted = ", ".join(map(repr, get_args(EffortName)))
        raise InvalidSettingError(f"effort: found {name!r}. Accepted: {accepted}.")
    return EFFORTS[name]

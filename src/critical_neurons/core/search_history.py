"""Search history: how a search went, stage by stage and network by network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from critical_neurons.core.documents import Amount, Count

MOST_KEPT = 64
"""Numbers of a curve that are kept; a longer one is thinned out evenly."""


_Each = TypeVar("_Each")


@dataclass(frozen=True)
class SearchStage:
    """What was done, and how long it took."""

    name: str
    seconds: Amount


@dataclass(frozen=True)
class Draft:
    """A smaller network that was tried `seconds` after the search began: how far its outputs are from the model's
    and, where outputs are classes, the criterion of the choice (`miss`): a smoothed share of changed decisions. A
    distance that is not finite is None."""

    seconds: Amount
    loss: float | None
    miss: float | None = None


@dataclass(frozen=True)
class RemovalCost:
    """The expected distance of the outputs as units of some layers are removed and all other layers stay whole, at
    evenly spaced numbers of units from none to all; and how many of these units the search removed."""

    layers: tuple[str, ...]
    units: Count
    removed: Count
    losses: tuple[float, ...]


@dataclass(frozen=True)
class SearchHistory:
    """`taken` is the place of the draft whose units were taken."""

    stages: tuple[SearchStage, ...]
    drafts: tuple[Draft, ...] = ()
    taken: Count = 0
    costs: tuple[RemovalCost, ...] = ()


def thin(values: Sequence[_Each]) -> tuple[_Each, ...]:
    """At most `MOST_KEPT` of the values, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(len(values), MOST_KEPT)).round().astype(int)
    return tuple(values[place] for place in places)

"""Gates: what a formulation decides about every ReLU, on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy import sparse

from critical_neurons.core.bounds import Bounds, Interval
from critical_neurons.core.network import Network, Relu
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints


@dataclass(frozen=True)
class Gate:
    """One ReLU on the whole batch; arrays are (batch, *shape).

    `shrink` is how much p falls at this ReLU when the score of its unit goes from 1 to 0: q = p - (1 - s) shrink.
    `explicit` are the flat indices that are neither live nor dead; their activations are the columns `first`,
    `first + 1`, … times `tops`, their upper bounds U. At all others floor <= q <= ceiling is a row. At explicit ones
    `floor` is the lower bound of q or, if gates `follow_scores`, of p: with scores of 0 or 1 a gate is open only if
    its score is 1.
    """

    floor: Floats
    ceiling: Floats
    shrink: Floats
    live: Bools
    explicit: Ints
    tops: Floats
    first: int
    units: Ints
    scatter: sparse.csr_array
    scale: float
    follow_scores: bool = False

    @cached_property
    def explicit_units(self) -> Ints:
        """The units of the explicit elements."""
        units = np.broadcast_to(self.units, self.floor.shape[1:]).reshape(-1)
        return units[self.explicit % units.size]

    def at(self, samples: slice) -> Gate:
        """The part for some of the data points, of a gate without explicit elements."""
        return replace(
            self,
            floor=self.floor[samples],
            ceiling=self.ceiling[samples],
            shrink=self.shrink[samples],
            live=self.live[samples],
        )

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + len(self.explicit))

    @property
    def dead(self) -> Bools:
        dead = ~self.live
        dead.reshape(-1)[self.explicit] = False
        return dead


@dataclass(frozen=True)
class GateDecision:
    """A formulation's decision about one ReLU: where it is live or dead, and the limits of q (see `Gate`)."""

    live: Bools
    dead: Bools
    floor: Floats
    ceiling: Floats
    follow_scores: bool = False


class Formulation(Protocol):
    """What a formulation decides from the bounds."""

    fixes_windows: bool
    """Whether a max pool always keeps the winner it has at the data point."""
    completes: bool
    """Whether the forward pass with any scores is a feasible point of the program."""

    def shrinks(self, network: Network, bounds: Bounds) -> dict[int, Floats]:
        """By the index of each ReLU: how much q falls when its score goes from 1 to 0."""

    def decide(self, op: Relu, interval: Interval, shrink: Floats, *, fixed: bool) -> GateDecision:
        """`fixed`: p depends on no column."""


def make_gate(
    op: Relu, interval: Interval, shrink: Floats, decision: GateDecision, first: int, unit_count: int
) -> Gate:
    explicit = np.flatnonzero(~decision.live & ~decision.dead)
    units = op.units.reshape(-1)
    scored = np.flatnonzero(units != NO_UNIT)
    return Gate(
        floor=decision.floor,
        ceiling=decision.ceiling,
        shrink=shrink,
        live=decision.live,
        explicit=explicit,
        tops=interval.upper.reshape(-1)[explicit],
        first=first,
        units=op.units,
        scatter=sparse.csr_array((np.ones(len(scored)), (scored, units[scored])), shape=(len(units), unit_count)),
        follow_scores=decision.follow_scores,
        scale=find_scale(interval),
    )


def find_scale(interval: Interval) -> float:
    """The largest bound of a ReLU, on the whole batch."""
    return float(max(0.0, *(max(end.max(), -end.min()) for end in (interval.lower, interval.upper)))) or 1.0

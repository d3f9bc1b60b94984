"""Branching: what a program offers to branch and bound, and to a search for better points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from critical_neurons.core.structure import Bools, Floats, Ints

if TYPE_CHECKING:
    from critical_neurons.core.program import Separator


@dataclass(frozen=True)
class BoundedNodes:
    """The bounds found for some nodes, with their multipliers; values of 0 and 1 that attain the bounds, and their
    objectives, infinite if they are infeasible.

    `probes`: estimates, from above, of the bounds with each single column fixed at 0, and at 1, (nodes, columns); of
    use for free columns, and minus infinity for nodes that reach the cutoff. Where such a bound itself reaches the
    cutoff, the column has the other value in `lower` and `upper`; lower is above upper if neither is left.
    """

    bounds: Floats
    multipliers: Floats
    masks: Floats
    values: Floats
    lower: Floats
    upper: Floats
    probes: tuple[Floats, Floats]


class NodeBounds(Protocol):
    """Lower bounds of many nodes at once. A node fixes some of the columns to branch on at 0 or 1: lower and upper
    are (nodes, columns). Its bound has multipliers, (nodes, numbers); any are valid, good ones are found by steps."""

    @property
    def useless(self) -> Bools:
        """Columns that are 0 in some optimum."""

    def start(self) -> Floats:
        """Multipliers for the root."""

    def raise_bounds(
        self,
        lower: Floats,
        upper: Floats,
        multipliers: Floats,
        *,
        cutoff: float,
        steps: int,
        check: Callable[[], object],
    ) -> BoundedNodes:
        """Bounds by steps from these multipliers. Ends early if all bounds reach the cutoff. `check` is called at
        every step, and may raise."""

    def find_values(self, masks: Floats) -> Floats:
        """The objectives of values of 0 and 1, (nodes, columns); infinite if they are infeasible."""


@dataclass(frozen=True)
class Branching:
    """How to branch if a few 0/1 columns determine all others, by `Program.complete`.

    `columns` of the highest `priority` are fixed first. `hulls` tighten the relaxation. `nodes` give bounds without
    linear programs, if there are any for the program.
    """

    columns: slice
    priority: Ints
    hulls: Separator | None = None
    nodes: NodeBounds | None = None


class Improvement(Protocol):
    def __call__(self, point: Floats, *, seconds: float, seed: int) -> Floats:
        """The best point, feasible for all sources, that is found in time from the scores of this one."""

"""What the Lagrangian bounds of `score_dual` are computed from, and what is found.

Nodes are the last axis of all large arrays, so that numpy's loops are long.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.unit_counts import Box, UnitCounts


class _ByNode:
    """Arrays whose last axis is the nodes."""

    def take(self, nodes: Ints) -> Self:
        found = copy(self)
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(found, field.name, getattr(self, field.name)[..., nodes])
        return found


@dataclass
class Multipliers(_ByNode):
    """Of many nodes: outputs (outputs of all data points, nodes), class by class, slopes (units, elements, nodes) and
    prices (units, scores of the first ReLU, nodes)."""

    outputs: Floats
    slopes: Floats
    prices: Floats

    def join(self) -> Floats:
        """(nodes, numbers)."""
        count = self.outputs.shape[-1]
        parts = (self.outputs, self.slopes, self.prices)
        return np.ascontiguousarray(np.concatenate([part.reshape(-1, count) for part in parts]).T)


@dataclass(frozen=True)
class Elements(_ByNode):
    """The pre-activations of the second ReLU, (units, elements, nodes): with all free scores at 0 (`offsets`), where
    both signs occur, and the chord there."""

    offsets: Floats
    mixed: Bools
    slope: Floats
    shift: Floats
    """What the chord adds to slope times p."""


class Nodes:
    """What steps do not change: `free` (scores of the first ReLU, nodes) is 0 for scores that are fixed, `kept`
    (units, 1, nodes) for units that are removed."""

    def __init__(self, counts: UnitCounts, boxes: tuple[Box, Box], elements: Elements) -> None:
        self.elements = elements
        self.free = np.ascontiguousarray(boxes[0].free.T)
        self.kept = np.ascontiguousarray(boxes[1].upper.T)[:, None]
        self.counts = counts.within(boxes)


@dataclass(frozen=True)
class Cases:
    """The elements for which both cases are tried, (cases, units, elements, nodes), and the chords of all others."""

    tried: Floats
    slope: Floats
    shift: Floats


@dataclass
class DualValue:
    """Bounds and the scores of both ReLUs, (nodes, units), that attain them, with what they were computed from.

    `rising` and `falling` are the positive and negative parts of c, `factors` (combinations of cases, units,
    elements, nodes) those of p, and `totals` (combinations, units, nodes) the least costs of a unit that is kept;
    `owed` (units, nodes) what a unit gains that is not kept, `costs` those of the scores of both ReLUs, `own` the
    part of the second one's that is not of copies, and `constant` what depends on no score.
    """

    bound: Floats
    scores: tuple[Floats, Floats]
    cases: Cases
    rising: Floats
    falling: Floats
    factors: Floats
    totals: Floats
    owed: Floats
    costs: tuple[Floats, Floats]
    own: Floats
    constant: Floats

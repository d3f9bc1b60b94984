"""Relaxed points: feasible points of a relaxed program from scores.

Given the scores, every explicit value may lie anywhere between two limits that depend on earlier values: the triangle
of a ReLU (equation 9a), the sums of equation 9b, or the limits of a max pool with relaxed choices. So explicit values
can be moved between their limits one after the other, from the first layer to the last. The point is feasible unless
a pre-activation leaves its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.loss import Loss
from critical_neurons.core.network import Op
from critical_neurons.core.program import Program
from critical_neurons.core.structure import NO_UNIT, Floats
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.coefficients import Part
from critical_neurons.formulations.first_layer import SHALLOW
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.loss_term import follow
from critical_neurons.formulations.max_pooling import Pool
from critical_neurons.formulations.pooled_columns import Sums

ROUNDS = 3
"""Rounds in which values follow the gradient of the loss; the first round achieves most of the gain."""


@dataclass(frozen=True)
class Repair:
    """Clips the explicit values to their limits. Scores are kept; with `lift`, those of units whose q would leave its
    bounds are moved first, until it does not."""

    affine: AffineNetwork
    program: Program
    lift: bool = False

    def __call__(self, point: Floats) -> Floats:
        repaired = point.copy()
        if self.lift or self.affine.column_count > self.affine.unit_count:
            choose = self._lift if self.lift else _clip
            repaired[: self.affine.column_count], _ = self.affine.revise(point, choose, moves_scores=self.lift)
        return fit_sparsity(self.program, repaired)

    def _lift(self, part: Part, read: Floats, op: Op, columns: Floats) -> Floats:
        if not isinstance(part, Gate):
            return _clip(part, read, op, columns)
        deep = part.shrink > SHALLOW * part.scale
        lacking, excess = (
            np.divide(np.maximum(by, 0.0), part.shrink, where=deep, out=np.zeros(deep.shape))
            .reshape(len(read), part.units.size, -1)
            .max(axis=(0, 2))
            for by in (part.floor - read, read - part.ceiling)
        )
        units = part.units.reshape(-1)
        scored = units != NO_UNIT
        own = units[scored]
        wanted = columns[own] + np.where(lacking > 0, lacking, -excess)[scored]
        change = np.zeros(units.size)
        change[scored] = np.clip(wanted, self.program.lower[own], self.program.upper[own]) - columns[own]
        columns[own] += change[scored]
        return _clip(part, read + change.reshape(part.units.shape) * part.shrink, op, columns)


@dataclass(frozen=True)
class Favour:
    """Keeps the scores and yields points of decreasing loss: first the given values, repaired, then improved ones.

    A value moves to its upper limit if that reduces the loss, else to the lower one. The gradient comes from a
    backward pass in which later values move along their limits.
    """

    repair: Repair
    loss: Loss
    tail: Tail | None

    def __call__(self, point: Floats) -> Iterator[Floats]:
        affine, explicit = self.repair.affine, slice(self.repair.affine.unit_count, self.repair.affine.column_count)
        model, samples = follow(affine, self.tail), np.arange(len(self.loss))
        at = self.repair(point)
        yield at
        if explicit.start == explicit.stop:
            return
        for _ in range(ROUNDS):
            seeds = self.loss.gradients(model.logits(at))
            if self.tail is not None:
                seeds = self.tail.adjoint(seeds, samples)
            slope = affine.differentiate_along_limits(seeds, at)
            moved = at.copy()
            moved[explicit] = np.where(slope[explicit] == 0, at[explicit], slope[explicit] < 0)
            at = self.repair(moved)
            yield at


def fit_sparsity(program: Program, point: Floats) -> Floats:
    """Set the sparsity term to the smallest value that the scores allow (equation 5)."""
    sparsity = program.blocks["sparsity"].start
    if program.cost[sparsity]:
        point[sparsity] = 0.0
        rows = program.rows
        bounding = np.flatnonzero(rows.matrix[:, [sparsity]].toarray().reshape(-1))
        point[sparsity] = (rows.lower - rows.matrix @ point)[bounding].max()
    return point


def _clip(part: Part, read: Floats, op: Op, columns: Floats) -> Floats:
    match part:
        case Gate():
            q, lower = read.reshape(-1)[part.explicit], part.floor.reshape(-1)[part.explicit]
            least, most = np.maximum(q, 0.0) / part.tops, (q - lower) / (part.tops - lower)
        case Pool():
            least, most = np.zeros(len(part.explicit)), part.most(read)
            np.maximum.at(least, part.rivalries, read.reshape(-1)[part.rivals] / part.tops[part.rivalries])
        case Sums():
            least, most = part.limit(columns)
        case _:
            assert_never(part)
    return np.clip(np.minimum(np.maximum(columns[part.columns], least), most), 0.0, 1.0)

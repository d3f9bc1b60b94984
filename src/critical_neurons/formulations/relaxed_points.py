"""Feasible points of a relaxed program from scores: the explicit values as relaxed gates and choices allow.

Given the scores, every explicit value may be anything between two limits that follow from what lies in front of it:
the triangle of a ReLU (equation 9a), the sums of equation 9b, a max pool between its largest element and what relaxed
choices leave. So from the front of the network to its back a value can be moved between its limits, one after the
other. The point is feasible unless a pre-activation leaves its bounds.
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
from critical_neurons.core.structure import Floats
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.coefficients import Part
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.loss_term import follow
from critical_neurons.formulations.max_pooling import Pool
from critical_neurons.formulations.pooled_columns import Sums

ROUNDS = 3
"""In which values are chosen by the gradient of the loss. At first it is that of the unpruned network; most of what
can be gained is after one round."""


@dataclass(frozen=True)
class Repair:
    """The same scores, and the explicit values moved between their limits where they are not."""

    affine: AffineNetwork
    program: Program

    def __call__(self, point: Floats) -> Floats:
        revised, _ = self.affine.revise(point, _clip)
        repaired = point.copy()
        repaired[: len(revised)] = revised
        return fit_sparsity(self.program, repaired)


@dataclass(frozen=True)
class Favour:
    """The same scores, and the explicit values: first those given, repaired, then ever better ones for the labels.

    A value goes to its upper limit if the loss falls when it rises, else to the lower one. How the loss depends on it
    is a backward pass, in which every value behind follows the limit that it is at.
    """

    repair: Repair
    loss: Loss
    tail: Tail | None

    def __call__(self, point: Floats) -> Iterator[Floats]:
        affine, explicit = self.repair.affine, slice(self.repair.affine.unit_count, self.repair.affine.column_count)
        model, samples = follow(affine, self.tail), np.arange(len(self.loss))
        at = self.repair(point)
        yield at
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
    """The point with its sparsity term as low as its scores allow (equation 5)."""
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

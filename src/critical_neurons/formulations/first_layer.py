"""The first layer: what its rows say of single scores. Its pre-activations p are known, and every row
q >= floor, q <= ceiling with q = p - (1 - s) shrink is affine in one score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from critical_neurons.core.structure import Floats

if TYPE_CHECKING:
    from critical_neurons.formulations.affine import AffineNetwork

SHALLOW = 1e-6
"""A shrink below this share of the ReLU's largest pre-activation bound is smaller than the tolerance of its row."""


def find_least_scores(affine: AffineNetwork) -> Floats:
    """Lower bounds on the scores from the rows q >= floor."""
    least = np.zeros(affine.unit_count + 1)  # the last entry stands for NO_UNIT
    for index, gate in affine.gates.items():
        if affine.depends[affine.ops[index].sources[0]] or gate.follow_scores:
            continue
        needed = np.zeros(gate.floor.shape[1:])
        for some in affine.pieces:
            shrink = gate.shrink[some]
            lacking = gate.floor[some] - affine.at_zero.shrunk[index][some]
            deep = shrink > SHALLOW * gate.scale
            scores = np.divide(lacking, shrink, where=deep, out=np.zeros(deep.shape))
            np.maximum(needed, scores.max(0), out=needed)
        by_unit = needed.reshape(gate.units.size, -1).max(axis=1)
        np.maximum.at(least, gate.units.reshape(-1), by_unit)
    return np.clip(least[:-1], 0.0, 1.0)


def find_settled(affine: AffineNetwork) -> set[int]:
    """ReLUs whose rows hold for all scores between the least ones and 1, since they hold at both ends."""
    least = np.append(find_least_scores(affine), 1.0)
    settled = set()
    for index, gate in affine.gates.items():
        if affine.depends[affine.ops[index].sources[0]] or len(gate.explicit) or gate.follow_scores:
            continue
        at_zero, slack = affine.at_zero.shrunk[index], SHALLOW * gate.scale
        ends = (
            (at, at_zero[at] + share * gate.shrink[at]) for at in affine.pieces for share in (least[gate.units], 1.0)
        )
        if all(np.all((gate.floor[at] - slack <= q) & (q <= gate.ceiling[at] + slack)) for at, q in ends):
            settled.add(index)
    return settled

"""The bounds of `score_dual` with one more score fixed at 0 or at 1, for every score, in one pass."""

from __future__ import annotations

import numpy as np

from critical_neurons.core.structure import Floats
from critical_neurons.formulations.score_dual import ScoreDual
from critical_neurons.formulations.score_dual_data import DualValue, Nodes


def probe(dual: ScoreDual, found: DualValue, prices: Floats, nodes: Nodes, cutoff: float) -> tuple[Floats, Floats]:
    """With each single score fixed at 0, and at 1: (nodes, scores of both ReLUs). Of use for free scores only. Where
    the bound is below the cutoff, what is given may lie between them."""
    kept = [np.full_like(prices, np.inf), np.full_like(prices, np.inf)]
    for total, costs in zip(found.totals, dual.price_copies(found.factors, prices), strict=True):
        others = total[:, None] - np.minimum(costs, 0.0)
        np.minimum(kept[0], others, out=kept[0])
        others += costs
        np.minimum(kept[1], others, out=kept[1])
    owed = found.owed[:, None] - np.maximum(prices, 0.0)
    rests, changed = [], []
    for value, on in enumerate(kept):
        off = owed + value * prices
        rests.append((found.constant - off.sum(axis=0)).T)
        on += off
        on += found.own[:, None]
        changed.append(np.ascontiguousarray(on.transpose(2, 1, 0)))
    limits = cutoff - rests[0], cutoff - rests[1]
    first = nodes.counts.probe_first(found.costs, (changed[0], changed[1]), limits)
    second = nodes.counts.probe_second(found.costs)
    rest = (found.constant - found.owed.sum(axis=0))[:, None]
    zero, one = (np.concatenate([first[value] + rests[value], second[value] + rest], axis=1) for value in (0, 1))
    return zero, one

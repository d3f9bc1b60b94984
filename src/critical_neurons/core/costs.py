"""Costs: parameters and multiply-adds of a network of which only a part is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from critical_neurons.core.network import Floats, Ints, Wiring

Measure: TypeAlias = Literal["units", "params", "macs"]


def count_cost(wirings: Iterable[Wiring], kept: Floats, measure: Measure) -> float:
    """Parameters or multiply-adds of what is left when so much of every unit is kept.

    `kept` has one entry per unit and a last one, 1, that answers for NO_UNIT.
    """
    total = 0.0
    for wiring in wirings:
        pairs = wiring.kernel * kept[wiring.inputs].sum() * kept[wiring.outputs].sum() / wiring.groups
        if wiring.groups == len(wiring.inputs):  # depthwise: every output channel reads one input channel
            pairs = wiring.kernel * kept[wiring.outputs].sum()
        total += pairs * wiring.positions if measure == "macs" else pairs + wiring.extras * kept[wiring.outputs].sum()
    return float(total)


def count_new_biases(wirings: Iterable[Wiring], kept: Floats, *, everywhere: bool = False) -> float:
    """Parameters that removal adds: a layer without a bias gains one where removed units leave a constant; with
    refitting it may gain one `everywhere`."""
    return float(
        sum(
            kept[wiring.outputs].sum()
            for wiring in wirings
            if wiring.kernel
            and not wiring.extras
            and (everywhere or (kept[wiring.inputs[wiring.shifted]] == 0).any())
        )
    )


def halve_macs(wirings: Sequence[Wiring], groups: Sequence[tuple[Ints, int]]) -> float:
    """The share of the multiply-adds that is left when half of those that can go are gone: every group, its units and
    the number of its blocks, keeps one unit of each block at least."""
    whole = np.ones(sum(len(units) for units, _ in groups) + 1)
    least = whole.copy()
    for units, blocks in groups:
        least[units] = blocks / len(units)
    return (1 + count_cost(wirings, least, "macs") / count_cost(wirings, whole, "macs")) / 2


def differentiate_cost(wirings: Iterable[Wiring], kept: Floats, measure: Measure) -> Floats:
    """The derivative of `count_cost` by every entry of `kept`."""
    slope = np.zeros(len(kept))
    for wiring in wirings:
        use = wiring.kernel * (wiring.positions if measure == "macs" else 1)
        extra = 0 if measure == "macs" else wiring.extras
        if wiring.groups == len(wiring.inputs):
            np.add.at(slope, wiring.outputs, use + extra)
        else:
            np.add.at(slope, wiring.outputs, use * kept[wiring.inputs].sum() / wiring.groups + extra)
            np.add.at(slope, wiring.inputs, use * kept[wiring.outputs].sum() / wiring.groups)
    return slope

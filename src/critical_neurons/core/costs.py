"""Costs: parameters, multiply-adds and measured time of a model of which only a part is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from critical_neurons.core.structure import Floats, Measure, Product, Structure, Wiring


def count_cost(structure: Structure, kept: Floats, measure: Measure) -> float:
    """Units, parameters, multiply-adds or nanoseconds of what is left when so much of every unit is kept.

    `kept` has one entry per unit and a last one, 1, that stands for NO_UNIT.
    """
    if measure == "units":
        return float(kept[:-1].sum())
    total = 0.0
    for product in _products(structure, measure):
        total += product.amount * float(np.prod([kept[axis].mean() for axis in product.axes]))
    return total


def differentiate_cost(structure: Structure, kept: Floats, measure: Measure) -> Floats:
    """The derivative of `count_cost` by every entry of `kept`."""
    slope = np.zeros(len(kept))
    if measure == "units":
        slope[:-1] = 1.0
        return slope
    for product in _products(structure, measure):
        shares = [kept[axis].mean() for axis in product.axes]
        for place, axis in enumerate(product.axes):
            others = float(np.prod(shares[:place] + shares[place + 1 :]))
            np.add.at(slope, axis, product.amount * others / axis.size)
    return slope


def count_new_biases(wirings: Iterable[Wiring], kept: Floats, *, everywhere: bool = False) -> float:
    """Parameters that removal adds: a layer without a bias gains one where removed units leave a constant; with
    refitting it may gain one `everywhere`."""
    return float(
        sum(
            kept[wiring.outputs].sum()
            for wiring in wirings
            if not wiring.biased and (everywhere or (kept[wiring.inputs[wiring.constants != 0]] == 0).any())
        )
    )


def halve_macs(structure: Structure) -> float:
    """The share of the multiply-adds that is left when half of those that can go are gone."""
    whole = np.ones(structure.unit_count + 1)
    least = whole.copy()
    for group in structure.groups:
        least[group.units] = group.least / len(group)
    return (1 + count_cost(structure, least, "macs") / count_cost(structure, whole, "macs")) / 2


def _products(structure: Structure, measure: Literal["params", "macs", "latency"]) -> tuple[Product, ...]:
    return {"macs": structure.macs, "params": structure.params, "latency": structure.latency}[measure]

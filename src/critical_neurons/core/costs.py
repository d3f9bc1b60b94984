"""Costs: units, parameters, multiply-adds and measured time of a model with only some units kept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.sparse import csr_array

from critical_neurons.core.structure import Floats, Measure, Product, Structure, Wiring


class CostModel:
    """Units, parameters, multiply-adds or nanoseconds as a function of the kept fraction of every unit.

    A product of the structure multiplies the kept shares of its axes. All shares come from one sparse matrix with a
    row per axis, since allocating a budget needs them once per removed unit.

    `kept` has one entry per unit and a last one, 1, for NO_UNIT.
    """

    def __init__(self, structure: Structure, measure: Measure) -> None:
        products = _products(structure, measure)
        axes = [axis for product in products for axis in product.axes]
        sizes = np.array([axis.size for axis in axes], dtype=np.int64)
        columns = np.concatenate([np.zeros(0, dtype=np.int64), *axes]) % (structure.unit_count + 1)  # NO_UNIT is last
        ends, shape = np.concatenate([[0], sizes.cumsum()]), (len(axes), structure.unit_count + 1)
        self._sums = csr_array((np.ones(len(columns)), columns, ends), shape=shape)
        self._spread, self._sizes = self._sums.T.tocsr(), sizes
        self._amounts = np.array([product.amount for product in products], dtype=float)
        counts = [len(product.axes) for product in products]
        self._places = np.full((len(products), max(counts, default=0)), len(axes))  # the last share is 1
        self._places[np.arange(self._places.shape[1]) < np.array(counts, dtype=int)[:, None]] = np.arange(len(axes))

    def count(self, kept: Floats) -> float:
        return float(self._amounts @ self._find_shares(kept).prod(1))

    def differentiate(self, kept: Floats) -> Floats:
        """The gradient of `count`."""
        shares, slope = self._find_shares(kept), np.zeros(len(self._sizes) + 1)
        for place in range(shares.shape[1]):
            slope[self._places[:, place]] = self._amounts * np.delete(shares, place, axis=1).prod(1)
        found: Floats = self._spread @ (slope[:-1] / self._sizes)
        return found

    def _find_shares(self, kept: Floats) -> Floats:
        """The kept shares of all axes of every product."""
        shares: Floats = np.append(self._sums @ kept / self._sizes, 1.0)[self._places]
        return shares


def count_cost(structure: Structure, kept: Floats, measure: Measure) -> float:
    return CostModel(structure, measure).count(kept)


def differentiate_cost(structure: Structure, kept: Floats, measure: Measure) -> Floats:
    return CostModel(structure, measure).differentiate(kept)


def count_new_biases(wirings: Iterable[Wiring], kept: Floats, *, everywhere: bool = False) -> float:
    """Parameters that removal adds: a layer without a bias gets one if removed units leave a constant; refitting may
    add one `everywhere`."""
    return float(
        sum(
            kept[wiring.outputs].sum()
            for wiring in wirings
            if not wiring.biased and (everywhere or (kept[wiring.inputs[wiring.constants != 0]] == 0).any())
        )
    )


def halve_macs(structure: Structure) -> float:
    """The share of the multiply-adds that is left when half of the removable ones are removed."""
    whole = np.ones(structure.unit_count + 1)
    least = whole.copy()
    for group in structure.groups:
        least[group.units] = group.least / len(group)
    return (1 + count_cost(structure, least, "macs") / count_cost(structure, whole, "macs")) / 2


def _products(structure: Structure, measure: Measure) -> tuple[Product, ...]:
    if measure == "units":
        count = structure.unit_count
        return (Product("", count, (np.arange(count),)),) if count else ()
    return {"macs": structure.macs, "params": structure.params, "latency": structure.latency}[measure]

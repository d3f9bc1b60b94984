"""Swaps: exchange kept for removed units as long as the error falls.

Notation as in `elimination`, with K the kept and R the removed columns. Let

    A = [[-G_KK⁻¹, G_KK⁻¹ G_KR], [(G_KK⁻¹ G_KR)', G_RR - G_RK G_KK⁻¹ G_KR]],    Y = [V, G_R (W - V)].

Removing a kept unit adds tr Y_u' (-A_uu)⁻¹ Y_u to the error, and returning a removed one saves tr Y_u' (A_uu)⁻¹ Y_u.
Both are exact. So is the saving of returning r after removing u: A_rr and Y_r are updated by A_ur, A_uu and Y_u.
Removing and returning a unit are each a pivot on A_uu, known in statistics as the sweep operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from critical_neurons.selection.elimination import Consumer
from critical_neurons.selection.factorisation import factorise

SHORTLIST = 32
"""Only this many kept units, those whose removal adds least, are considered in an exchange."""

EXCHANGES_PER_UNIT, LEAST_EXCHANGES = 0.25, 16
"""Limit on the number of exchanges; with it a choice takes about twice as long as by elimination alone."""

WORTH = 1e-6
"""An exchange must reduce the error by at least this share of it."""


def exchange(consumers: Sequence[Consumer], stays: Tensor, blocks: int = 1) -> Tensor:
    """The units that stay after exchanges within blocks, each the one that reduces the error most."""
    stays = stays.clone()
    block = torch.arange(len(stays)) // (len(stays) // blocks)
    tableaus = [_Tableau(consumer, stays) for consumer in consumers]
    least = WORTH * sum(tableau.error for tableau in tableaus)
    for _ in range(max(LEAST_EXCHANGES, int(EXCHANGES_PER_UNIT * len(stays)))):
        prices = torch.zeros(len(stays), dtype=torch.float64)
        for tableau in tableaus:
            tableau.add_prices(prices)
        left, gone = (each.nonzero().flatten() for each in (stays, ~stays))
        left = left[prices[left].argsort()[:SHORTLIST]]
        if len(left) == 0 or len(gone) == 0:
            break
        changes = prices[left, None] - prices[gone]
        for tableau in tableaus:
            tableau.add_changes(changes, left, gone)
        changes[block[left, None] != block[gone]] = torch.inf
        best = int(changes.argmin())
        if changes.flatten()[best] >= -least:
            break
        pair = torch.stack([left[best // len(gone)], gone[best % len(gone)]])
        for tableau in tableaus:
            for unit in pair:
                tableau.pivot(unit)
        stays[pair] ^= True
    return stays


class _Tableau:
    """A and Y of one consumer."""

    def __init__(self, consumer: Consumer, stays: Tensor) -> None:
        self._units, self._kinds = consumer.units, _list_kinds(consumer.units)
        inverse, weight, kept = consumer.inverse, consumer.weight, stays[consumer.units]
        inside, outside = kept.nonzero().flatten(), (~kept).nonzero().flatten()
        across = inverse[inside[:, None], outside]
        rest = torch.cholesky_inverse(factorise(inverse[outside[:, None], outside]))
        moved = -across @ rest
        self._squares = torch.empty_like(inverse)
        self._squares[inside[:, None], inside] = -inverse[inside[:, None], inside] - moved @ across.T
        self._squares[inside[:, None], outside] = moved
        self._squares[outside[:, None], inside] = moved.T
        self._squares[outside[:, None], outside] = rest
        self._products = torch.empty_like(weight)
        self._products[inside] = weight[inside] + moved @ weight[outside]
        self._products[outside] = rest @ weight[outside]
        self.error = float((weight[outside] * self._products[outside]).sum())

    def add_prices(self, prices: Tensor) -> None:
        """Add the cost of removing every kept unit, and the saving of returning every removed one."""
        for kind in self._kinds:
            prices[kind.units] += self._price(kind).abs()

    def _price(self, kind: _Kind) -> Tensor:
        own = self._squares[kind.columns[:, :, None], kind.columns[:, None]]
        products = self._products[kind.columns]
        solved: Tensor = torch.linalg.solve(own, products @ products.mT)
        return solved.diagonal(dim1=1, dim2=2).sum(1)

    def add_changes(self, changes: Tensor, left: Tensor, gone: Tensor) -> None:
        """Subtract how removing each `left` unit changes the saving of returning each `gone` one: (left, gone)."""
        for first in self._kinds:
            rows, leaving = first.find(left)
            for second in self._kinds:
                columns, returning = second.find(gone)
                if len(rows) and len(columns):
                    changes[rows[:, None], columns] -= self._find_savings(leaving, returning)

    def _find_savings(self, leaving: Tensor, returning: Tensor) -> Tensor:
        """Both arguments are columns (units, columns of one)."""
        a, y = self._squares, self._products
        own = a[leaving[:, :, None], leaving[:, None]][:, None]
        across = a[leaving[:, None, :, None], returning[None, :, None]]  # A_ur
        slope = torch.linalg.solve(own, across).mT  # A_ru A_uu⁻¹
        other = a[returning[:, :, None], returning[:, None]]
        gave, takes = y[leaving], y[returning]
        cross = slope @ torch.einsum("uiq,rjq->urij", gave, takes)
        squares = slope @ (gave @ gave.mT)[:, None] @ slope.mT
        before = takes @ takes.mT
        after: Tensor = torch.linalg.solve(other - slope @ across, before - cross - cross.mT + squares)
        saved: Tensor = torch.linalg.solve(other, before)
        return after.diagonal(dim1=2, dim2=3).sum(2) - saved.diagonal(dim1=1, dim2=2).sum(1)

    def pivot(self, unit: Tensor) -> None:
        """Remove the columns of the unit if it is kept, return them if it is removed."""
        moved = (self._units == unit).nonzero().flatten()
        if len(moved) == 0:
            return
        rows, products = self._squares[moved], self._products[moved]
        own = rows[:, moved]
        back = -own.diagonal().sum().sign()  # -1: the columns return
        solved, answers = torch.linalg.solve(own, rows), torch.linalg.solve(own, products)
        self._squares.addmm_(rows.T, solved, alpha=-1)
        self._products.addmm_(rows.T, answers, alpha=-1)
        self._squares[moved] = -back * solved
        self._squares[:, moved] = -back * solved.T
        self._squares[moved[:, None], moved] = -torch.linalg.inv(own)
        self._products[moved] = -back * answers


@dataclass(frozen=True)
class _Kind:
    """Units with the same number of columns, ascending, and those columns: (units, columns of one)."""

    units: Tensor
    columns: Tensor

    def find(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of units of this kind among the given ones, and their columns."""
        places = torch.isin(units, self.units).nonzero().flatten()
        return places, self.columns[torch.searchsorted(self.units, units[places])]


def _list_kinds(units: Tensor) -> list[_Kind]:
    present, counts = torch.unique(units, return_counts=True)
    columns = torch.split(units.argsort(stable=True), counts.tolist())
    return [
        _Kind(
            present[counts == size], torch.stack([columns[place] for place in (counts == size).nonzero().flatten()])
        )
        for size in counts.unique().tolist()
    ]

"""Backward elimination: in which order to remove inputs of linear maps whose remaining weights are refitted.

The error of a consumer without the inputs R is the minimum over weights V that are zero on R of

    tr (W - V)' G (W - V),

with G the covariance of its inputs plus a ridge, and W its weights times L, where L L' is the Fisher matrix of its
outputs. (Refitting is linear in the weights, so L may be multiplied first.) With H = G⁻¹ the error is

    tr W_R' (H_RR)⁻¹ W_R,

and the remaining inputs then have W - H_R (H_RR)⁻¹ W_R for W and H - H_R (H_RR)⁻¹ H_R' for H. So only the inputs that
may be removed need be known of W and H, whatever else the consumer reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from critical_neurons.selection.factorisation import factorise

HELD_BACK = 128
"""Columns removed before H is updated, so that the update is one matrix product."""


@dataclass(frozen=True)
class Consumer:
    """H (columns, columns) and W (columns, rank of L) of the columns that may be removed, and the unit of each: its
    number in its group."""

    inverse: Tensor
    weight: Tensor
    units: Tensor


@dataclass(frozen=True)
class Elimination:
    """All units in the order of their removal, and the error after each removal."""

    order: Tensor
    errors: Tensor

    def find_error(self, stays: Tensor) -> float | None:
        """The error with these units kept; None if the others are not the first in the order."""
        gone = int((~stays).sum())
        if stays[self.order[:gone]].any():
            return None
        return float(self.errors[gone - 1]) if gone else 0.0


def eliminate(consumers: Iterable[Consumer], unit_count: int, blocks: int = 1) -> Elimination:
    """Greedy: always remove the unit that adds least to the error.

    The units form `blocks` blocks of equal size, which lose their units in turn. The consumers of an iterator are
    freed as their units go.
    """
    systems = [_EliminationSystem(consumer) for consumer in consumers]
    block = torch.arange(unit_count) // (unit_count // blocks)
    alive, due = torch.ones(unit_count, dtype=torch.bool), torch.ones(blocks, dtype=torch.bool)
    order: list[Tensor] = []
    added: list[Tensor] = []
    for _ in range(unit_count):
        errors = torch.zeros(unit_count, dtype=torch.float64)
        for system in systems:
            system.add_errors(errors)
        offered = (alive & due[block]).nonzero().flatten()
        unit = offered[errors[offered].argmin()]
        for system in systems:
            system.remove(unit)
        order.append(unit)
        added.append(errors[unit].clamp(min=0.0))  # rounding errors may be negative
        alive[unit] = due[block[unit]] = False
        if not due.any():
            due[:] = True
    return Elimination(torch.stack(order), torch.stack(added).cumsum(0))


def measure_error(consumers: Sequence[Consumer], stays: Tensor) -> float:
    """The error with these units kept and the weights refitted."""
    total = 0.0
    for each in consumers:
        gone = (~stays[each.units]).nonzero().flatten()
        factor, weight = factorise(each.inverse[gone[:, None], gone]), each.weight[gone]
        total += float(torch.linalg.solve_triangular(factor, weight, upper=False).square().sum())
    return total


class _EliminationSystem:
    """H and W on the remaining columns.

    Removing columns subtracts P'P from H and P'V from W, with one row of P and V per column. Rows are collected until
    large matrix products apply them all; the diagonal blocks of H and W W', which determine the errors, are always up
    to date.
    """

    def __init__(self, consumer: Consumer) -> None:
        order = _sort_columns(consumer.units)
        self._units, self._inverse, self._weight = consumer.units, consumer.inverse, consumer.weight
        if not torch.equal(order, torch.arange(len(order))):
            self._take(order)
        self._begin()

    def _take(self, columns: Tensor) -> None:
        self._units, self._weight = self._units[columns], self._weight[columns]
        self._inverse = self._inverse[columns[:, None], columns]

    def _begin(self) -> None:
        self._rows, self._moved = (self._weight.new_empty(0, size) for size in self._weight.shape)  # P and V
        self._left = torch.ones(len(self._units), dtype=torch.bool)
        self._kinds = _list_kinds(self._units, self._inverse, self._weight)
        self._errors = [_measure_removals(kind.inverse, kind.squares) for kind in self._kinds]

    def add_errors(self, errors: Tensor) -> None:
        """Add, for every remaining unit, the error that its removal would cause."""
        for kind, own in zip(self._kinds, self._errors, strict=True):
            errors[kind.units] += own

    def remove(self, unit: Tensor) -> None:
        gone = (self._units == unit).nonzero().flatten()
        if len(gone) == 0:
            return
        held = self._rows[:, gone].T
        across = (self._inverse[gone] - held @ self._rows) * self._left
        factor, weight = factorise(across[:, gone]), self._weight[gone] - held @ self._moved
        rows, moved = (torch.linalg.solve_triangular(factor, each, upper=False) for each in (across, weight))
        slopes = moved @ self._weight.T - (moved @ self._moved.T) @ self._rows - (moved @ moved.T / 2) @ rows
        self._rows, self._moved = torch.cat([self._rows, rows]), torch.cat([self._moved, moved])
        self._left[gone] = False
        if len(self._rows) >= HELD_BACK:
            self._catch_up()
            return
        for kind in self._kinds:
            kind.remove(unit, rows, slopes)
        self._errors = [_measure_removals(kind.inverse, kind.squares) for kind in self._kinds]

    def _catch_up(self) -> None:
        left = self._left.nonzero().flatten()
        rows = self._rows[:, left]
        self._take(left)
        self._inverse.addmm_(rows.T, rows, alpha=-1)
        self._weight.addmm_(rows.T, self._moved, alpha=-1)
        self._begin()


@dataclass(frozen=True)
class _Kind:
    """Units with equally many columns, the columns, and the blocks of H and W W': (units, columns of one, columns of
    one)."""

    units: Tensor
    columns: slice
    inverse: Tensor
    squares: Tensor

    def remove(self, unit: Tensor, rows: Tensor, slopes: Tensor) -> None:
        """Subtract P'P from H, and P'S + S'P from W W', which is what becomes of it for S = V W' - V V' P / 2."""
        size = self.inverse.shape[1]
        own, other = (
            each[:, self.columns].reshape(len(rows), -1, size).movedim(0, 1).contiguous() for each in (rows, slopes)
        )
        changed = own.mT @ other
        self.inverse.baddbmm_(own.mT, own, alpha=-1)
        self.squares.sub_(changed).sub_(changed.mT)
        gone = self.units == unit
        self.inverse[gone], self.squares[gone] = torch.eye(size, dtype=own.dtype), 0.0  # stays invertible


def _measure_removals(inverse: Tensor, squares: Tensor) -> Tensor:
    """tr W_u' (H_uu)⁻¹ W_u for every unit, from the blocks of H and W W'."""
    if inverse.shape[1] == 1:
        return (squares / inverse).flatten()
    return cast(Tensor, torch.linalg.solve(inverse, squares)).diagonal(dim1=1, dim2=2).sum(1)


def _sort_columns(units: Tensor) -> Tensor:
    """Unit by unit, units with the same number of columns together."""
    _, places, counts = torch.unique(units, return_inverse=True, return_counts=True)
    order = units.argsort(stable=True)
    return order[counts[places][order].argsort(stable=True)]


def _list_kinds(units: Tensor, inverse: Tensor, weight: Tensor) -> list[_Kind]:
    """For columns in the order of `_sort_columns`."""
    present, counts = torch.unique_consecutive(units, return_counts=True)
    kinds, start = [], 0
    for size in counts.unique().tolist():
        same = present[counts == size]
        columns = torch.arange(start, start + size * len(same)).reshape(-1, size)
        own, some = weight[columns], slice(start, start + columns.numel())
        kinds.append(_Kind(same, some, inverse[columns[:, :, None], columns[:, None, :]], own @ own.mT))
        start += columns.numel()
    return kinds

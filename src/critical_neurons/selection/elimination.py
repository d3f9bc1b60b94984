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

from collections.abc import Sequence
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


def eliminate(consumers: Sequence[Consumer], unit_count: int, blocks: int = 1) -> Elimination:
    """Greedy: always remove the unit that adds least to the error.

    The units form `blocks` blocks of equal size, which lose their units in turn.
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
        added.append(errors[unit])
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
    """H and V on the remaining columns.

    Removing columns subtracts P'P from H, with one row of P per column. Rows are collected until one large matrix
    product applies them all; V and the diagonal blocks of H, which determine the errors, are always up to date.
    """

    def __init__(self, consumer: Consumer) -> None:
        order = _sort_columns(consumer.units)
        self._units = consumer.units[order]
        self._inverse, self._weight = consumer.inverse[order[:, None], order], consumer.weight[order]
        self._begin()

    def _begin(self) -> None:
        self._held = self._inverse.new_empty(0, len(self._units))
        self._left = torch.ones(len(self._units), dtype=torch.bool)
        self._kinds = _list_kinds(self._units, self._inverse)

    def add_errors(self, errors: Tensor) -> None:
        """Add, for every remaining unit, the error that its removal would cause."""
        for kind in self._kinds:
            weight = self._weight[kind.columns].reshape(*kind.own.shape[:2], self._weight.shape[1])
            errors[kind.units] += _measure_removals(kind.own, weight)

    def remove(self, unit: Tensor) -> None:
        gone = (self._units == unit).nonzero().flatten()
        if len(gone) == 0:
            return
        across = (self._inverse[gone] - self._held[:, gone].T @ self._held) * self._left
        factor = factorise(across[:, gone])
        rows, weight = (
            torch.linalg.solve_triangular(factor, each, upper=False) for each in (across, self._weight[gone])
        )
        self._weight.addmm_(rows.T, weight, alpha=-1)
        self._held = torch.cat([self._held, rows])
        self._left[gone] = False
        for kind in self._kinds:
            parts = rows[:, kind.columns].reshape(len(rows), *kind.own.shape[:2]).movedim(0, 1)
            kind.own.baddbmm_(parts.mT, parts, alpha=-1)
            kind.own[kind.units == unit] = torch.eye(kind.own.shape[1], dtype=kind.own.dtype)  # stays invertible
        if len(self._held) >= HELD_BACK:
            self._catch_up()

    def _catch_up(self) -> None:
        left = self._left.nonzero().flatten()
        held = self._held[:, left]
        self._inverse = self._inverse[left[:, None], left].addmm_(held.T, held, alpha=-1)
        self._weight, self._units = self._weight[left], self._units[left]
        self._begin()


def _measure_removals(own: Tensor, weight: Tensor) -> Tensor:
    """tr W_u' (H_uu)⁻¹ W_u for every unit, by the cheaper of two ways."""
    if weight.shape[2] < 2 * weight.shape[1]:
        factor, failed = torch.linalg.cholesky_ex(own)
        if not failed.any():
            return cast(Tensor, torch.linalg.solve_triangular(factor, weight, upper=False)).square().sum((1, 2))
    return cast(Tensor, torch.linalg.solve(own, weight @ weight.mT)).diagonal(dim1=1, dim2=2).sum(1)


@dataclass(frozen=True)
class _Kind:
    """Units with equally many columns, the columns, and the blocks of H: (units, columns of one, columns of one)."""

    units: Tensor
    columns: slice
    own: Tensor


def _sort_columns(units: Tensor) -> Tensor:
    """Unit by unit, units with the same number of columns together."""
    _, places, counts = torch.unique(units, return_inverse=True, return_counts=True)
    order = units.argsort(stable=True)
    return order[counts[places][order].argsort(stable=True)]


def _list_kinds(units: Tensor, inverse: Tensor) -> list[_Kind]:
    """For columns in the order of `_sort_columns`."""
    present, counts = torch.unique_consecutive(units, return_counts=True)
    kinds, start = [], 0
    for size in counts.unique().tolist():
        same = present[counts == size]
        columns = torch.arange(start, start + size * len(same)).reshape(-1, size)
        own = inverse[columns[:, :, None], columns[:, None, :]]
        kinds.append(_Kind(same, slice(start, start + columns.numel()), own))
        start += columns.numel()
    return kinds

"""Backward elimination: which inputs of linear maps go first when the others take over their part.

The error of a consumer that keeps the inputs S is the least, over weights V on S alone, of

    tr M (W - V)' G (W - V),

W its weights (columns, outputs), G the covariance of its inputs with a ridge, M how much the loss feels errors of its
outputs. With H = G⁻¹ on the inputs left and V the weights on them, taking away the inputs of a unit u adds exactly

    tr M V_u' (H_uu)⁻¹ V_u,

whatever has gone before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1
"""In place of a unit: a column that stays."""

STEPS_PER_HALVING = 24
"""Units go one by one until there are more than so many; then as many at once as make so many steps of a half."""


@dataclass(frozen=True)
class Consumer:
    """G (columns, columns), W (columns, outputs), M (outputs, outputs), and the unit behind every column: its number
    in its group, or `NONE`."""

    squares: Tensor
    weight: Tensor
    metric: Tensor
    units: Tensor


@dataclass(frozen=True)
class Elimination:
    """All units in the order in which they go, the first to go first, and the error once each has gone."""

    order: Tensor
    errors: Tensor


def eliminate(consumers: Sequence[Consumer], unit_count: int, blocks: int = 1) -> Elimination:
    """The units that read the consumers' columns, those whose removal adds least first.

    The units fall into `blocks` equal blocks, of which each loses one after the other's has gone.
    """
    systems = [_System(consumer) for consumer in consumers]
    alive = torch.ones(unit_count, dtype=torch.bool)
    order: list[Tensor] = []
    errors: list[Tensor] = []
    total = torch.zeros((), dtype=torch.float64)
    while alive.any():
        added = torch.zeros(unit_count, dtype=torch.float64)
        for system in systems:
            system.add_errors(added)
        dealt = torch.where(alive, added, torch.inf).reshape(blocks, -1)
        left = int(alive.sum()) // blocks
        count = max(1, left // STEPS_PER_HALVING)
        going = dealt.argsort(dim=1, stable=True)[:, :count] + torch.arange(blocks)[:, None] * dealt.shape[1]
        chosen = going.T.flatten()  # one of every block, then the next of every block
        total_then = total + sum((system.remove(chosen) for system in systems), torch.zeros((), dtype=torch.float64))
        shares = added[chosen].cumsum(0)
        shares = shares / shares[-1] if shares[-1] > 0 else torch.ones_like(shares)
        errors.append(total + (total_then - total) * shares)
        order.append(chosen)
        alive[chosen], total = False, total_then
    return Elimination(torch.cat(order), torch.cat(errors))


def refit(squares: Tensor, weight: Tensor, stays: Tensor) -> Tensor:
    """V (columns, outputs), zero where columns do not stay: the weights with the least error."""
    inside, outside = stays.nonzero().flatten(), (~stays).nonzero().flatten()
    fitted = torch.zeros_like(weight)
    if len(inside):
        factor = torch.linalg.cholesky(squares[inside[:, None], inside])
        moved = squares[inside[:, None], outside] @ weight[outside]
        fitted[inside] = weight[inside] + torch.cholesky_solve(moved, factor)
    return fitted


class _System:
    """H and V L, with M = L L', on the columns that are left."""

    def __init__(self, consumer: Consumer) -> None:
        self._units = consumer.units
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(consumer.squares))
        self._weight = consumer.weight @ _take_root(consumer.metric)

    def add_errors(self, errors: Tensor) -> None:
        """What the removal of every unit that is left would add."""
        for units, columns in _group_columns(self._units):
            own = self._inverse[columns[:, :, None], columns[:, None, :]]
            weight = self._weight[columns]
            errors[units] += (weight * torch.linalg.solve(own, weight)).sum((1, 2))

    def remove(self, units: Tensor) -> Tensor:
        """Take the columns of these units away, and return what that adds."""
        gone = torch.isin(self._units, units)
        out, rest = gone.nonzero().flatten(), (~gone).nonzero().flatten()
        if len(out) == 0:
            return torch.zeros((), dtype=torch.float64)
        weight = self._weight[out]
        across = self._inverse[rest[:, None], out]
        factor = torch.linalg.cholesky(self._inverse[out[:, None], out])
        solved = torch.cholesky_solve(weight, factor)
        half = torch.linalg.solve_triangular(factor, across.T, upper=False)
        self._inverse = self._inverse[rest[:, None], rest].addmm_(half.T, half, alpha=-1)
        self._weight = self._weight[rest] - across @ solved
        self._units = self._units[rest]
        return (weight * solved).sum()


def _group_columns(units: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Units with as many columns each, and their columns (units, columns of one)."""
    order = units.argsort(stable=True)
    order = order[units[order] != NONE]
    present, counts = torch.unique(units[order], return_counts=True)
    starts = counts.cumsum(0) - counts
    found = []
    for size in counts.unique().tolist():
        same = (counts == size).nonzero().flatten()
        found.append((present[same], order[starts[same, None] + torch.arange(size)]))
    return found


def _take_root(metric: Tensor) -> Tensor:
    """L (outputs, rank) with M = L L'. Directions that are noise beside the largest are left out."""
    values, vectors = torch.linalg.eigh(metric)
    used = values > torch.finfo(values.dtype).eps * len(values) * values[-1].clamp(min=0.0)
    root: Tensor = vectors[:, used] * values[used].sqrt()
    return root

"""Row products: the regression of `ridge` through the Gram matrix of the rows, for fewer rows than columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from critical_neurons.removal.refit.ridge import (
    ROUNDING,
    RegularFactor,
    as_number,
    choose_ridge,
    find_home,
    mean_square,
    require_finite,
    scale_ridge,
)

COLUMNS_AT_ONCE = 2048
"""Columns multiplied in double precision at once, to save memory."""


class RowProducts:
    """D = X' (X X' + ridge)⁻¹ E. All rows are stored."""

    def __init__(self) -> None:
        self._rows: dict[bool, list[Tensor]] = {True: [], False: []}
        self._errors: dict[bool, list[Tensor]] = {True: [], False: []}
        self._origin: Tensor | None = None

    def add(self, rows: Tensor, errors: Tensor, *, held_out: bool) -> None:
        if self._origin is None:
            self._origin = rows.mean(1, keepdim=True)
        self._rows[held_out].append(rows - self._origin)
        self._errors[held_out].append(errors.to(find_home(errors.device), torch.float64))

    def solve(self) -> tuple[Tensor, Tensor]:
        assert self._origin is not None
        rows = torch.cat(self._rows[False] + self._rows[True], 1)
        errors = torch.cat(self._errors[False] + self._errors[True], 1)
        products, columns = require_finite(_multiply_rows(rows, errors.device)), rows.shape[2]
        ridge, fitted = None, sum(part.shape[1] for part in self._rows[False])
        if 0 < fitted < rows.shape[1]:
            known = _RowSystem.centre(products[:, :fitted, :fitted], errors[:, :fitted], columns)
            crossed = _centre(products[:, fitted:, :fitted])
            held_out = _centre_rows(errors[:, fitted:])
            ridge = choose_ridge(lambda ridge: known.judge(ridge, crossed, held_out))
        added, shift = rows.new_zeros(len(rows), errors.shape[2], columns).mT, errors.mean(1)  # as weights are stored
        if ridge is not None:
            mean = self._origin.to(errors) + rows.mean(1, keepdim=True).to(errors)
            factors = _RowSystem.centre(products, errors, columns).solve(ridge)
            for part in _split_columns(columns):
                exact = rows[:, :, part].to(factors).mT @ factors
                added[:, part] = exact.to(added)
                shift -= (mean[:, :, part] @ exact)[:, 0]
        return added, shift


@dataclass(frozen=True)
class _RowSystem:
    """X X' and E of centred rows, the number of columns, and the rounding error of X X'."""

    products: Tensor
    errors: Tensor
    columns: int
    floor: Tensor

    @classmethod
    def centre(cls, products: Tensor, errors: Tensor, columns: int) -> _RowSystem:
        floor = scale_ridge(mean_square(products, columns), ROUNDING)
        return cls(_centre(products), _centre_rows(errors), columns, floor)

    def solve(self, ridge: float) -> Tensor:
        """A of D = X' A, with the same ridge as in the normal equations."""
        return self._factorise(ridge).solve(self.errors)

    def judge(self, ridge: float, crossed: Tensor, held_out: Tensor) -> tuple[float, float]:
        """The change of the squared error of other rows when their X D is subtracted, and its slope over the ridge,
        by dA = -(X X' + ridge)⁻¹ scale A. `crossed`: their products with these rows."""
        factor = self._factorise(ridge)
        found = factor.solve(self.errors)
        left, moved = held_out - crossed @ found, crossed @ factor.solve(self._scale[:, None, None] * found)
        return as_number((left.square() - held_out.square()).sum()), factor.check_slope((left * moved).sum())

    @property
    def _scale(self) -> Tensor:
        return mean_square(self.products, self.columns) + self.floor

    def _factorise(self, ridge: float) -> RegularFactor:
        return RegularFactor.find(self.products, scale_ridge(self._scale, ridge) + self.floor)


def _centre(products: Tensor) -> Tensor:
    """Centre a Gram matrix in both arguments."""
    return _centre_rows(products) - _centre_rows(products).mean(2, keepdim=True)


def _centre_rows(values: Tensor) -> Tensor:
    return values - values.mean(1, keepdim=True)


def _multiply_rows(rows: Tensor, device: torch.device) -> Tensor:
    count = rows.shape[1]
    products = torch.zeros(len(rows), count, count, dtype=torch.float64, device=device)
    for part in _split_columns(rows.shape[2]):
        exact = rows[:, :, part].to(products)
        products.baddbmm_(exact, exact.mT)
    return products


def _split_columns(count: int) -> list[slice]:
    return [slice(first, first + COLUMNS_AT_ONCE) for first in range(0, count, COLUMNS_AT_ONCE)]

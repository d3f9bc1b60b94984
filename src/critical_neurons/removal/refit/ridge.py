"""Ridge regression of errors on inputs, group by group: min ‖E - X D‖² + ridge ‖D‖², X and E without their means.

The ridge is chosen on rows that are held out, where D = 0 is as good a choice as any; then all rows are used. There
are two ways to the same D: through sums over the rows, x x' (columns x columns), for many rows; through the products
of any two rows (`row_products`), for many columns. Rows are multiplied in their own precision, sums are in double.

Where no error is there to choose a ridge by, as when columns are judged before any has gone, it is `RIDGE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from critical_neurons.errors import PruningError

RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Regularisation tried, relative to the mean square of the inputs, as long as it helps on what is held out."""

RIDGE = 1e-3
"""Where none can be chosen, relative to the mean square of the inputs."""

ROUNDING = 1e-7
"""What single precision may leave of squares where there is nothing, relative to their mean."""


class Regression(Protocol):
    def add(self, rows: Tensor, errors: Tensor, *, held_out: bool) -> None:
        """(groups, rows, columns) and (groups, rows, outputs), both finite or found out later."""

    def solve(self) -> tuple[Tensor, Tensor]:
        """D (groups, columns, outputs), and the constant (groups, outputs) that keeps the mean of the errors."""


def add_ridge(squares: Tensor) -> Tensor:
    """`RIDGE` on the diagonal of a covariance (columns, columns), in place. Gives the covariance."""
    squares.diagonal().add_((RIDGE * squares.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny))
    return squares


def require_finite(values: Tensor) -> Tensor:
    if not torch.isfinite(values).all():
        raise PruningError(
            "compensating: the calibration inputs lead to NaN or infinite weights. Are they scaled right?"
        )
    return values


def find_home(device: torch.device) -> torch.device:
    """Where sums in double precision are kept: the device itself, if it has double precision."""
    return torch.device("cpu") if device.type == "mps" else device


class NormalEquations:
    """Through sums over the rows. `stays` (groups, columns): D is zero for the other columns."""

    def __init__(
        self, groups: int, columns: int, outputs: int, device: torch.device, stays: Tensor | None = None
    ) -> None:
        home = find_home(device)
        self._stays = None if stays is None else stays.to(home)
        self._fitted, self._held_out = (_Moments.none(groups, columns, outputs, home) for _ in range(2))
        self._origin: Tensor | None = None

    def add(self, rows: Tensor, errors: Tensor, *, held_out: bool) -> None:
        if self._origin is None:  # near the mean: far from it single precision would lose what varies
            self._origin = rows.mean(1, keepdim=True)
        moments = self._held_out if held_out else self._fitted
        moments.add(rows - self._origin, errors)

    def solve(self) -> tuple[Tensor, Tensor]:
        assert self._origin is not None
        every = self._fitted.join(self._held_out)
        require_finite(every.squares)
        ridge = None
        if self._fitted.count and self._held_out.count:
            fitted, held_out = self._fitted.centre(self._stays), self._held_out.centre(self._stays)
            ridge = choose_ridge(lambda ridge: held_out.change(fitted.solve(ridge)))
        added = torch.zeros_like(every.products) if ridge is None else every.centre(self._stays).solve(ridge)
        mean = self._origin.to(added) + every.inputs[:, None] / every.count
        return added, every.errors / every.count - (mean @ added)[:, 0]

    def describe(self) -> tuple[Tensor, Tensor]:
        """The covariance (groups, columns, columns) of the rows, all columns, and that with the errors."""
        every = self._fitted.join(self._held_out)
        known = every.centre()
        return known.squares / every.count, known.products / every.count


def choose_ridge(change: Callable[[float], float]) -> float | None:
    """The one with which the squared error on what is held out falls most; None where it falls with none."""
    best, least = None, 0.0
    for ridge in RIDGES:
        found = change(ridge)
        if found < least:
            best, least = ridge, found
        elif best is not None:
            break
    return best


@dataclass
class _Moments:
    """Sums over rows: of inputs x (groups, columns), errors e (groups, outputs), x x' and x e'."""

    count: int
    inputs: Tensor
    errors: Tensor
    squares: Tensor
    products: Tensor

    @classmethod
    def none(cls, groups: int, columns: int, outputs: int, device: torch.device) -> _Moments:
        shapes = ((groups, columns), (groups, outputs), (groups, columns, columns), (groups, columns, outputs))
        return cls(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, rows: Tensor, errors: Tensor) -> None:
        home = self.inputs.device
        self.count += rows.shape[1]
        self.inputs += rows.sum(1).to(home)
        self.errors += errors.sum(1).to(home)
        self.squares += (rows.mT @ rows).to(home)
        self.products += (rows.mT @ errors).to(home)

    def join(self, other: _Moments) -> _Moments:
        return _Moments(
            self.count + other.count,
            self.inputs + other.inputs,
            self.errors + other.errors,
            self.squares + other.squares,
            self.products + other.products,
        )

    def centre(self, stays: Tensor | None = None) -> _System:
        """With the means of the rows taken away, and nothing left of columns that do not stay."""
        mean = self.inputs[:, :, None] / self.count
        floor = scale_ridge(mean_square(self.squares, self.squares.shape[1]), ROUNDING)
        squares = self.squares - mean @ self.inputs[:, None]
        squares.diagonal(dim1=1, dim2=2).add_(floor[:, None])
        products = self.products - mean @ self.errors[:, None]
        if stays is None:
            return _System(squares, products, torch.full_like(floor, squares.shape[1]))
        mask = stays[:, :, None].to(squares)
        return _System(squares * mask * mask.mT, products * mask, stays.sum(1).clamp(min=1).to(floor))


@dataclass(frozen=True)
class _System:
    """x x' and x e' of rows whose mean is zero, and how many columns there are in every group."""

    squares: Tensor
    products: Tensor
    columns: Tensor

    def solve(self, ridge: float) -> Tensor:
        """D of (x x' + ridge) D = x e'."""
        return solve_regular(self.squares, self.products, scale_ridge(mean_square(self.squares, self.columns), ridge))

    def change(self, added: Tensor) -> float:
        """By how much ‖e‖² changes when x D is taken from e."""
        return as_number((added * (self.squares @ added)).sum() - 2 * (added * self.products).sum())


def solve_regular(squares: Tensor, products: Tensor, ridge: Tensor) -> Tensor:
    """(squares + ridge)⁻¹ products. Zero for groups that rounding has made singular: they stay as they are."""
    regular = squares.clone()
    regular.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    factor, failed = torch.linalg.cholesky_ex(regular)
    if failed.any():
        singular = (failed != 0)[:, None, None]
        factor = torch.where(singular, torch.eye(squares.shape[1]).to(factor), factor)
        products = torch.where(singular, 0.0, products)
    return torch.cholesky_solve(products, factor)


def mean_square(squares: Tensor, columns: int | Tensor) -> Tensor:
    """Of all columns: (groups,)."""
    return squares.diagonal(dim1=1, dim2=2).sum(1) / columns


def scale_ridge(mean_square: Tensor, share: float) -> Tensor:
    """A ridge of this share, and never nothing."""
    return share * mean_square.clamp(min=torch.finfo(torch.float32).tiny)


def as_number(change: Tensor) -> float:
    value = float(change)
    return value if math.isfinite(value) else math.inf

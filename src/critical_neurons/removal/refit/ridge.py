"""Ridge regression of errors on inputs, group by group: min ‖E - X D‖² + ridge ‖D‖², X and E without their means.

The ridge is chosen on held-out rows, with D = 0 among the candidates; then all rows are used. D is computed from the
normal equations (columns x columns) or, with more columns than rows, from the Gram matrix of the rows
(`row_products`). Products are computed in the precision of the rows and summed in double precision.

`RIDGE` is used where there is no error yet to choose a ridge by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from critical_neurons.errors import PruningError

RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Ridges to try, relative to the mean square of the inputs."""

RIDGE = 1e-3
"""The ridge where none can be chosen, relative to the mean square of the inputs."""

BLOCK = 576
"""Columns of a block of a symmetric product."""

ROWS_AT_ONCE, NUMBERS_AT_ONCE = 4096, 2**24
"""Rows, or numbers in them, that are multiplied at once: adding up the products of a small batch in double precision
takes longer than computing them."""

MOST_JUDGED = 64
"""Outputs by which a ridge is chosen, evenly spaced over the channels if there are more."""

ROUNDING = 1e-7
"""Rounding error of single precision in a sum of squares that should be zero, relative to their mean."""


class Regression(Protocol):
    def add(self, rows: Tensor, errors: Tensor, *, held_out: bool) -> None:
        """Shapes (groups, rows, columns) and (groups, rows, outputs). `solve` raises if values are not finite."""

    def solve(self) -> tuple[Tensor, Tensor]:
        """D (groups, columns, outputs), and the constant (groups, outputs) that keeps the mean of the errors."""


def add_ridge(squares: Tensor) -> Tensor:
    """Add `RIDGE` to the diagonal of a covariance (columns, columns) in place, and return it."""
    squares.diagonal().add_((RIDGE * squares.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny))
    return squares


def require_finite(values: Tensor) -> Tensor:
    if not torch.isfinite(values).all():
        raise PruningError(
            "compensating: the calibration inputs lead to NaN or infinite weights. Are they scaled right?"
        )
    return values


def find_home(device: torch.device) -> torch.device:
    """The device for sums in double precision: the same one, if it supports that."""
    return torch.device("cpu") if device.type == "mps" else device


class NormalEquations:
    """Solves the normal equations. `stays` (groups, columns): D is zero for the other columns."""

    def __init__(
        self, groups: int, columns: int, outputs: int, device: torch.device, stays: Tensor | None = None
    ) -> None:
        home = find_home(device)
        self._stays = None if stays is None else _Columns.find(stays.to(home))
        self._fitted, self._held_out = (_Moments.none(groups, columns, outputs, home) for _ in range(2))
        self._waiting: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
        self._origin: Tensor | None = None

    def add(self, rows: Tensor, errors: Tensor, *, held_out: bool) -> None:
        if self._origin is None:  # centred, so that single precision keeps the variation
            self._origin = rows.mean(1, keepdim=True)
        waiting = self._waiting[held_out]
        waiting.append((rows - self._origin, errors))
        count = sum(each.shape[1] for each, _ in waiting)
        if count >= ROWS_AT_ONCE or count * rows.shape[0] * rows.shape[2] >= NUMBERS_AT_ONCE:
            self._sum_up(held_out=held_out)

    def _sum_up(self, *, held_out: bool) -> None:
        """Add the rows that wait to the sums."""
        if waiting := self._waiting[held_out]:
            rows, errors = (torch.cat(parts, 1) for parts in zip(*waiting, strict=True))
            (self._held_out if held_out else self._fitted).add(rows, errors)
            waiting.clear()

    def solve(self) -> tuple[Tensor, Tensor]:
        assert self._origin is not None
        for held_out in (True, False):
            self._sum_up(held_out=held_out)
        every = self._fitted.join(self._held_out)
        require_finite(every.squares)
        ridge = None
        if self._fitted.count and self._held_out.count:
            judged = slice(None, None, -(-every.products.shape[2] // MOST_JUDGED))
            fitted, judge = (each.centre(self._stays).take(judged) for each in (self._fitted, self._held_out))
            ridge = choose_ridge(lambda ridge: judge.change(fitted.solve(ridge)))
        added = torch.zeros_like(every.products)
        if ridge is not None:
            solved = every.centre(self._stays).solve(ridge)
            added = solved if self._stays is None else self._stays.put(solved, added)
        mean = self._origin.to(added) + every.inputs[:, None] / every.count
        return added, every.errors / every.count - (mean @ added)[:, 0]

    def describe(self) -> tuple[Tensor, Tensor]:
        """The covariance (groups, columns, columns) of all columns, and that with errors, after `solve`."""
        every = self._fitted.join(self._held_out)
        known = every.centre()
        return known.squares / every.count, known.products / every.count


def choose_ridge(change: Callable[[float], float]) -> float | None:
    """The ridge with a locally smallest held-out squared error; None if it reduces none.

    From the middle to smaller ridges as long as the error falls; if it does not, to larger ones.
    """
    middle = len(RIDGES) // 2
    best, least = middle, change(RIDGES[middle])
    for ways in (range(middle + 1, len(RIDGES)), range(middle - 1, -1, -1)):
        for place in ways:
            found = change(RIDGES[place])
            if not found < least:
                break
            best, least = place, found
        if best > middle:
            break
    return RIDGES[best] if least < 0 else None


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
        self.squares += multiply_columns(rows).to(home)
        self.products += (rows.mT @ errors).to(home)

    def join(self, other: _Moments) -> _Moments:
        return _Moments(
            self.count + other.count,
            self.inputs + other.inputs,
            self.errors + other.errors,
            self.squares + other.squares,
            self.products + other.products,
        )

    def centre(self, stays: _Columns | None = None) -> _NormalSystem:
        """Subtract the means, and take only the columns that stay."""
        known = self if stays is None else stays.take(self)
        mean = known.inputs[:, :, None] / self.count
        squares = known.squares - mean @ known.inputs[:, None]
        products = known.products - mean @ self.errors[:, None]
        counts = torch.full_like(mean[:, 0, 0], squares.shape[1]) if stays is None else stays.counts.to(mean)
        floor = scale_ridge(mean_square(known.squares, counts), ROUNDING)
        squares.diagonal(dim1=1, dim2=2).add_(floor[:, None])
        return _NormalSystem(squares, products, counts)


@dataclass(frozen=True)
class _Columns:
    """The columns that stay, group by group, and how many; groups with fewer are filled up with columns that do not,
    of which nothing is taken."""

    numbers: Tensor
    counts: Tensor
    filled: Tensor

    @classmethod
    def find(cls, stays: Tensor) -> _Columns:
        """From booleans (groups, columns)."""
        counts = stays.sum(1).clamp(min=1)
        numbers = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(counts.max())]
        return cls(numbers, counts, ~stays.take_along_dim(numbers, 1))

    def take(self, moments: _Moments) -> _Moments:
        down, across, gone = self.numbers[:, :, None], self.numbers[:, None], self.filled[:, :, None]
        squares = moments.squares.take_along_dim(down, 1).take_along_dim(across, 2)
        return _Moments(
            moments.count,
            moments.inputs.take_along_dim(self.numbers, 1).masked_fill_(self.filled, 0.0),
            moments.errors,
            squares.masked_fill_(gone, 0.0).masked_fill_(gone.mT, 0.0),
            moments.products.take_along_dim(down, 1).masked_fill_(gone, 0.0),
        )

    def put(self, values: Tensor, into: Tensor) -> Tensor:
        return into.scatter(1, self.numbers[:, :, None].expand_as(values), values)


@dataclass(frozen=True)
class _NormalSystem:
    """x x' and x e' of centred rows, and the number of columns per group."""

    squares: Tensor
    products: Tensor
    columns: Tensor

    def take(self, outputs: slice) -> _NormalSystem:
        return replace(self, products=self.products[:, :, outputs])

    def solve(self, ridge: float) -> Tensor:
        """D of (x x' + ridge) D = x e'."""
        return solve_regular(self.squares, self.products, scale_ridge(mean_square(self.squares, self.columns), ridge))

    def change(self, added: Tensor) -> float:
        """The change of ‖e‖² when x D is subtracted from e."""
        return as_number((added * (self.squares @ added)).sum() - 2 * (added * self.products).sum())


def solve_regular(squares: Tensor, products: Tensor, ridge: Tensor) -> Tensor:
    """(squares + ridge)⁻¹ products; zero for groups that are numerically singular, which then stay unchanged."""
    regular = squares.clone()
    regular.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    factor, failed = torch.linalg.cholesky_ex(regular)
    if failed.any():
        singular = (failed != 0)[:, None, None]
        factor = torch.where(singular, torch.eye(squares.shape[1]).to(factor), factor)
        products = torch.where(singular, 0.0, products)
    return torch.cholesky_solve(products, factor)


def multiply_columns(rows: Tensor) -> Tensor:
    """rows' rows: (..., rows, columns) to (..., columns, columns). Blocks below the diagonal are copied."""
    columns = rows.shape[-1]
    if columns <= BLOCK:
        return rows.mT @ rows
    product = rows.new_empty(*rows.shape[:-2], columns, columns)
    for first in range(0, columns, BLOCK):
        last = first + BLOCK
        product[..., first:last, first:] = rows[..., first:last].mT @ rows[..., first:]
        product[..., last:, first:last] = product[..., first:last, last:].mT
    return product


def mean_square(squares: Tensor, columns: int | Tensor) -> Tensor:
    """Averaged over columns: (groups,)."""
    return squares.diagonal(dim1=1, dim2=2).sum(1) / columns


def scale_ridge(mean_square: Tensor, share: float) -> Tensor:
    """A ridge of this share, always positive."""
    return share * mean_square.clamp(min=torch.finfo(torch.float32).tiny)


def as_number(change: Tensor) -> float:
    value = float(change)
    return value if math.isfinite(value) else math.inf

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
from critical_neurons.removal.refit.symmetric import factorise_cholesky, mirror, multiply_lower, solve_cholesky

RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Ridges to try, relative to the mean square of the inputs."""

RIDGE = 1e-3
"""The ridge where none can be chosen, relative to the mean square of the inputs."""

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
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():  # the sum takes no memory
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
        self._sums = {held_out: _Moments.none(groups, columns, outputs, home) for held_out in (True, False)}
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
            rows, errors = (torch.cat(each, 1) if len(each) > 1 else each[0] for each in zip(*waiting, strict=True))
            self._sums[held_out].add(rows, errors)
            waiting.clear()

    def solve(self) -> tuple[Tensor, Tensor]:
        assert self._origin is not None
        for held_out in (True, False):
            self._sum_up(held_out=held_out)
            require_finite(mirror(self._sums[held_out].squares))
        ridge = self._choose_ridge() if all(each.count for each in self._sums.values()) else None
        every = self._sums[False].join(self._sums.pop(True))
        added = torch.zeros_like(every.products)
        if ridge is not None:
            solved = every.centre(self._stays).solve(ridge)
            added = solved if self._stays is None else self._stays.put(solved, added)
        mean = self._origin.to(added) + every.inputs[:, None] / every.count
        return added, every.errors / every.count - (mean @ added)[:, 0]

    def _choose_ridge(self) -> float | None:
        judged = slice(None, None, -(-self._sums[False].products.shape[2] // MOST_JUDGED))
        fitted, judge = (self._sums[held_out].centre(self._stays).take(judged) for held_out in (False, True))
        return choose_ridge(lambda ridge: judge.judge(fitted, ridge))

    def describe(self) -> tuple[Tensor, Tensor]:
        """The covariance (groups, columns, columns) of all columns, and that with errors, after `solve`."""
        every = self._sums[False]
        known = every.centre()
        return known.squares.div_(every.count), known.products.div_(every.count)


def choose_ridge(judge: Callable[[float], tuple[float, float]]) -> float | None:
    """The ridge with a locally smallest held-out squared error; None if it reduces none.

    `judge` gives the change of the error, and its slope over the ridge. From the middle the slope says whether to try
    larger or smaller ridges, as long as the error falls.
    """
    place = len(RIDGES) // 2
    least, slope = judge(RIDGES[place])
    best, step = place, 1 if slope > 0 else -1
    while slope * step > 0 and 0 <= place + step < len(RIDGES):
        place += step
        found, slope = judge(RIDGES[place])
        if not found < least:
            break
        best, least = place, found
    return RIDGES[best] if least < 0 else None


@dataclass
class _Moments:
    """Sums over rows: of inputs x (groups, columns), errors e (groups, outputs), x x' and x e'. Of x x' the upper
    triangle has to be filled before use."""

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
        self.squares += multiply_lower(rows).to(home)
        self.products += (rows.mT @ errors).to(home)

    def join(self, other: _Moments) -> _Moments:
        """Add sums over other rows in place, and return these."""
        self.count += other.count
        for own, added in (
            *((self.inputs, other.inputs), (self.errors, other.errors)),
            *((self.squares, other.squares), (self.products, other.products)),
        ):
            own += added
        return self

    def centre(self, stays: _Columns | None = None) -> _NormalSystem:
        """Subtract the means, and take only the columns that stay."""
        known = self if stays is None else stays.take(self)
        mean = known.inputs[:, :, None] / self.count
        squares = torch.baddbmm(known.squares, mean, known.inputs[:, None], alpha=-1)
        products = torch.baddbmm(known.products, mean, self.errors[:, None], alpha=-1)
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
        return self._factorise(ridge).solve(self.products)

    def judge(self, fitted: _NormalSystem, ridge: float) -> tuple[float, float]:
        """The change of ‖e‖² when x D is subtracted from e, D fitted to other rows, and its slope over the ridge, by
        dD = -(x x' + ridge)⁻¹ scale D."""
        factor = fitted._factorise(ridge)
        added = factor.solve(fitted.products)
        moved = factor.solve(fitted._scale[:, None, None] * added)
        left = self.squares @ added - self.products
        return as_number((added * (left - self.products)).sum()), factor.check_slope(-(left * moved).sum())

    @property
    def _scale(self) -> Tensor:
        return mean_square(self.squares, self.columns)

    def _factorise(self, ridge: float) -> RegularFactor:
        return RegularFactor.find(self.squares, scale_ridge(self._scale, ridge))


@dataclass(frozen=True)
class RegularFactor:
    """The Cholesky factor of squares + ridge, and which groups are numerically singular."""

    factor: Tensor
    failed: Tensor

    @classmethod
    def find(cls, squares: Tensor, ridge: Tensor) -> RegularFactor:
        regular = squares.clone()
        regular.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        return cls(*factorise_cholesky(regular, overwrite=True))

    def solve(self, products: Tensor) -> Tensor:
        """(squares + ridge)⁻¹ products; zero for singular groups, which then stay unchanged."""
        if not self.failed.any():
            return solve_cholesky(self.factor, products)
        singular = self.failed[:, None, None]
        factor = torch.where(singular, torch.eye(self.factor.shape[1]).to(self.factor), self.factor)
        return solve_cholesky(factor, torch.where(singular, 0.0, products))

    def check_slope(self, slope: Tensor) -> float:
        """Singular groups need a larger ridge."""
        return -math.inf if self.failed.any() else float(slope)


def mean_square(squares: Tensor, columns: int | Tensor) -> Tensor:
    """Averaged over columns: (groups,)."""
    return squares.diagonal(dim1=1, dim2=2).sum(1) / columns


def scale_ridge(mean_square: Tensor, share: float) -> Tensor:
    """A ridge of this share, always positive."""
    return share * mean_square.clamp(min=torch.finfo(torch.float32).tiny)


def as_number(change: Tensor) -> float:
    value = float(change)
    return value if math.isfinite(value) else math.inf

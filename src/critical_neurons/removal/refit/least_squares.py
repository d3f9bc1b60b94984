"""One module brought back to what the original computes in its place.

A linear layer or convolution by the bias that keeps the mean of its outputs, or by the weights that keep the outputs
themselves in the least-squares sense; a batch norm by statistics that move as its inputs have moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, fx, nn

from critical_neurons.errors import PruningError
from critical_neurons.removal.refit.im2col import Convolution, by_group, unroll

Refit: TypeAlias = Literal["bias", "least_squares"]
BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d

ROWS_PER_COLUMN, LEAST_ROWS = 20, 100_000
"""Positions of a convolution beyond so many for every weight of a unit, and beyond so many in all, are left out."""

RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Regularisation tried, relative to the mean square of the inputs, as long as it helps on what is held out."""

ROUNDING = 1e-7
"""What single precision may leave of squares where there is nothing, relative to their mean."""

MOST_COLUMNS = 8192
"""Weights of a unit beyond which a module gets its bias alone: the matrix of their products takes 0.5 GB and more."""

REFITTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d)


class Refitting(Protocol):
    """Gathers what is needed to refit one module, batch by batch."""

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, held_out: bool) -> None:
        """What the original module reads and gives, and what the one to refit reads."""

    def finish(self) -> None:
        """Refit the module."""


def begin_refit(traced: fx.GraphModule, node: fx.Node, kept: Tensor, method: Refit, input_count: int) -> Refitting:
    module = traced.get_submodule(str(node.target))
    match module:
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return _Statistics(module, kept)
        case nn.Linear() | nn.Conv1d() | nn.Conv2d():
            absorbed = module.bias is None and all(_is_batch_norm(traced, user) for user in node.users)
            if method == "bias" or not can_refit(module):
                return _Offset(module, kept, absorbed=absorbed)
            return _Weights(module, kept, input_count, absorbed=absorbed)
        case _:
            raise TypeError(f"{type(module).__name__} cannot be refitted")


def can_refit(module: nn.Module) -> bool:
    """Whether least squares change the weights of the module, and not just its bias or nothing."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and module.weight[0].numel() <= MOST_COLUMNS


def _is_batch_norm(traced: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(traced.get_submodule(str(node.target)), BatchNorm)


class _Statistics:
    """The mean and variance with which every channel of the output keeps the mean and variance it had.

    So what the original's own statistics were measured on stays in them, and a few inputs do no harm.
    """

    def __init__(self, module: BatchNorm, kept: Tensor) -> None:
        self._module, self._kept = module, kept
        self._before, self._after = _Spread(), _Spread()

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, held_out: bool) -> None:
        self._before.add(read.index_select(1, self._kept))
        self._after.add(found)

    def finish(self) -> None:
        mean, variance = self._module.running_mean, self._module.running_var
        assert mean is not None
        assert variance is not None
        before, after, epsilon = self._before, self._after, self._module.eps
        growth = torch.where(before.variance > 0, after.variance / before.variance, 1.0)
        new_variance = ((variance + epsilon) * growth - epsilon).clamp(min=0.0)
        scale = ((new_variance + epsilon) / (variance + epsilon)).sqrt()
        self._module.running_mean = _finite(after.mean - scale * (before.mean - mean)).to(mean)
        self._module.running_var = _finite(new_variance).to(variance)


class _Spread:
    """Mean and variance of every channel."""

    def __init__(self) -> None:
        self._count, self.mean, self.variance = 0, torch.zeros(()), torch.zeros(())

    def add(self, values: Tensor) -> None:
        variance, mean = torch.var_mean(values, dim=[0, *range(2, values.ndim)], correction=0)
        count = values.numel() // values.shape[1]
        share = count / (self._count + count)
        moved = mean.double() - self.mean
        self.variance = (1 - share) * self.variance + share * variance + share * (1 - share) * moved.square()
        self.mean = self.mean + share * moved
        self._count += count


class _Offset:
    """The bias that keeps the mean of every output channel."""

    def __init__(self, module: nn.Linear | Convolution, kept: Tensor, *, absorbed: bool) -> None:
        self._module, self._kept, self._absorbed = module, kept, absorbed
        self._errors = _Spread()

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, held_out: bool) -> None:
        self._errors.add(given.index_select(1, self._kept) - self._module(found))

    def finish(self) -> None:
        if not self._absorbed:
            _shift_bias(self._module, self._errors.mean)


class _Weights:
    """The weights and bias whose outputs are nearest to those of the original.

    Regularised towards the weights the module has: min ‖E - X D‖² + ridge ‖D‖², E what the outputs miss, X the
    inputs, both without their means, D what is added to the weights.
    """

    def __init__(self, module: nn.Linear | Convolution, kept: Tensor, input_count: int, *, absorbed: bool) -> None:
        self._module, self._kept, self._absorbed = module, kept, absorbed
        groups = 1 if isinstance(module, nn.Linear) else module.groups
        outputs, columns = module.weight.shape[0] // groups, module.weight[0].numel()
        self._rows_per_input = -(-max(ROWS_PER_COLUMN * columns, LEAST_ROWS) // input_count)
        self._fitted, self._held_out = (_Moments.none(groups, columns, outputs) for _ in range(2))
        self._origin: Tensor | None = None
        self._generator = torch.Generator().manual_seed(0)

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, held_out: bool) -> None:
        module, groups = self._module, len(self._fitted.inputs)
        outputs = given.index_select(1, self._kept).flatten(2) if given.ndim > 2 else given[:, self._kept, None]
        positions = self._choose(outputs.shape[2])
        rows = by_group(unroll(module, found, positions), groups)
        wanted = by_group(outputs[:, :, None, positions], groups)
        weight = module.weight.reshape(groups, -1, rows.shape[2])
        bias = 0.0 if module.bias is None else module.bias.reshape(groups, 1, -1)
        missing = wanted - (rows @ weight.transpose(1, 2) + bias)
        if self._origin is None:  # near the mean: far from it single precision would lose what varies
            self._origin = rows.mean(1, keepdim=True)
        moments = self._held_out if held_out else self._fitted
        moments.add(rows - self._origin, missing)

    def _choose(self, count: int) -> Tensor:
        """Positions at random, where there are more than needed."""
        if count <= self._rows_per_input:
            return torch.arange(count)
        return torch.randperm(count, generator=self._generator)[: self._rows_per_input]

    def finish(self) -> None:
        moments = self._fitted.join(self._held_out)
        _finite(moments.squares)
        ridge = self._choose_ridge()
        solved = None if ridge is None else moments.centre().solve(ridge)
        added = torch.zeros_like(moments.products) if solved is None else solved
        assert self._origin is not None
        mean = self._origin.double() + moments.inputs[:, None] / moments.count
        weight = self._module.weight
        new = weight.double() + added.transpose(1, 2).reshape(weight.shape)
        shift = moments.errors / moments.count - (mean @ added)[:, 0]
        weight.data = _finite(new).to(weight)
        if not self._absorbed:
            _shift_bias(self._module, shift.flatten())

    def _choose_ridge(self) -> float | None:
        """The one that misses least of what is held out; None where it is best to leave the weights as they are."""
        fitted, held_out = self._fitted.centre(), self._held_out.centre()
        best, least = None, 0.0
        for ridge in RIDGES:
            added = fitted.solve(ridge)
            change = math.inf if added is None else held_out.change(added)
            if change < least:
                best, least = ridge, change
            elif best is not None:
                break
        return best


@dataclass
class _Moments:
    """Sums over rows, group by group of a convolution: of inputs x (columns), errors e (outputs), x x' and x e'."""

    count: int
    inputs: Tensor
    errors: Tensor
    squares: Tensor
    products: Tensor

    @classmethod
    def none(cls, groups: int, columns: int, outputs: int) -> _Moments:
        shapes = ((groups, columns), (groups, outputs), (groups, columns, columns), (groups, columns, outputs))
        return cls(0, *(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, rows: Tensor, errors: Tensor) -> None:
        """(groups, rows, columns) and (groups, rows, outputs)."""
        self.count += rows.shape[1]
        self.inputs += rows.sum(1)
        self.errors += errors.sum(1)
        self.squares += rows.transpose(1, 2) @ rows
        self.products += rows.transpose(1, 2) @ errors

    def join(self, other: _Moments) -> _Moments:
        return _Moments(
            self.count + other.count,
            self.inputs + other.inputs,
            self.errors + other.errors,
            self.squares + other.squares,
            self.products + other.products,
        )

    def centre(self) -> _System:
        """With the means of the rows taken away."""
        mean = self.inputs[:, :, None] / self.count
        return _System(
            self.squares - mean @ self.inputs[:, None] + _ridge(self.squares, ROUNDING),
            self.products - mean @ self.errors[:, None],
        )


@dataclass(frozen=True)
class _System:
    """x x' and x e' of rows whose mean is zero."""

    squares: Tensor
    products: Tensor

    def solve(self, ridge: float) -> Tensor | None:
        """D of (x x' + ridge) D = x e'; None where rounding has made it singular."""
        factor, failed = torch.linalg.cholesky_ex(self.squares + _ridge(self.squares, ridge))
        return None if failed.any() else torch.cholesky_solve(self.products, factor)

    def change(self, added: Tensor) -> float:
        """By how much ‖e‖² changes when x D is taken from e."""
        return float((added * (self.squares @ added)).sum() - 2 * (added * self.products).sum())


def _ridge(squares: Tensor, share: float) -> Tensor:
    """A diagonal of this share of the mean of the diagonal, and never nothing."""
    mean = squares.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
    return share * mean[:, None, None] * torch.eye(squares.shape[1], dtype=squares.dtype)


def _shift_bias(module: nn.Linear | Convolution, shift: Tensor) -> None:
    """Add to the bias. A module without one is given one."""
    weight = module.weight
    old = torch.zeros(len(weight)) if module.bias is None else module.bias.detach()
    new = _finite(old.double() + shift).to(weight.dtype)
    module.bias = nn.Parameter(new, requires_grad=weight.requires_grad)


def _finite(values: Tensor) -> Tensor:
    if not torch.isfinite(values).all():
        raise PruningError(
            "compensating: the calibration inputs lead to NaN or infinite weights. Are they scaled right?"
        )
    return values

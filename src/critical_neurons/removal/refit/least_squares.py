"""Least squares: refit one module to the outputs of the original module.

A linear layer or convolution gets the bias that keeps the mean of its outputs, or the weights and bias whose outputs
are nearest in the least-squares sense; the statistics of a batch norm are adjusted to its changed inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from critical_neurons.removal.refit.im2col import (
    Transposed,
    Weighted,
    add_batch_axis,
    by_group,
    channels_first,
    from_matrix,
    to_matrix,
    unroll,
)
from critical_neurons.removal.refit.ridge import (
    NormalEquations,
    Regression,
    find_home,
    require_finite,
)
from critical_neurons.removal.refit.row_products import RowProducts

Refit: TypeAlias = Literal["bias", "least_squares"]
BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

REFITTED: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)


@dataclass(frozen=True)
class RowLimit:
    """Rows of a regression: at most this many per column, or this many in all; other rows are left out."""

    per_column: int
    least: int

    def count(self, columns: int) -> int:
        return max(self.per_column * columns, self.least)


ROW_LIMIT = RowLimit(10, 20_000)

MOST_COLUMNS = 4608
"""With more columns the Gram matrix of rows is used instead of that of columns, which would take more than 1 GB. 4608
columns are 512 channels of a 3x3 convolution."""

MOST_ROWS, MOST_NUMBERS = 4096, 2**27
"""Limits on the rows, and on the numbers in them, in that case."""


class Refitting(Protocol):
    """Collects statistics batch by batch, then refits one module."""

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, input_count: int, held_out: bool) -> None:
        """Add a batch: input (`read`) and output (`given`) of the original module, input of the new one (`found`)."""

    def finish(self) -> None:
        """Refit the module."""


OnCovariances: TypeAlias = Callable[[Tensor, Tensor], None]
"""Called with the covariance of a module's im2col columns, and their covariance with the errors of its outputs."""


def begin_refit(
    module: nn.Module,
    kept: Tensor,
    method: Refit,
    input_count: int,
    *,
    absorbed: bool,
    reads: Tensor | None = None,
    on_covariances: OnCovariances | None = None,
    limit: RowLimit | None = None,
) -> Refitting:
    """`kept`: the original's output channels that the module still has; `input_count`: how many inputs will be added
    in all; `absorbed`: a refitted batch norm follows, so no bias is needed; `reads`: the input channels that may have
    weights, of a module in full size."""
    if isinstance(module, BatchNorm):
        return _Statistics(module, kept)
    assert isinstance(module, Weighted)
    if method == "bias":
        return _Offset(module, kept, absorbed=absorbed)
    return _Weights(
        module,
        kept,
        input_count,
        absorbed=absorbed,
        reads=reads,
        on_covariances=on_covariances,
        limit=limit or ROW_LIMIT,
    )


def is_refittable(module: nn.Module) -> bool:
    """Whether the module is of a known kind with torch's own forward, and has its own parameters and statistics."""
    if not any(isinstance(module, kind) and type(module).forward is kind.forward for kind in REFITTED):
        return False
    if isinstance(module, BatchNorm):
        return module.running_mean is not None and module.running_var is not None
    return "weight" in dict(module.named_parameters(recurse=False))  # a parametrised weight is not a parameter


class _Statistics:
    """Batch norm statistics with which every output channel keeps its mean and variance.

    The stored statistics are adjusted, not replaced, so that few calibration inputs do no harm.
    """

    def __init__(self, module: BatchNorm, kept: Tensor) -> None:
        assert module.running_mean is not None
        assert module.running_var is not None
        self._module, self._kept = module, kept
        self._mean, self._variance = module.running_mean, module.running_var
        self._before, self._after = _ChannelMoments(), _ChannelMoments()

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, input_count: int, held_out: bool) -> None:
        self._before.add(_select(channels_first(self._module, read), self._kept))
        self._after.add(channels_first(self._module, found))

    def finish(self) -> None:
        before, after, epsilon = self._before, self._after, self._module.eps
        home = before.mean.device
        mean, variance = (values.to(home, torch.float64) for values in (self._mean, self._variance))
        growth = torch.where(before.variance > 0, after.variance / before.variance, 1.0)
        new_variance = (variance + epsilon) * growth - epsilon
        new_variance = new_variance.clamp(0.0, torch.finfo(self._variance.dtype).max)
        scale = ((new_variance + epsilon) / (variance + epsilon)).sqrt()
        self._module.running_mean = require_finite((after.mean - scale * (before.mean - mean)).to(self._mean))
        self._module.running_var = require_finite(new_variance.to(self._variance))


class _ChannelMoments:
    """Mean and variance of every channel, in double precision."""

    def __init__(self) -> None:
        self._count, self.mean, self.variance = 0, torch.zeros(()), torch.zeros(())

    def add(self, values: Tensor) -> None:
        """(batch, channels, positions)"""
        values, home = _widen(values), find_home(values.device)
        means = values.mean(2, keepdim=True)  # torch's var_mean over both axes takes five times as long
        inside = (values - means).square_().mean(2).to(home, torch.float64).mean(0)
        between, mean = torch.var_mean(means[:, :, 0].to(home, torch.float64), dim=0, correction=0)
        variance, count = inside + between, values.numel() // values.shape[1]
        share = count / (self._count + count)
        moved = mean - self.mean
        self.variance = (1 - share) * self.variance + share * variance + share * (1 - share) * moved.square()
        self.mean = self.mean + share * moved
        self._count += count


class _Offset:
    """The bias that keeps the mean of every output channel."""

    def __init__(self, module: Weighted, kept: Tensor, *, absorbed: bool) -> None:
        self._module, self._kept, self._absorbed = module, kept, absorbed
        self._errors = _ChannelMoments()

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, input_count: int, held_out: bool) -> None:
        module, weight = self._module, self._module.weight
        found = found.to(weight.dtype)
        if isinstance(module, Transposed):  # the call may have asked for another output size
            outputs = module.forward(found, list(given.shape[-len(module.kernel_size) :]))
        else:
            outputs = module.forward(found)
        wanted = _select(channels_first(module, given), self._kept)
        self._errors.add(_widen(wanted) - _widen(channels_first(module, outputs)))

    def finish(self) -> None:
        if not self._absorbed:
            _shift_bias(self._module, self._errors.mean)


class _Weights:
    """The weights and bias whose outputs are nearest to those of the original, regularised towards the present
    weights. In the terms of `ridge`, E is the error of the outputs and D the change of the weights.
    """

    def __init__(
        self,
        module: Weighted,
        kept: Tensor,
        input_count: int,
        *,
        absorbed: bool,
        reads: Tensor | None,
        on_covariances: OnCovariances | None,
        limit: RowLimit,
    ) -> None:
        self._module, self._kept, self._absorbed, self._on_covariances = module, kept, absorbed, on_covariances
        self._matrix = _widen(to_matrix(module, module.weight.detach()))
        groups, columns, _ = self._matrix.shape
        self._stays = None
        if reads is not None:
            self._stays = reads.reshape(groups, -1).repeat_interleave(columns * groups // len(reads), 1)
            self._matrix = self._matrix * self._stays[:, :, None].to(self._matrix)
        fitted = columns if self._stays is None else int(self._stays.sum(1).max())
        self._input_count, self._row_count = input_count, limit.count(fitted)
        if columns > MOST_COLUMNS:
            self._row_count = min(MOST_ROWS, MOST_NUMBERS // (groups * columns))
        self._generator = torch.Generator().manual_seed(0)
        self._regression: Regression | None = None

    def add(self, read: Tensor, given: Tensor, found: Tensor, *, input_count: int, held_out: bool) -> None:
        module, (groups, columns, outputs) = self._module, self._matrix.shape
        given, found = add_batch_axis(module, given), add_batch_axis(module, found)
        limit = -(-self._row_count * input_count // self._input_count)
        if len(given) > limit:
            chosen = self._choose(len(given), limit).to(given.device)
            given, found = given[chosen], found[chosen]
        wanted = channels_first(module, given)
        positions = self._choose(wanted.shape[2], -(-limit // len(wanted))).to(given.device)
        sizes = given.shape[2:] if isinstance(module, Transposed) else None
        rows = by_group(_widen(unroll(module, found, positions, sizes)), groups)
        wanted = by_group(_widen(_select(wanted[:, :, positions], self._kept)[:, :, None]), groups)
        missing = wanted - (rows @ self._matrix + _widen(_find_bias(module)).reshape(groups, 1, -1))
        if self._regression is None:
            few = rows.shape[1] * self._input_count < columns * input_count and self._stays is None
            self._regression = (
                RowProducts()
                if few or columns > MOST_COLUMNS
                else NormalEquations(groups, columns, outputs, rows.device, self._stays)
            )
        if self._stays is not None and isinstance(self._regression, RowProducts):
            rows = rows * self._stays[:, None].to(rows)
        self._regression.add(rows, missing, held_out=held_out)

    def _choose(self, count: int, limit: int) -> Tensor:
        """A random sample of indices if there are more than the limit."""
        if count <= limit:
            return torch.arange(count)
        return torch.randperm(count, generator=self._generator)[:limit]

    def finish(self) -> None:
        assert self._regression is not None
        added, shift = self._regression.solve()
        if self._on_covariances is not None and isinstance(self._regression, NormalEquations):
            self._on_covariances(*self._regression.describe())
        weight = self._module.weight
        added += self._matrix.to(added.device)
        new = torch.empty_like(weight.data)  # in the same memory format, or sums round otherwise
        weight.data = require_finite(new.copy_(from_matrix(self._module, added)))
        if not self._absorbed:
            _shift_bias(self._module, shift.flatten())


def _select(values: Tensor, channels: Tensor) -> Tensor:
    return values.index_select(1, channels.to(values.device))


def _widen(values: Tensor) -> Tensor:
    """At least single precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _find_bias(module: Weighted) -> Tensor:
    """The bias, zeros if there is none."""
    if module.bias is not None:
        return module.bias.detach()
    groups, _, outputs = to_matrix(module, module.weight).shape
    return module.weight.new_zeros(groups * outputs)


def _shift_bias(module: Weighted, shift: Tensor) -> None:
    """Add to the bias, which is created if needed."""
    old = _find_bias(module)
    new = require_finite((old.to(shift) + shift).to(old))
    module.bias = nn.Parameter(new, requires_grad=module.weight.requires_grad)

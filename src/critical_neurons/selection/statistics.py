"""Statistics: covariances of what modules read, and Fisher matrices of what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.refit.im2col import Weighted, by_group, channels_first, to_matrix, unroll
from critical_neurons.removal.rows import Inputs, call_model, count_rows, take_rows
from critical_neurons.selection.distance import Distance, list_outputs

BATCH_SIZE = 64
ROWS_PER_COLUMN, LEAST_ROWS = 10, 20_000
"""Positions beyond so many for every column, and beyond so many in all, are left out."""

RIDGE = 1e-3
"""Added to the covariance, relative to its mean diagonal."""

DRAWS = 4
"""Classes drawn from the outputs for every input; each gives a gradient."""


@dataclass(frozen=True)
class Moments:
    """Mean (groups, columns) and covariance (groups, columns, columns) of what a module multiplies with its weights,
    group by group of a convolution; in single precision."""

    mean: Tensor
    covariance: Tensor

    def regularise(self, group: int) -> Tensor:
        """The covariance of a group with a ridge, in double precision."""
        squares = self.covariance[group].double()
        add_ridge(squares)
        return squares


def add_ridge(squares: Tensor) -> Tensor:
    """To the diagonal of a covariance, in place. Gives what was added."""
    ridge = (RIDGE * squares.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
    squares.diagonal().add_(ridge)
    return ridge


@torch.no_grad()
def gather_moments(
    model: nn.Module, modules: Sequence[str], inputs: Inputs, progress: Callable[[int, int], None]
) -> tuple[dict[str, Moments], list[Tensor]]:
    """What the modules read when the model runs on the inputs, and what the model gives."""
    sums = {name: _Sums(model.get_submodule(name), count_rows(inputs)) for name in modules}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, output: sums[name].add(args[0], output)

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in modules]
    try:
        batches, outputs = torch.split(torch.arange(count_rows(inputs)), BATCH_SIZE), []
        for done, rows in enumerate(batches):
            progress(done, len(batches))
            outputs.append(list_outputs(call_model(model, take_rows(inputs, rows))))
        progress(len(batches), len(batches))
    finally:
        for handle in handles:
            handle.remove()
    moments = {name: each.finish() for name, each in sums.items()}
    given = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    if not all(torch.isfinite(each).all() for each in (*given, *(found.covariance for found in moments.values()))):
        raise InvalidInputError(
            "inputs: the model gives NaN or infinite values for them, or such as single precision cannot square. Are "
            "they scaled right?"
        )
    return moments, given


class _Sums:
    def __init__(self, module: nn.Module, input_count: int) -> None:
        assert isinstance(module, Weighted)
        self._module = module
        self._groups, columns, _ = to_matrix(module, module.weight).shape
        self._rows_per_input = -(-max(ROWS_PER_COLUMN * columns, LEAST_ROWS) // input_count)
        self._generator = torch.Generator().manual_seed(0)
        self._origin: Tensor | None = None
        self._count = 0
        self._firsts = torch.zeros(self._groups, columns, dtype=torch.float32)
        self._squares = torch.zeros(self._groups, columns, columns, dtype=torch.float32)

    def add(self, read: Tensor, given: Tensor) -> None:
        count = channels_first(self._module, given).shape[2]
        positions = torch.randperm(count, generator=self._generator)[: self._rows_per_input]
        rows = by_group(unroll(self._module, read, positions, given.shape[2:]), self._groups).float()
        if self._origin is None:  # near the mean: far from it single precision would lose what varies
            self._origin = rows.mean(1, keepdim=True)
        rows = rows - self._origin
        self._count += rows.shape[1]
        self._firsts += rows.sum(1)
        self._squares.baddbmm_(rows.transpose(1, 2), rows)

    def finish(self) -> Moments:
        assert self._origin is not None
        mean = self._firsts / self._count
        covariance = self._squares.div_(self._count)
        covariance.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)
        return Moments(self._origin[:, 0] + mean, covariance)


def gather_metrics(
    model: nn.Module, modules: Sequence[str], inputs: Inputs, distance: Distance, *, temperature: float, seed: int
) -> dict[str, Tensor]:
    """The Fisher matrix of what each module gives: (outputs, outputs), summed over positions.

    Twice the distance from the outputs as they are, to second order. Above a `temperature` of 1 class probabilities
    are taken for less certain than they are: a trained network is certain of most of its inputs, and errors of those
    would count for nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    metrics: dict[str, Tensor] = {}
    count = count_rows(inputs)
    for rows in torch.split(torch.arange(count), BATCH_SIZE):
        with torch.enable_grad(), _hold_outputs(model, modules) as held:
            outputs = list_outputs(call_model(model, take_rows(inputs, rows)))
            for loss in distance.probe(outputs, temperature, DRAWS, generator):
                slopes = torch.autograd.grad(loss, list(held.values()), retain_graph=True)
                for name, slope in zip(held, slopes, strict=True):
                    errors = channels_first(model.get_submodule(name), slope).movedim(1, -1).flatten(0, -2)
                    metrics[name] = metrics.get(name, 0.0) + (errors.T @ errors).double() / (DRAWS * count)
    return metrics


@contextmanager
def _hold_outputs(model: nn.Module, modules: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
    """What the modules give while the model runs. What comes before the first of them takes no part in gradients."""
    held: dict[str, Tensor] = {}

    def hold(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            held[name] = output if output.requires_grad else output.detach().requires_grad_()
            return held[name].clone()  # what works in place behind it must not reach it

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hold(name)) for name in modules]
    try:
        yield held
    finally:
        for handle in handles:
            handle.remove()

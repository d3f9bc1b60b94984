"""What modules read, and how the loss feels errors of what they give: second moments over inputs and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.refit.im2col import by_group, unroll

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
    model: nn.Module, modules: Sequence[str], inputs: Tensor, progress: Callable[[int, int], None]
) -> tuple[dict[str, Moments], Tensor]:
    """What the modules read when the model runs on the inputs, and what the model gives."""
    sums = {name: _Sums(model.get_submodule(name), len(inputs)) for name in modules}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, output: sums[name].add(args[0], output)

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in modules]
    try:
        batches, outputs = torch.split(inputs, BATCH_SIZE), []
        for done, batch in enumerate(batches):
            progress(done, len(batches))
            outputs.append(model(batch))
        progress(len(batches), len(batches))
    finally:
        for handle in handles:
            handle.remove()
    moments, given = {name: each.finish() for name, each in sums.items()}, torch.cat(outputs)
    if not all(torch.isfinite(each).all() for each in (given, *(found.covariance for found in moments.values()))):
        raise InvalidInputError(
            "inputs: the model gives NaN or infinite values for them, or such as single precision cannot square. Are "
            "they scaled right?"
        )
    return moments, given


class _Sums:
    def __init__(self, module: nn.Module, input_count: int) -> None:
        assert isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
        self._module = module
        self._groups = 1 if isinstance(module, nn.Linear) else module.groups
        columns = module.weight[0].numel()
        self._rows_per_input = -(-max(ROWS_PER_COLUMN * columns, LEAST_ROWS) // input_count)
        self._generator = torch.Generator().manual_seed(0)
        self._origin: Tensor | None = None
        self._count = 0
        self._firsts = torch.zeros(self._groups, columns, dtype=torch.float32)
        self._squares = torch.zeros(self._groups, columns, columns, dtype=torch.float32)

    def add(self, read: Tensor, given: Tensor) -> None:
        count = given[0, 0].numel()
        positions = torch.randperm(count, generator=self._generator)[: self._rows_per_input]
        rows = by_group(unroll(self._module, read, positions), self._groups).float()
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
    model: nn.Module, modules: Sequence[str], inputs: Tensor, *, temperature: float, seed: int
) -> dict[str, Tensor]:
    """How the loss feels errors of what the modules give: (outputs, outputs), summed over positions.

    The Fisher information of the model's outputs, over classes drawn from them: twice the divergence from the outputs
    as they are, to second order. Above a `temperature` of 1 the outputs are taken for less certain than they are: the
    loss of a trained network feels few of its inputs else.
    """
    generator = torch.Generator().manual_seed(seed)
    metrics: dict[str, Tensor] = {}
    for batch in torch.split(inputs, BATCH_SIZE):
        with torch.enable_grad(), _hold_outputs(model, modules) as held:
            logits = model(batch) / temperature
            spread = functional.log_softmax(logits.detach().double(), dim=1).exp()
            drawn = torch.multinomial(spread, DRAWS, replacement=True, generator=generator)
            for labels in drawn.T:
                loss = functional.cross_entropy(logits, labels, reduction="sum")
                slopes = torch.autograd.grad(loss, list(held.values()), retain_graph=True)
                for name, slope in zip(held, slopes, strict=True):
                    rows = slope.movedim(1, -1).flatten(0, -2)
                    metrics[name] = metrics.get(name, 0.0) + (rows.T @ rows).double() / (DRAWS * len(inputs))
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

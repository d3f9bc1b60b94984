"""Statistics: covariances of the inputs of modules, and Fisher matrices of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError
from critical_neurons.parallel import SERIAL, Executor, run_in_order
from critical_neurons.removal.gradients import differentiate
from critical_neurons.removal.refit.im2col import Weighted, by_group, channels_first, count_groups, unroll
from critical_neurons.removal.refit.least_squares import RowLimit
from critical_neurons.removal.refit.symmetric import mirror, multiply_columns, multiply_lower
from critical_neurons.removal.rows import Inputs, call_model, count_rows, join_outputs, take_rows
from critical_neurons.selection.consumers import ColumnBlock
from critical_neurons.selection.distance import Distance, list_outputs

CHOICE_ROW_LIMIT = RowLimit(4, 10_000)
"""Rows sampled of a feature map to choose units, by the columns of the widest part, and to refit drafts: fewer than
to refit the network that is returned."""


@dataclass(frozen=True)
class Moments:
    """Mean (columns,) and covariance (columns, columns) of the im2col columns of a part."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class _Sums:
    """The number of some rows of a part, their mean, and the products of the centred rows, in single precision,
    of which only the lower triangle is right."""

    count: int
    mean: Tensor
    squares: Tensor


def gather_moments(
    model: nn.Module,
    parts: Mapping[str, Sequence[ColumnBlock]],
    inputs: Inputs,
    batch_size: int,
    progress: Callable[[int, int], None],
    executor: Executor = SERIAL,
) -> tuple[dict[str, list[Moments]], list[Tensor]]:
    """The moments of every part of every module, and the model's outputs for the inputs."""
    columns = {name: [(part.group, part.columns) for part in each] for name, each in parts.items()}
    batches = torch.split(torch.arange(count_rows(inputs)), batch_size)
    calls = (
        partial(_sum_batch, model, columns, take_rows(inputs, rows), count_rows(inputs), number)
        for number, rows in enumerate(batches)
    )
    totals = {name: [_Total() for _ in each] for name, each in parts.items()}
    outputs = []
    progress(0, len(batches))
    for found, given in run_in_order(executor, calls):
        for name, sums in found:
            for total, each in zip(totals[name], sums, strict=True):
                total.add(each)
        found.clear()  # or it would take memory beside the next batch's
        outputs.append(given)
        progress(len(outputs), len(batches))
    for name, each in totals.items():
        if any(total.count == 0 for total in each):
            raise InvalidInputError(
                f"{name}: none of the batches of up to {batch_size} inputs reaches this layer, so that nothing is "
                "known of what it reads. Give other inputs, or leave its units out with ignore=."
            )
    moments = {name: [total.finish() for total in totals.pop(name)] for name in list(totals)}
    joined = join_outputs(outputs)
    covariances = [each.covariance for some in moments.values() for each in some]
    if not all(torch.isfinite(each).all() for each in (*joined, *covariances)):
        raise InvalidInputError(
            "inputs: the model gives NaN or infinite values for them, or values whose squares overflow single "
            "precision. Are they scaled right?"
        )
    return moments, joined


@torch.no_grad()
def _sum_batch(
    model: nn.Module,
    columns: Mapping[str, Sequence[tuple[int, slice]]],
    batch: Inputs,
    input_count: int,
    number: int,
) -> tuple[list[tuple[str, list[_Sums]]], list[Tensor]]:
    """The sums of every call of a module with this batch, in the order of calls, and the model's outputs."""
    generator = torch.Generator().manual_seed(number)
    found: list[tuple[str, list[_Sums]]] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, Weighted)
            width = max(some.stop - some.start for _, some in columns[name])
            rows = _sample_rows(module, args[0], output, -(-CHOICE_ROW_LIMIT.count(width) // input_count), generator)
            found.append((name, [_sum_rows(rows[group, :, some]) for group, some in columns[name]]))

        return add

    with ExitStack() as stack:
        for name in columns:
            stack.enter_context(model.get_submodule(name).register_forward_hook(watch(name)))
        given = list_outputs(call_model(model, batch))
    return found, given


def _sample_rows(module: Weighted, read: Tensor, given: Tensor, per_input: int, generator: torch.Generator) -> Tensor:
    """At random positions: (groups, rows, columns)."""
    positions = torch.randperm(channels_first(module, given).shape[2], generator=generator)[:per_input]
    return by_group(unroll(module, read, positions, given.shape[2:]), count_groups(module)).float()


def _sum_rows(rows: Tensor) -> _Sums:
    mean = rows.mean(0)  # centred, so that single precision keeps the variation
    return _Sums(len(rows), mean, multiply_lower(rows - mean))


class _Total:
    """Sums of batches are added in double precision."""

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, sums: _Sums) -> None:
        if self.count == 0:
            self.count, self._mean, self._squares = sums.count, sums.mean.double(), sums.squares.double()
            return
        moved, share = sums.mean.double() - self._mean, sums.count / (self.count + sums.count)
        self._squares += sums.squares
        self._squares.addr_(moved, moved, alpha=share * self.count)
        self._mean += share * moved
        self.count += sums.count

    def finish(self) -> Moments:
        return Moments(self._mean.float(), mirror((self._squares / self.count).float()))


def gather_metrics(
    model: nn.Module,
    modules: Sequence[str],
    inputs: Inputs,
    rows: Tensor,
    distance: Distance,
    batch_size: int,
    temperature: float,
    seed: int,
    executor: Executor = SERIAL,
) -> dict[str, Tensor]:
    """The Fisher matrix of each module's output: (outputs, outputs), summed over positions, one sample per input.

    It is the Hessian of the distance at the original outputs. A `temperature` above 1 flattens class probabilities: a
    trained network is so certain of most inputs that errors on them would otherwise not count.
    """
    seeds = np.random.SeedSequence(seed).generate_state(len(rows))
    calls = (
        partial(_square_slopes, model, modules, take_rows(inputs, some), distance, temperature, int(own))
        for some, own in zip(torch.split(rows, batch_size), seeds, strict=False)
    )
    metrics: dict[str, Tensor] = {}
    for found in run_in_order(executor, calls):
        for name, squares in found.items():
            metrics[name] = metrics.get(name, 0.0) + squares.double() / len(rows)
    if not all(torch.isfinite(each).all() for each in metrics.values()):
        raise InvalidInputError("inputs: gradients of the model are NaN or infinite for them. Are they scaled right?")
    return metrics


def _square_slopes(
    model: nn.Module, modules: Sequence[str], batch: Inputs, distance: Distance, temperature: float, seed: int
) -> dict[str, Tensor]:
    """Squares of gradients by the modules' outputs, for one batch."""

    def find_slopes() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        with torch.enable_grad(), _hold_outputs(model, modules) as held:
            loss = distance.probe(list_outputs(call_model(model, batch)), temperature, generator)
            slopes = torch.autograd.grad(loss, list(held.values()), materialize_grads=True)  # zeros if unread
            return dict(zip(held, slopes, strict=True))

    found = {}
    for name, slope in differentiate(find_slopes).items():
        errors = channels_first(model.get_submodule(name), slope).movedim(1, -1).flatten(0, -2)
        found[name] = multiply_columns(errors)
    return found


@contextmanager
def _hold_outputs(model: nn.Module, modules: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
    """Collect the modules' outputs while the model runs; gradients are tracked only from the first of them on."""
    held: dict[str, Tensor] = {}

    def hold(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            held[name] = output if output.requires_grad else output.detach().requires_grad_()
            return held[name].clone()  # later code may change the output in place

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hold(name)) for name in modules]
    try:
        yield held
    finally:
        for handle in handles:
            handle.remove()

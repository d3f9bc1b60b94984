"""Statistics: covariances of the inputs of modules, and Fisher matrices of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.gradients import differentiate
from critical_neurons.removal.refit.im2col import Weighted, by_group, channels_first, count_groups, to_matrix, unroll
from critical_neurons.removal.refit.ridge import multiply_columns
from critical_neurons.removal.rows import Inputs, call_model, count_rows, join_outputs, take_rows
from critical_neurons.selection.consumers import Part
from critical_neurons.selection.distance import Distance, list_outputs

ROWS_PER_COLUMN, LEAST_ROWS = 5, 10_000
"""Rows sampled of a feature map: per column, and at least. Choosing units takes fewer rows than refitting."""


@dataclass(frozen=True)
class Moments:
    """Mean (columns,) and covariance (columns, columns) of the im2col columns of a part."""

    mean: Tensor
    covariance: Tensor


@torch.no_grad()
def gather_moments(
    model: nn.Module,
    parts: Mapping[str, Sequence[Part]],
    inputs: Inputs,
    batch_size: int,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, list[Moments]], list[Tensor]]:
    """The moments of every part of every module, and the model's outputs for the inputs."""
    sums = {name: _Sums(model.get_submodule(name), each, count_rows(inputs)) for name, each in parts.items()}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, output: sums[name].add(args[0], output)

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in parts]
    try:
        batches, outputs = torch.split(torch.arange(count_rows(inputs)), batch_size), []
        for done, rows in enumerate(batches):
            progress(done, len(batches))
            outputs.append(list_outputs(call_model(model, take_rows(inputs, rows))))
        progress(len(batches), len(batches))
    finally:
        for handle in handles:
            handle.remove()
    found = {name: each.finish() for name, each in sums.items()}
    given = join_outputs(outputs)
    covariances = [moments.covariance for each in found.values() for moments in each]
    if not all(torch.isfinite(each).all() for each in (*given, *covariances)):
        raise InvalidInputError(
            "inputs: the model gives NaN or infinite values for them, or values whose squares overflow single "
            "precision. Are they scaled right?"
        )
    return found, given


class _Sums:
    """Products are computed in single precision and summed in double."""

    def __init__(self, module: nn.Module, parts: Sequence[Part], input_count: int) -> None:
        assert isinstance(module, Weighted)
        self._module, self._parts, self._groups = module, parts, count_groups(module)
        columns = to_matrix(module, module.weight).shape[1]
        self._rows_per_input = -(-max(ROWS_PER_COLUMN * columns, LEAST_ROWS) // input_count)
        self._generator = torch.Generator().manual_seed(0)
        self._origin: Tensor | None = None
        self._count = 0
        sizes = [len(part.units) for part in parts]
        self._firsts = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        self._squares = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]

    def add(self, read: Tensor, given: Tensor) -> None:
        count = channels_first(self._module, given).shape[2]
        positions = torch.randperm(count, generator=self._generator)[: self._rows_per_input]
        rows = by_group(unroll(self._module, read, positions, given.shape[2:]), self._groups).float()
        if self._origin is None:  # centred, so that single precision keeps the variation
            self._origin = rows.mean(1, keepdim=True)
        rows = rows - self._origin
        self._count += rows.shape[1]
        for part, firsts, squares in zip(self._parts, self._firsts, self._squares, strict=True):
            own = rows[part.group, :, part.columns]
            firsts += own.sum(0)
            squares += multiply_columns(own)

    def finish(self) -> list[Moments]:
        assert self._origin is not None
        found = []
        for part, firsts, squares in zip(self._parts, self._firsts, self._squares, strict=True):
            mean = firsts / self._count
            origin = self._origin[part.group, 0, part.columns]
            found.append(Moments(origin + mean.float(), (squares / self._count - torch.outer(mean, mean)).float()))
        return found


def gather_metrics(
    model: nn.Module,
    modules: Sequence[str],
    inputs: Inputs,
    rows: Tensor,
    distance: Distance,
    batch_size: int,
    temperature: float,
    seed: int,
) -> dict[str, Tensor]:
    """The Fisher matrix of each module's output: (outputs, outputs), summed over positions, one sample per input.

    It is the Hessian of the distance at the original outputs. A `temperature` above 1 flattens class probabilities: a
    trained network is so certain of most inputs that errors on them would otherwise not count.
    """
    generator = torch.Generator().manual_seed(seed)
    metrics: dict[str, Tensor] = {}
    for some in torch.split(rows, batch_size):
        state = generator.get_state()

        def find_slopes(batch: Inputs, state: Tensor = state) -> dict[str, Tensor]:
            with torch.enable_grad(), _hold_outputs(model, modules) as held:
                outputs = list_outputs(call_model(model, batch))
                loss = distance.probe(outputs, temperature, generator.set_state(state))
                slopes = torch.autograd.grad(loss, list(held.values()), materialize_grads=True)  # zeros if unread
                return dict(zip(held, slopes, strict=True))

        for name, slope in differentiate(partial(find_slopes, take_rows(inputs, some))).items():
            errors = channels_first(model.get_submodule(name), slope).movedim(1, -1).flatten(0, -2)
            metrics[name] = metrics.get(name, 0.0) + multiply_columns(errors).double() / len(rows)
    if not all(torch.isfinite(each).all() for each in metrics.values()):
        raise InvalidInputError("inputs: gradients of the model are NaN or infinite for them. Are they scaled right?")
    return metrics


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

"""Differences: how the outputs of two models differ on the same inputs, for any kind of output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.metrics import evaluating, run_model
from critical_neurons.removal.rows import Inputs, count_rows, find_tensors, split_rows
from critical_neurons.removal.seeding import seeded


@dataclass(frozen=True)
class OutputComparison:
    """`difference` of the outputs and, for models with one output (batch, classes), the predicted classes of both.
    What cannot be computed is None, with a `reason`."""

    difference: float | None
    predictions: tuple[Tensor, Tensor] | None
    reason: str = ""


def compare_outputs(model: nn.Module, other: nn.Module, inputs: Inputs, *, batch_size: int = 512) -> OutputComparison:
    """Run both in evaluation mode, batch by batch, with the same random numbers.

    The difference is √(Σ (y' - y)² / Σ (y - ȳ)²), summed over all elements of all floating-point outputs, y of the
    model and y' of the other; ȳ is the mean of the tensor that contains y.
    """
    predictions: list[tuple[Tensor, Tensor]] = []
    spreads: dict[int, _SquaredDeviations] = {}
    squares, alike, classes = 0.0, True, True
    for rows in split_rows(inputs, batch_size):
        one, two = (_run(each, rows) for each in (model, other))
        alike = _check_alike(one, two) and alike
        classes = classes and all(_are_classes(each, count_rows(rows)) for each in (one, two))
        if classes:
            predictions.append((one[0].argmax(1).cpu(), two[0].argmax(1).cpu()))
        for place, (values, others) in enumerate(zip(one, two, strict=True)):
            if alike and values.is_floating_point() and values.numel():
                exact = values.double()
                squares += float((others.double() - exact).square().sum())
                spreads.setdefault(place, _SquaredDeviations()).add(exact)
    difference, reason = None, ""
    if not alike:
        reason = "the models give different numbers of results for the same inputs"
    elif not spreads:
        reason = "the outputs hold no floating-point numbers"
    elif (difference := _relate(squares, sum(spread.squares for spread in spreads.values()))) is None:
        reason = "the model's outputs are all alike, or not finite"
    first, second = ([pair[at] for pair in predictions] for at in (0, 1))
    return OutputComparison(difference, (torch.cat(first), torch.cat(second)) if classes else None, reason)


def _run(model: nn.Module, rows: Inputs) -> list[Tensor]:
    """The outputs, with a fixed seed, so that random numbers do not add to the difference."""
    with evaluating(model), seeded(0, model):
        return list(find_tensors(run_model(model, rows)))


def _are_classes(outputs: Sequence[Tensor], rows: int) -> bool:
    return len(outputs) == 1 and outputs[0].ndim == 2 and len(outputs[0]) == rows and outputs[0].shape[1] > 1


def _check_alike(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """Whether all shapes agree. Only first axes may differ, as numbers of detections do; otherwise raise."""
    shapes = [[tuple(values.shape) for values in each] for each in (one, two)]
    if [shape[1:] for shape in shapes[0]] != [shape[1:] for shape in shapes[1]]:
        first, second = (", ".join(map(str, each)) or "no tensor" for each in shapes)
        raise InvalidInputError(f"smaller: it gives outputs {second}, the model {first}. Give two that match.")
    return shapes[0] == shapes[1]


def _relate(squares: float, spread: float) -> float | None:
    if squares == 0:
        return 0.0
    return sqrt(squares / spread) if spread > 0 and isfinite(squares / spread) else None


class _SquaredDeviations:
    """The sum of squared deviations from the mean, updated batch by batch (Chan, Golub and LeVeque)."""

    def __init__(self) -> None:
        self._count, self._mean, self.squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        count, mean = values.numel(), float(values.mean())
        shift, total = mean - self._mean, self._count + count
        self.squares += float((values - mean).square().sum()) + shift**2 * self._count * count / total
        self._mean += shift * count / total
        self._count = total

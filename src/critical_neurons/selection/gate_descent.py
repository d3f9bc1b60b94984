"""Gate descent: projected gradient descent on a gate in [0, 1] for every unit, under a budget.

The loss is the distance between the outputs of the gated model and those of the original, so no labels are needed.
It is a heuristic without a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.removal.gradients import differentiate
from critical_neurons.removal.rows import Inputs, count_rows, join_outputs, take_outputs, take_rows
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.gated_model import GatedModel

TEMPERATURE = 0.5
"""Softmax temperature of the loss. Below 1, changes of a decision count more than changes of confidence."""

STEP_SIZE = 0.05
LEAST_BATCH, MOST_BATCH, BATCH_NUMBERS = 25, 250, 2 * 10**6
"""Batch size: about this many numbers in a forward pass, within the two limits."""

RAMP = 0.5
"""Share of the steps during which the budget falls to its target; afterwards gates are driven to 0 or 1."""

SHARPENING = 3.0
"""Final weight of the term 1 - 2 s that drives a gate s to 0 or 1, relative to the gradient."""

MOMENTUM, SECOND_MOMENTUM = 0.9, 0.99
BISECTIONS = 40
AJAR = 1e-6
"""Used instead of 0 when differentiating: at exactly 0 a ReLU has no gradient and the gate could not reopen."""

PASS_SIZE = 500
"""Batch size without gradients."""


@dataclass(frozen=True, eq=False)
class Limit:
    """The constraint weights @ gates[units] <= most."""

    units: Ints
    weights: Floats
    most: float


class GateSearch:
    """`size`: numbers computed in a forward pass of one input."""

    @torch.no_grad()
    def __init__(
        self, model: GatedModel, inputs: Inputs, distance: Distance, seed: int = 0, *, size: int, steps: int
    ) -> None:
        self._model, self._inputs, self._distance, self._seed = model, inputs, distance, seed
        self._count, self._steps = count_rows(inputs), steps
        self._batch_size = min(MOST_BATCH, max(LEAST_BATCH, BATCH_NUMBERS // size))
        self._wanted = self._run_all(torch.ones(model.unit_count))

    def descend(
        self,
        limit: Callable[[Floats, float], Sequence[Limit]],
        progress: Callable[[int, int], None] = lambda done, total: None,
        report: Callable[[float], None] = lambda loss: None,
    ) -> Floats:
        """Gates (units) after projected gradient descent from all ones.

        `limit(gates, way)` returns the constraints to project on; `way` rises from 0 to 1 as the budget shrinks to
        its target. Their units must not overlap. `report` receives the loss at every step.
        """
        gates = torch.ones(self._model.unit_count, dtype=torch.float32)
        generator = torch.Generator().manual_seed(self._seed)
        first, second = torch.zeros_like(gates), torch.zeros_like(gates)
        for step in range(self._steps):
            progress(step, self._steps)
            rows = torch.randperm(self._count, generator=generator)[: self._batch_size]
            loss, slope = self._differentiate(gates, rows)
            report(loss)
            first = MOMENTUM * first + (1 - MOMENTUM) * slope
            second = SECOND_MOMENTUM * second + (1 - SECOND_MOMENTUM) * slope.square()
            way = (step + 1) / self._steps
            sharpening = SHARPENING * max(0.0, (way - RAMP) / (1 - RAMP)) * (1 - 2 * gates)
            mean, square = first / (1 - MOMENTUM ** (step + 1)), second / (1 - SECOND_MOMENTUM ** (step + 1))
            for part in limit(gates.double().numpy(), min(1.0, way / RAMP)):
                units = torch.from_numpy(part.units)
                scale = square[units].mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
                moved = gates[units] - STEP_SIZE * (mean[units] / scale + sharpening[units])
                gates[units] = torch.from_numpy(project(moved.double().numpy(), part.weights, part.most)).float()
        progress(self._steps, self._steps)
        return gates.double().numpy()

    def measure(self, stays: Bools) -> float:
        """The loss on all inputs with only these units."""
        found = self._run_all(torch.from_numpy(stays).float())
        return float(self._distance.measure(found, self._wanted))

    @torch.no_grad()
    def _run_all(self, gates: Tensor) -> list[Tensor]:
        rows = torch.split(torch.arange(self._count), PASS_SIZE)
        return join_outputs(self._model.run(take_rows(self._inputs, some), gates) for some in rows)

    def _differentiate(self, gates: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """The loss on these rows, and the gradient of the loss at `TEMPERATURE`."""
        wanted = take_outputs(self._wanted, self._inputs, rows)

        def find_slope() -> tuple[float, Tensor]:
            with torch.enable_grad():
                free = gates.clamp(min=AJAR).requires_grad_()
                found = self._model.run(take_rows(self._inputs, rows), free)
                (slope,) = torch.autograd.grad(self._distance.measure(found, wanted, TEMPERATURE), free)
            return float(self._distance.measure([each.detach() for each in found], wanted)), slope

        return differentiate(find_slope)


def project(values: Floats, weights: Floats, most: float) -> Floats:
    """The nearest point with 0 <= point <= 1 and weights @ point <= most; weights are positive, most at least 0."""
    inside: Floats = np.clip(values, 0.0, 1.0)
    if weights @ inside <= most:
        return inside
    low, high = 0.0, float((values / weights).max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        inside = np.clip(values - middle * weights, 0.0, 1.0)
        low, high = (middle, high) if weights @ inside > most else (low, middle)
    return np.clip(values - high * weights, 0.0, 1.0)

"""Gate descent: which units a model needs most, by the gradient of gates in [0, 1] on all of them.

The loss is how far the outputs of the gated model are from those of the whole one, so no labels are needed. Nothing
is certified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.removal.rows import Inputs, count_rows, take_rows
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.gated_model import GatedModel
from critical_neurons.selection.prefix_cache import Front

TEMPERATURES = (0.5, 1.0, 0.25)
"""At which outputs are compared: sharper than they are, what changes a decision counts more than what changes
confidence. Which is best differs from network to network; large ones have the first alone."""

STEP_SIZE = 0.05
LEAST_BATCH, MOST_BATCH, BATCH_NUMBERS = 25, 250, 2 * 10**6
"""Inputs of a step: as many as make so many numbers in a forward pass, within limits."""

RAMP = 0.5
"""Share of the steps during which the budget falls to what is wanted; in the others gates are driven to 0 or 1."""

SHARPENING = 3.0
"""What 1 - 2 s counts against the gradient, at the end."""

MOMENTUM, SECOND_MOMENTUM = 0.9, 0.99
BISECTIONS = 40
EXCHANGED = 12
"""Units of a group that may go, and that may come back, tried against each other: the first of both by gradient."""

TRIAL_NUMBERS = 10**9
"""In all forward passes of exchanges."""

AJAR = 1e-6
"""In place of a gate of 0, to differentiate: a ReLU of nothing has no slope."""

PASS_SIZE = 500
"""Inputs run at once where no gradient is wanted."""


@dataclass(frozen=True)
class Steps:
    """Of the descent, and exchanges tried behind it at most."""

    descent: int = 400
    swaps: int = 200


@dataclass(frozen=True, eq=False)
class Limit:
    """Units of which at most so much may stay: weights @ gates <= most, all of them at first."""

    units: Ints
    weights: Floats
    most: float


class GateSearch:
    """`size`: numbers in a forward pass of one input."""

    def __init__(
        self, model: GatedModel, inputs: Inputs, distance: Distance, seed: int = 0, *, size: int, effort: Steps
    ) -> None:
        self._model, self._inputs, self._distance, self._seed = model, inputs, distance, seed
        self._size, self._count, self._steps = size, count_rows(inputs), effort
        self._batch_size = min(MOST_BATCH, max(LEAST_BATCH, BATCH_NUMBERS // size))
        whole = torch.ones(model.unit_count)
        few = take_rows(inputs, torch.arange(2))
        probe = partial(model.run, few, torch.ones(model.unit_count, requires_grad=True))
        self._front = Front(model.module, probe, self._count)
        with self._front.learn():
            parts = [
                model.run(take_rows(inputs, rows), whole)
                for rows in torch.split(torch.arange(self._count), PASS_SIZE)
            ]
        self._wanted = [torch.cat(each) for each in zip(*parts, strict=True)]
        self._differentiated, self._slope = (b"", 0.0), np.zeros(0)

    def descend(
        self,
        limit: Callable[[Floats, float], Sequence[Limit]],
        temperature: float = 1.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Floats:
        """Gates (units) by projected gradient from all open.

        `limit` gives what the gates are projected on: of the gates so far, and of how much of the way down to the
        budget has been gone. Units under different limits must not overlap.
        """
        gates = torch.ones(self._model.unit_count, dtype=torch.float32)
        generator = torch.Generator().manual_seed(self._seed)
        first, second = torch.zeros_like(gates), torch.zeros_like(gates)
        steps = self._steps.descent
        for step in range(steps):
            progress(step, steps)
            slope = self._differentiate(gates, self._draw(generator), temperature)
            first = MOMENTUM * first + (1 - MOMENTUM) * slope
            second = SECOND_MOMENTUM * second + (1 - SECOND_MOMENTUM) * slope.square()
            way = (step + 1) / steps
            sharpening = SHARPENING * max(0.0, (way - RAMP) / (1 - RAMP)) * (1 - 2 * gates)
            mean, square = first / (1 - MOMENTUM ** (step + 1)), second / (1 - SECOND_MOMENTUM ** (step + 1))
            for part in limit(gates.double().numpy(), min(1.0, way / RAMP)):
                units = torch.from_numpy(part.units)
                scale = square[units].mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
                moved = gates[units] - STEP_SIZE * (mean[units] / scale + sharpening[units])
                gates[units] = torch.from_numpy(project(moved.double().numpy(), part.weights, part.most)).float()
        progress(steps, steps)
        return gates.double().numpy()

    def exchange(self, stays: Bools, groups: Sequence[Ints], temperature: float = 1.0) -> tuple[Bools, float]:
        """Units of a group exchanged for others of it as long as the loss falls, and the loss then.

        `stays` (units). Many are exchanged at once while that helps; then one after the other, those that promise
        most, to first order, are tried first. All inputs are heard.
        """
        best, least = self._exchange_many(stays, groups, temperature)
        trials = min(self._steps.swaps, TRIAL_NUMBERS // (self._count * self._size))
        tried: set[tuple[int, int]] = set()
        while len(tried) < trials:
            offers = [pair for pair in self._list_exchanges(best, groups, temperature) if pair not in tried]
            better = None
            for pair in offers[: trials - len(tried)]:
                tried.add(pair)
                further = best.copy()
                further[list(pair)] = [False, True]
                loss = self.measure(further, temperature)
                if loss < least:
                    better, least = further, loss
                    break
            if better is None:
                break
            best = better
        return best, least

    def _exchange_many(self, stays: Bools, groups: Sequence[Ints], temperature: float) -> tuple[Bools, float]:
        """The worst units of every group for the best of the others, first all that promise something."""
        best, least = stays, self.measure(stays, temperature)
        count = len(stays)
        while count:
            slope, pairs = self.differentiate(best, temperature), []
            for units in groups:
                going = units[best[units]][np.argsort(-slope[units[best[units]]], kind="stable")]
                coming = units[~best[units]][np.argsort(slope[units[~best[units]]], kind="stable")]
                pairs += list(zip(going, coming, strict=False))
            promising = sorted((slope[new] - slope[old], old, new) for old, new in pairs)
            chosen = [pair for pair in promising if pair[0] < 0][:count]
            further = best.copy()
            further[[old for _, old, _ in chosen]], further[[new for _, _, new in chosen]] = False, True
            if chosen and (loss := self.measure(further, temperature)) < least:
                best, least = further, loss
            else:
                count = min(count, len(chosen)) // 2
        return best, least

    def differentiate(self, stays: Bools, temperature: float = 1.0) -> Floats:
        """The derivative of the loss on all inputs by every gate. Asked again for the same, it is known."""
        key = (stays.tobytes(), temperature)
        if self._differentiated != key:
            self._differentiated, self._slope = key, self._differentiate_all(stays, temperature)
        return self._slope

    def _differentiate_all(self, stays: Bools, temperature: float) -> Floats:
        slope = torch.zeros(len(stays), dtype=torch.float32)
        for rows in torch.split(torch.arange(self._count), self._batch_size):
            part = self._differentiate(torch.from_numpy(stays).float(), rows, temperature)
            slope += part * len(rows) / self._count
        return slope.double().numpy()

    @torch.no_grad()
    def measure(self, stays: Bools, temperature: float = 1.0) -> float:
        """The loss on all inputs of the network with these units alone."""
        gates, total = torch.from_numpy(stays).float(), 0.0
        for rows in torch.split(torch.arange(self._count), PASS_SIZE):
            total += float(self._diverge(gates, rows, temperature)) * len(rows)
        return total / self._count

    @torch.no_grad()
    def count_changed(self, stays: Bools) -> float:
        """See `Distance.changed`."""
        gates, total = torch.from_numpy(stays).float(), 0.0
        for rows in torch.split(torch.arange(self._count), PASS_SIZE):
            found = self._run(rows, gates)
            total += self._distance.changed(found, [each[rows] for each in self._wanted]) * len(rows)
        return total / self._count

    def _list_exchanges(self, stays: Bools, groups: Sequence[Ints], temperature: float) -> list[tuple[int, int]]:
        slope = self.differentiate(stays, temperature)
        offers = []
        for units in groups:
            inside, outside = units[stays[units]], units[~stays[units]]
            going = inside[np.argsort(-slope[inside], kind="stable")[:EXCHANGED]]
            coming = outside[np.argsort(slope[outside], kind="stable")[:EXCHANGED]]
            offers += [(slope[new] - slope[old], int(old), int(new)) for old in going for new in coming]
        return [(old, new) for _, old, new in sorted(offers)]

    def _differentiate(self, gates: Tensor, rows: Tensor, temperature: float) -> Tensor:
        with torch.enable_grad():
            free = gates.clamp(min=AJAR).requires_grad_()
            (slope,) = torch.autograd.grad(self._diverge(free, rows, temperature), free)
        return slope

    def _diverge(self, gates: Tensor, rows: Tensor, temperature: float = 1.0) -> Tensor:
        return self._distance.measure(self._run(rows, gates), [each[rows] for each in self._wanted], temperature)

    def _run(self, rows: Tensor, gates: Tensor) -> list[Tensor]:
        with self._front.recall(rows):
            return self._model.run(take_rows(self._inputs, rows), gates)

    def _draw(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self._count, generator=generator)[: self._batch_size]


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

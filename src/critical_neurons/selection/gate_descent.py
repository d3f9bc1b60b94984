"""Gate descent: model and inputs to gates: which units the network itself misses least.

A gate in [0, 1] multiplies what the ReLU of its unit reads. The loss is how far the outputs of the gated network
diverge from those of the whole one, so no labels are needed. Nothing is certified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.core.network import Bools, Floats, Hold, Ints
from critical_neurons.errors import InvalidInputError
from critical_neurons.selection.prefix_cache import Front

TEMPERATURES = (0.5, 1.0, 0.25)
"""At which outputs are compared: sharper than they are, what changes a decision counts more than what changes
confidence. Which is best differs from network to network; large ones have the first alone."""

STEPS, STEP_SIZE = 400, 0.05
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

MOST_TRIALS, TRIAL_NUMBERS = 200, 10**9
"""Exchanges tried at most, and numbers in all their forward passes."""

AJAR = 1e-6
"""In place of a gate of 0, to differentiate: a ReLU of nothing has no slope."""

PASS_SIZE = 500
"""Inputs run at once where no gradient is wanted."""


@dataclass(frozen=True, eq=False)
class Limit:
    """Units of which at most so much may stay: weights @ gates <= most, all of them at first."""

    units: Ints
    weights: Floats
    most: float


class GatedModel:
    """A model whose units have gates; a forward pass of one input makes `size` numbers."""

    def __init__(self, model: nn.Module, holds: Iterable[Hold], unit_count: int, size: int) -> None:
        self.unit_count, self.size = unit_count, size
        self.module = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        self._factors = torch.ones(unit_count + 1)
        for hold in holds:
            self.module.get_submodule(hold.module).register_forward_hook(
                self._make_hook(torch.from_numpy(hold.units))
            )

    def _make_hook(self, units: Tensor) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def multiply(module: nn.Module, args: object, output: Tensor) -> Tensor:
            return output * self._factors[units].reshape(-1, *[1] * (output.ndim - 2)).to(output.dtype)

        return multiply

    def run(self, inputs: Tensor, gates: Tensor) -> Tensor:
        self._factors = torch.cat([gates, gates.new_ones(1)])  # the last entry answers for NO_UNIT
        outputs: Tensor = self.module(inputs)
        return outputs


class GateSearch:
    def __init__(self, model: GatedModel, inputs: Tensor, seed: int = 0) -> None:
        self._model, self._inputs, self._seed = model, inputs, seed
        self._batch_size = min(MOST_BATCH, max(LEAST_BATCH, BATCH_NUMBERS // model.size))
        whole = torch.ones(model.unit_count)
        probe = partial(model.run, inputs[:2], torch.ones(model.unit_count, requires_grad=True))
        self._front = Front(model.module, probe, len(inputs))
        with self._front.learn():
            self._wanted = torch.cat([model.run(part, whole) for part in torch.split(inputs, PASS_SIZE)])
        if not torch.isfinite(self._wanted).all():
            raise InvalidInputError("inputs: the model gives NaN or infinite values for them. Are they scaled right?")
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
        for step in range(STEPS):
            progress(step, STEPS)
            slope = self._differentiate(gates, self._draw(generator), temperature)
            first = MOMENTUM * first + (1 - MOMENTUM) * slope
            second = SECOND_MOMENTUM * second + (1 - SECOND_MOMENTUM) * slope.square()
            way = (step + 1) / STEPS
            sharpening = SHARPENING * max(0.0, (way - RAMP) / (1 - RAMP)) * (1 - 2 * gates)
            mean, square = first / (1 - MOMENTUM ** (step + 1)), second / (1 - SECOND_MOMENTUM ** (step + 1))
            for part in limit(gates.double().numpy(), min(1.0, way / RAMP)):
                units = torch.from_numpy(part.units)
                scale = square[units].mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
                moved = gates[units] - STEP_SIZE * (mean[units] / scale + sharpening[units])
                gates[units] = torch.from_numpy(project(moved.double().numpy(), part.weights, part.most)).float()
        progress(STEPS, STEPS)
        return gates.double().numpy()

    def exchange(self, stays: Bools, groups: Sequence[Ints], temperature: float = 1.0) -> tuple[Bools, float]:
        """Units of a group exchanged for others of it as long as the loss falls, and the loss then.

        `stays` (units). Many are exchanged at once while that helps; then one after the other, those that promise
        most, to first order, are tried first. All inputs are heard.
        """
        best, least = self._exchange_many(stays, groups, temperature)
        trials = min(MOST_TRIALS, TRIAL_NUMBERS // (len(self._inputs) * self._model.size))
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
        for rows in torch.split(torch.arange(len(self._inputs)), self._batch_size):
            part = self._differentiate(torch.from_numpy(stays).float(), rows, temperature)
            slope += part * len(rows) / len(self._inputs)
        return slope.double().numpy()

    @torch.no_grad()
    def measure(self, stays: Bools, temperature: float = 1.0) -> float:
        """The loss on all inputs of the network with these units alone."""
        gates, total = torch.from_numpy(stays).float(), 0.0
        for rows in torch.split(torch.arange(len(self._inputs)), PASS_SIZE):
            total += float(self._diverge(gates, rows, temperature)) * len(rows)
        return total / len(self._inputs)

    @torch.no_grad()
    def count_changed(self, stays: Bools) -> int:
        """Inputs for which another output is the largest when these units alone stay."""
        gates, parts = torch.from_numpy(stays).float(), torch.split(torch.arange(len(self._inputs)), PASS_SIZE)
        found = torch.cat([self._run(rows, gates).argmax(1) for rows in parts])
        return int((found != self._wanted.argmax(1)).sum())

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
        found = functional.log_softmax(self._run(rows, gates) / temperature, dim=1)
        wanted = functional.log_softmax(self._wanted[rows] / temperature, dim=1)
        return functional.kl_div(found, wanted, log_target=True, reduction="batchmean")

    def _run(self, rows: Tensor, gates: Tensor) -> Tensor:
        with self._front.recall(rows):
            return self._model.run(self._inputs[rows], gates)

    def _draw(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(len(self._inputs), generator=generator)[: self._batch_size]


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

"""What is left of a small network with some units alone, every module behind them refitted: quickly, to try many.

A run of the model in full size in which removed units count nothing. Each consumer is refitted, as it is reached, on
what then reaches it, as `cn.prune` will do; here on a sample and with a ridge that is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.compensating.unrolling import by_group, unroll
from critical_neurons.network import Bools, Ints, Wiring

CARRIED_INPUTS = 1000
HELD_OUT = 3
"""Outputs are compared for one input of so many, on which nothing is refitted."""

RIDGE = 1e-2
"""Relative to the mean square of the inputs."""

ROWS_PER_COLUMN, LEAST_ROWS = 10, 8_000
"""Positions beyond so many for every column, and beyond so many in all, are left out."""

SMALL_GROUP = 32
"""Units of a group up to which every exchange is tried."""

MOST_TRIALS = 150
"""Exchanges tried at most."""

BETTER, NOTHING = 1e-3, 1e-5
"""By how much of it a divergence must fall; and what is none."""

SOFTENING = 0.5
"""The temperature at which outputs are compared, relative to their deviation."""


class Carrier:
    """`consumers` are modules that read units; `model` is left as it is."""

    def __init__(self, model: nn.Module, consumers: Sequence[Wiring], inputs: Tensor, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._inputs = inputs[torch.randperm(len(inputs), generator=self._generator)[:CARRIED_INPUTS]]
        self._draft = copy.deepcopy(model)
        modules = {wiring.module: self._draft.get_submodule(wiring.module) for wiring in consumers}
        self._fitted = len(self._inputs) - len(self._inputs) // HELD_OUT
        self._consumers = [
            _Consumer(modules[wiring.module], wiring, self._fitted, self._generator) for wiring in consumers
        ]
        outputs = self._run(lambda consumer: consumer.remember)
        centred = outputs.double() - outputs.double().mean(1, keepdim=True)
        self._temperature = SOFTENING * float(centred.square().mean().sqrt()) or 1.0
        self._wanted = self._soften(outputs)
        self._known: dict[bytes, float] = {}

    def miss(self, stays: Bools) -> float:
        """By how much the outputs diverge from the model's, both softened.

        `stays` (units). On the images a network was trained on it is too sure of itself to tell good units from
        others: outputs are divided by half their own deviation, whatever their scale.
        """
        key = stays.tobytes()
        if key not in self._known:
            left = torch.from_numpy(np.append(stays, True))  # the last entry answers for NO_UNIT
            found = self._soften(self._run(lambda consumer: consumer.refit_to(left)))
            self._known[key] = float(functional.kl_div(found, self._wanted, log_target=True, reduction="batchmean"))
        return self._known[key]

    def exchange(self, stays: Bools, groups: Sequence[Ints], seed: int = 0) -> Bools:
        """Units of small groups exchanged for others of their group as long as less is missed."""
        best, least, trials = stays.copy(), self.miss(stays), 0
        generator, moved = np.random.default_rng(seed), True
        while moved:
            moved = False
            for units in (units for units in groups if len(units) <= SMALL_GROUP):
                pairs = [(old, new) for old in units[best[units]] for new in units[~best[units]]]
                for old, new in generator.permutation(pairs):
                    if best[new] or not best[old]:
                        continue
                    if trials == MOST_TRIALS:
                        return best
                    trials += 1
                    further = best.copy()
                    further[[old, new]] = [False, True]
                    if self.miss(further) < (1 - BETTER) * least - NOTHING:
                        best, least, moved = further, self.miss(further), True
        return best

    @torch.no_grad()
    def _run(self, choose: Callable[[_Consumer], Callable[[nn.Module, tuple[Tensor, ...]], None]]) -> Tensor:
        handles = [consumer.module.register_forward_pre_hook(choose(consumer)) for consumer in self._consumers]
        try:
            outputs: Tensor = self._draft(self._inputs)
        finally:
            for handle in handles:
                handle.remove()
        return outputs[self._fitted :]

    def _soften(self, outputs: Tensor) -> Tensor:
        return functional.log_softmax(outputs.double() / self._temperature, dim=1)


class _Consumer:
    """A module of the draft, its weights as they were, and what it then gave at some positions."""

    def __init__(self, module: nn.Module, wiring: Wiring, fitted: int, generator: torch.Generator) -> None:
        assert isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
        self.module, self._inputs, self._groups = module, wiring.inputs, wiring.groups
        self._fitted, self._generator = fitted, generator
        self._weight = module.weight.detach().reshape(wiring.groups, -1, module.weight[0].numel()).mT.double()
        self._bias = None if module.bias is None else module.bias.detach()
        self._kernel = self._weight.shape[1] * wiring.groups // len(wiring.inputs)
        rows = max(ROWS_PER_COLUMN * self._weight.shape[1], LEAST_ROWS)
        self._rows_per_input = -(-rows // fitted)

    def remember(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        count = self.module.forward(args[0][:1])[0, 0].numel()  # not a call: this runs before each
        self._positions = torch.randperm(count, generator=self._generator)[: self._rows_per_input]
        self._wanted = self._unroll(args[0]) @ self._weight  # but for the bias, which the mean answers for

    def refit_to(self, stays: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        left = stays[torch.from_numpy(self._inputs)].repeat_interleave(self._kernel)
        mask = left.reshape(self._groups, -1, 1).double()

        def refit(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = self._unroll(args[0])
            weight, shift = self._fit(rows, mask)
            self.module.weight.data = weight.mT.reshape(self.module.weight.shape).to(self.module.weight)
            old = 0.0 if self._bias is None else self._bias
            self.module.bias = nn.Parameter((old + shift.flatten()).to(self.module.weight), requires_grad=False)

        return refit

    def _fit(self, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (groups, columns, outputs), and what the bias rises by."""
        weight = self._weight * mask
        mean, wanted = rows.mean(1, keepdim=True), self._wanted.mean(1, keepdim=True)
        centred = (rows - mean) * mask.mT
        missing = self._wanted - wanted - centred @ weight
        squares = centred.mT @ centred
        ridge = RIDGE * squares.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
        squares.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        weight = weight + torch.linalg.solve(squares, centred.mT @ missing)
        return weight, wanted - mean @ weight

    def _unroll(self, read: Tensor) -> Tensor:
        return by_group(unroll(self.module, read[: self._fitted], self._positions), self._groups).double()

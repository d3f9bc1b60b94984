"""Trials: the loss of a model with some of its weights refitted, on the same inputs for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Floats
from critical_neurons.parallel import Executor, run_in_order
from critical_neurons.removal.rows import Inputs, call_model, join_outputs, take_outputs, take_rows
from critical_neurons.selection.distance import Distance, list_outputs
from critical_neurons.selection.replay import Replay
from critical_neurons.selection.trial_weights import Fitted, put_weights


@dataclass(frozen=True, eq=False)
class RemovalTrial:
    """The error of a trial removal in one group, and its refitted consumers by name."""

    error: float
    fitted: Mapping[str, Fitted]


@dataclass(frozen=True, eq=False)
class Sample:
    """Inputs, the original model's outputs for all of them, and the batches to take."""

    inputs: Inputs
    outputs: Sequence[Tensor]
    batches: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.batches)

    def take(self) -> Iterator[tuple[Inputs, list[Tensor]]]:
        """Inputs and original outputs, batch by batch."""
        for rows in self.batches:
            yield take_rows(self.inputs, rows), take_outputs(self.outputs, self.inputs, rows)


def measure_trials(
    model: nn.Module,
    trials: Sequence[RemovalTrial],
    sample: Sample,
    distance: Distance,
    progress: Callable[[int, int], None],
    executor: Executor,
) -> Floats:
    """The loss of every trial; zero where nothing is removed. The model is restored afterwards.

    Trials do not depend on each other: with fewer batches than workers, these share the trials of a batch.
    """
    real = [place for place, trial in enumerate(trials) if trial.error > 0]
    slots = executor.slots  # of a cluster it may change
    shares = [real] if len(sample) >= slots else [real[first::slots] for first in range(slots)]
    calls = (
        partial(_try_all, model, [trials[place].fitted for place in share], batch, wanted, distance)
        for batch, wanted in sample.take()
        for share in shares
    )
    losses, total = np.zeros(len(trials)), sum(map(len, sample.batches))
    progress(0, len(sample))
    for number, found in enumerate(run_in_order(executor, calls)):
        batch, share = divmod(number, len(shares))
        losses[shares[share]] += np.array(found) * len(sample.batches[batch]) / total
        progress(batch + (share + 1 == len(shares)), len(sample))
    return losses


@torch.no_grad()
def _try_all(
    model: nn.Module,
    trials: Sequence[Mapping[str, Fitted]],
    batch: Inputs,
    wanted: Sequence[Tensor],
    distance: Distance,
) -> list[float]:
    replay, losses = Replay(model, batch), []
    for fitted in trials:
        with put_weights(model, fitted) as changed:
            losses.append(float(distance.measure(list_outputs(replay.run(changed)), wanted)))
    return losses


class Outputs:
    """Outputs of a model for some rows of its inputs, collected batch by batch."""

    def __init__(self) -> None:
        self._rows, self._given = list[Tensor](), list[list[Tensor]]()

    def add(self, rows: Tensor, given: Any) -> None:
        self._rows.append(rows)
        self._given.append([each.detach() for each in list_outputs(given)])

    @property
    def rows(self) -> Tensor:
        return torch.cat([torch.empty(0, dtype=torch.long), *self._rows])

    def join(self) -> list[Tensor]:
        return join_outputs(self._given)

    def complete(self, model: nn.Module, inputs: Inputs, rows: Tensor, size: int, executor: Executor) -> None:
        """Run the model on those of the rows that are missing, in batches of this size."""
        batches = torch.split(rows[~torch.isin(rows, self.rows)], size)
        calls = (partial(_run, model, take_rows(inputs, some)) for some in batches if len(some))
        for some, given in zip(batches, run_in_order(executor, calls), strict=False):
            self.add(some, given)


@torch.no_grad()
def _run(model: nn.Module, batch: Inputs) -> list[Tensor]:
    return list_outputs(call_model(model, batch))

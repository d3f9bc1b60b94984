"""Part training: every part has its own loss (that of its head) and optimiser. No gradient crosses parts."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from critical_neurons.core.batch import check_classes
from critical_neurons.core.files import check_writable, write_atomically
from critical_neurons.errors import InvalidFileError, InvalidInputError, InvalidSettingError, first_line
from critical_neurons.io.models import read_checkpoint
from critical_neurons.removal.metrics import count_classes
from critical_neurons.structure import fingerprint
from critical_neurons_reproduction.decoupled.parts import Decoupled, DecoupledPart
from critical_neurons_reproduction.recipes import Recipe, augment, compute_loss, set_rate

FORMAT = "critical_neurons decoupled training"
FORMAT_VERSION = 2
DIGEST_ROWS = 1024
"""Rows copied to memory at once for a digest."""

Losses: TypeAlias = tuple[float, ...]
"""The mean loss of every part over an epoch; for a frozen part, its last one before freezing."""

LabelledBatch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs of a part and their labels."""


def train_parts(
    decoupled: Decoupled,
    inputs: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    buffer_size: int = 1,
    threads: int = 1,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, Losses], None] = lambda epoch, losses: None,
) -> tuple[Losses, ...]:
    """Train all parts in place and leave them in evaluation mode. Returns the losses of every epoch.

    * `recipe`: its batch size is a minimum; the remainder of the data is spread over the batches.
    * `buffer_size`: size of the replay buffer of each part, in batches of its latest outputs. At every step the next
      part draws one of them at random; it takes as many steps as there are batches. With 1, every batch passes
      through all parts in turn.
    * `threads`: parts that are trained in parallel. The result does not depend on it.
    * `checkpoint`: a file written before the first epoch and after each. Called again with it, training resumes and
      ends with the same weights, bit by bit, as without interruption. Replay buffers start every epoch empty and are
      not saved.
    * `progress` is called after every epoch with its number, from 1, and its losses.
    """
    _check_numbers(batch_size=recipe.batch_size, buffer_size=buffer_size, threads=threads, seed=seed)
    _check_threads(decoupled.model, threads)
    _check_data(decoupled.model, inputs, labels)
    for part in decoupled.parts:
        part.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on CPUs
    optimisers = tuple(recipe.build_optimiser(part.network.parameters()) for part in decoupled.parts)
    task = _PartTraining(decoupled.parts, optimisers, inputs, labels, recipe, buffer_size, threads, seed)
    record = {} if checkpoint is None else task.describe()
    losses = [] if checkpoint is None else task.resume(checkpoint, record)
    if checkpoint is not None and not losses:
        task.save(checkpoint, record, losses)  # so that the first epoch can be restarted, too
    for epoch in range(len(losses), recipe.epochs):
        losses.append(task.train_epoch(epoch, losses[-1] if losses else ()))
        _check_losses(decoupled.parts, losses)
        if checkpoint is not None:
            task.save(checkpoint, record, losses)
        progress(epoch + 1, losses[-1])
    for part in decoupled.parts:
        part.network.eval()
    decoupled.model.eval()
    return tuple(losses)


def train_part(
    part: DecoupledPart, optimiser: Optimizer, recipe: Recipe, batch: LabelledBatch
) -> tuple[float, Tensor]:
    """One optimiser step of one part. Returns the loss and the body's output before the step, detached."""
    (inputs, labels), weight = batch, next(part.body.parameters())
    part.network.train()
    optimiser.zero_grad()
    with recipe.choose_precision(weight):
        leaving: Tensor = part.body(inputs.detach().to(weight.device))
        outputs = part.head(leaving)
    loss = compute_loss(outputs, labels.to(weight.device))
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.item(), leaving.detach()


def count_epochs(recipe: Recipe, parts: int) -> list[int]:
    """The number of epochs before each part is frozen."""
    shares = np.linspace(recipe.freeze_from, 1.0, parts) if parts > 1 else np.ones(1)
    return [math.ceil(round(share * recipe.epochs, 9)) for share in shares]


@dataclass(frozen=True)
class _PartTraining:
    """The arguments of one call of `train_parts`, shared by all its epochs."""

    parts: tuple[DecoupledPart, ...]
    optimisers: tuple[Optimizer, ...]
    inputs: Tensor
    labels: Tensor
    recipe: Recipe
    buffer_size: int
    threads: int
    seed: int

    def train_epoch(self, epoch: int, before: Losses) -> Losses:
        """One step of every part per batch, pipelined: part k starts k ticks late, when its buffer has an entry.

        Steps of one tick read the buffers as they were before it, so their order does not matter. All randomness
        derives from seed and epoch, so no random state is saved. `before`: the losses of the previous epoch.
        """
        rng = np.random.default_rng((self.seed, epoch))
        size = self.recipe.batch_size
        batches = np.array_split(rng.permutation(len(self.labels)), max(1, len(self.labels) // size))
        count = len(self.parts)
        ends = count_epochs(self.recipe, count)
        buffers: list[deque[LabelledBatch]] = [deque(maxlen=self.buffer_size) for _ in range(count)]
        totals = np.zeros(count)
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(self.threads) as pool:
            torch.manual_seed(int(rng.integers(2**31)))  # for augmentation and dropout
            run = map if self.threads == 1 else pool.map
            for tick in range(len(batches) + count - 1):
                if tick < len(batches):
                    buffers[0] = deque([self._take_batch(torch.from_numpy(batches[tick]))])
                chosen = [index for index in range(count) if 0 <= tick - index < len(batches)]
                drawn = [buffers[index][rng.integers(len(buffers[index]))] for index in chosen]
                # progress within each part's own epochs; 1 or more once it is frozen
                done = [(epoch + (tick - index) / len(batches)) / ends[index] for index in chosen]
                for index, labels, loss, leaving in run(self._take_step, chosen, drawn, done):
                    totals[index] += loss
                    if index + 1 < count:
                        buffers[index + 1].append((leaving, labels))
        trained = (totals / len(batches)).tolist()
        return tuple(trained[index] if epoch < ends[index] else before[index] for index in range(count))

    def _take_batch(self, rows: Tensor) -> LabelledBatch:
        inputs = self.inputs[rows].to(next(self.parts[0].body.parameters()))
        if self.recipe.augmented:
            inputs = augment(inputs)
        layout = torch.channels_last if inputs.ndim == 4 else torch.contiguous_format
        return inputs.contiguous(memory_format=layout), self.labels[rows]

    def _take_step(self, index: int, drawn: LabelledBatch, done: float) -> tuple[int, Tensor, float, Tensor]:
        (inputs, labels), part = drawn, self.parts[index]
        if done >= 1:
            weight = next(part.body.parameters())
            with torch.no_grad(), self.recipe.choose_precision(weight):
                return index, labels, 0.0, part.body.eval()(inputs.to(weight.device))
        set_rate(self.optimisers[index], self.recipe, done)
        return index, labels, *train_part(part, self.optimisers[index], self.recipe, drawn)

    def describe(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be resumed."""
        return {
            "architecture": [fingerprint(part.network).architecture for part in self.parts],
            "data": _digest(self.inputs, self.labels),
            "recipe": self.recipe.to_dict(),
            "buffer_size": self.buffer_size,
            "seed": self.seed,
        }

    def save(self, path: str | os.PathLike[str], record: dict[str, Any], losses: Sequence[Losses]) -> None:
        content = io.BytesIO()
        state = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "record": record,
            "parts": [dict(part.network.state_dict()) for part in self.parts],
            "optimisers": [each.state_dict() for each in self.optimisers],
            "losses": [list(each) for each in losses],
        }
        torch.save(state, content)
        write_atomically(path, content.getvalue())

    def resume(self, path: str | os.PathLike[str], record: dict[str, Any]) -> list[Losses]:
        """Restore parts and optimisers; returns the losses so far, empty if there is no file yet."""
        check_writable(path)
        if not Path(path).exists():
            return []
        try:
            state = read_checkpoint(Path(path))
        except Exception as error:
            raise InvalidFileError(f"{path}: not a checkpoint, or damaged. Remove it to start over.") from error
        if not isinstance(state, dict) or (state.get("format"), state.get("version")) != (FORMAT, FORMAT_VERSION):
            raise InvalidFileError(f"{path}: not a file of {FORMAT}, version {FORMAT_VERSION}.")
        try:
            others = [name for name, value in record.items() if state["record"].get(name) != value]
            if others:
                raise InvalidFileError(
                    f"{path}: the checkpoint of another training; it differs in {', '.join(others)}. Use the "
                    "settings it was started with, or another file."
                )
            for part, weights in zip(self.parts, state["parts"], strict=True):
                part.network.load_state_dict(weights)
            for optimiser, steps in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(steps)
            return [tuple(map(float, each)) for each in state["losses"]]
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, InvalidFileError):
                raise
            raise InvalidFileError(f"{path}: damaged ({first_line(error)}). Remove it to start over.") from error


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        least = {"seed": 0, "batch_size": 2}.get(name, 1)  # batch norm needs two data points
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidSettingError(f"{name}: found {value!r}. Accepted: a whole number of at least {least}.")


def _check_threads(model: nn.Module, threads: int) -> None:
    for name, module in model.named_modules() if threads > 1 else ():
        if "Dropout" in type(module).__name__:
            raise InvalidSettingError(
                f"threads: found {threads}; {name} ({type(module).__name__}) draws random numbers, in an order "
                "that threads would change. Give 1."
            )


def _check_data(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or len(inputs) != len(labels) or len(labels) < 2 or labels.dtype != torch.int64:
        raise InvalidInputError(
            f"labels: found {labels.dtype} of shape {tuple(labels.shape)} for inputs {tuple(inputs.shape)}. "
            "Accepted: torch.int64, one per input, and two or more of them."
        )
    check_classes(labels.cpu().numpy(), count_classes(model, inputs))


def _check_losses(parts: Sequence[DecoupledPart], losses: Sequence[Losses]) -> None:
    for part, loss in zip(parts, losses[-1], strict=True):
        if not math.isfinite(loss):
            raise InvalidSettingError(
                f"recipe: the loss of part {part.name} is {loss} in epoch {len(losses)}. Lower the learning rate."
            )


def _digest(inputs: Tensor, labels: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(inputs.shape)} {inputs.dtype}".encode())
    for values in (inputs, labels):
        for rows in torch.split(values.detach().cpu(), DIGEST_ROWS):
            digest.update(rows.numpy().tobytes())
    return digest.hexdigest()[:16]

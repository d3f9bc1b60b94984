"""Training: every part on the loss of its own head, with an optimiser of its own. No gradient crosses parts."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from critical_neurons.errors import InvalidFileError, InvalidInputError, InvalidSettingError
from critical_neurons.experiments.decoupled.parts import Decoupled, Part
from critical_neurons.files import check_writable, write_atomically
from critical_neurons.reading import fingerprint

FORMAT = "critical_neurons decoupled training"
FORMAT_VERSION = 1
LEARNING_RATE = 1e-2

Losses: TypeAlias = tuple[float, ...]
"""The mean loss of every part over an epoch."""

Labelled: TypeAlias = tuple[Tensor, Tensor]
"""Inputs of a part and their labels."""


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The paper's, for VGG-16."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def train_parts(
    decoupled: Decoupled,
    inputs: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch_size: int = 128,
    buffer_size: int = 1,
    threads: int = 1,
    seed: int = 0,
    optimiser: Callable[[Iterable[nn.Parameter]], Optimizer] = adam,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, Losses], None] = lambda epoch, losses: None,
) -> tuple[Losses, ...]:
    """Train all parts in place and leave them in evaluation mode. Gives the losses, epoch by epoch.

    * `buffer_size`: batches kept of what each part gave lately; the next part draws one of them at random for each of
      its steps, and makes as many steps as there are batches. With 1, every batch goes through all parts in turn.
    * `threads`: parts that make their steps at the same time. It changes nothing in the result.
    * `batch_size`: the fewest data points of a batch; what is left over is spread.
    * `checkpoint`: a file written after every epoch. Called again with it, training goes on from there, to the same
      weights, bit by bit, as in one go. Buffers start every epoch empty, so it holds none.
    * `progress` is called after every epoch, with its number from 1 and its losses.
    """
    _check_settings(decoupled, epochs=epochs, batch_size=batch_size, buffer_size=buffer_size, threads=threads)
    _check_data(inputs, labels)
    optimisers = [optimiser(part.network.parameters()) for part in decoupled.parts]
    losses: list[Losses] = []
    record: dict[str, Any] = {}
    if checkpoint is not None:
        check_writable(checkpoint)
        record = {
            "architecture": [fingerprint(part.network).architecture for part in decoupled.parts],
            "data": _digest(inputs, labels),
            "batch_size": batch_size,
            "buffer_size": buffer_size,
            "seed": seed,
            "optimiser": f"{type(optimisers[0]).__name__} {sorted(optimisers[0].defaults.items())}",
        }
        losses = _resume(checkpoint, record, decoupled.parts, optimisers)
    for epoch in range(len(losses), epochs):
        rng = np.random.default_rng((seed, epoch))
        order = np.array_split(rng.permutation(len(labels)), max(1, len(labels) // batch_size))
        batches = [torch.from_numpy(rows) for rows in order]
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(threads) as pool:
            torch.manual_seed(int(rng.integers(2**31)))  # for dropout
            run = map if threads == 1 else pool.map

            def take_steps(chosen: Sequence[int], drawn: Sequence[Labelled], run: Any = run) -> list[Any]:
                parts, own = ([each[index] for index in chosen] for each in (decoupled.parts, optimisers))
                return list(run(train_part, parts, own, *zip(*drawn, strict=True)))

            losses.append(_train_epoch(len(decoupled.parts), (inputs, labels), batches, buffer_size, rng, take_steps))
        _check_losses(decoupled.parts, losses)
        if checkpoint is not None:
            _save(checkpoint, record, decoupled.parts, optimisers, losses)
        progress(epoch + 1, losses[-1])
    for part in decoupled.parts:
        part.network.eval()
    decoupled.model.eval()
    return tuple(losses)


def train_part(part: Part, optimiser: Optimizer, inputs: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """One step of one part. Gives the loss, and what the body gave before the step, cut off from its gradient."""
    weight = next(part.body.parameters())
    part.network.train()
    optimiser.zero_grad()
    leaving: Tensor = part.body(inputs.detach().to(weight))
    loss = functional.cross_entropy(part.head(leaving), labels.to(weight.device))
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.item(), leaving.detach()


def _train_epoch(
    count: int,
    data: Labelled,
    batches: Sequence[Tensor],
    buffer_size: int,
    rng: np.random.Generator,
    take_steps: Callable[[Sequence[int], Sequence[Labelled]], list[tuple[float, Tensor]]],
) -> Losses:
    """As many steps of every part as there are batches; part k begins k ticks later, when its buffer is no longer
    empty. The steps of one tick read what was in the buffers before it, so their order does not matter."""
    buffers: list[deque[Labelled]] = [deque(maxlen=buffer_size) for _ in range(count)]
    totals = np.zeros(count)
    for tick in range(len(batches) + count - 1):
        chosen = [index for index in range(count) if 0 <= tick - index < len(batches)]
        if tick < len(batches):
            buffers[0] = deque([(data[0][batches[tick]], data[1][batches[tick]])])
        drawn = [buffers[index][rng.integers(len(buffers[index]))] for index in chosen]
        for index, (_, labels), (loss, leaving) in zip(chosen, drawn, take_steps(chosen, drawn), strict=True):
            totals[index] += loss
            if index + 1 < count:
                buffers[index + 1].append((leaving, labels))
    return tuple((totals / len(batches)).tolist())


def _check_settings(decoupled: Decoupled, **numbers: int) -> None:
    for name, value in numbers.items():
        least = {"epochs": 0, "batch_size": 2}.get(name, 1)  # batch norm wants two data points
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidSettingError(f"{name}: found {value!r}. Accepted: a whole number of at least {least}.")
    if numbers["threads"] > 1:
        for name, module in decoupled.model.named_modules():
            if "Dropout" in type(module).__name__:
                raise InvalidSettingError(
                    f"threads: found {numbers['threads']}; {name} ({type(module).__name__}) draws at random, in an "
                    "order that threads would change. Give 1."
                )


def _check_data(inputs: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or len(inputs) != len(labels) or len(labels) < 2:
        raise InvalidInputError(
            f"labels: found shape {tuple(labels.shape)} for inputs {tuple(inputs.shape)}. Accepted: one per input, "
            "and two or more of them."
        )


def _check_losses(parts: Sequence[Part], losses: Sequence[Losses]) -> None:
    for part, loss in zip(parts, losses[-1], strict=True):
        if not math.isfinite(loss):
            raise InvalidSettingError(
                f"optimiser: the loss of part {part.name} is {loss} in epoch {len(losses)}. Give one with a lower "
                "learning rate."
            )


def _digest(inputs: Tensor, labels: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(inputs.shape)} {inputs.dtype}".encode())
    for values in (inputs, labels):
        digest.update(memoryview(np.ascontiguousarray(values.detach().cpu().numpy())))
    return digest.hexdigest()[:16]


def _save(
    path: str | os.PathLike[str],
    record: dict[str, Any],
    parts: Sequence[Part],
    optimisers: Sequence[Optimizer],
    losses: Sequence[Losses],
) -> None:
    content = io.BytesIO()
    state = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "record": record,
        "parts": [dict(part.network.state_dict()) for part in parts],
        "optimisers": [each.state_dict() for each in optimisers],
        "losses": [list(each) for each in losses],
    }
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def _resume(
    path: str | os.PathLike[str], record: dict[str, Any], parts: Sequence[Part], optimisers: Sequence[Optimizer]
) -> list[Losses]:
    """Put parts and optimisers where the file left them; the losses so far. Nothing, where there is no file yet."""
    if not Path(path).exists():
        return []
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidFileError(f"{path}: not a checkpoint, or damaged. Remove it to start anew.") from error
    if not isinstance(state, dict) or (state.get("format"), state.get("version")) != (FORMAT, FORMAT_VERSION):
        raise InvalidFileError(f"{path}: not a file of {FORMAT}, version {FORMAT_VERSION}.")
    others = [name for name, value in record.items() if state["record"].get(name) != value]
    if others:
        raise InvalidFileError(
            f"{path}: the checkpoint of another training; {', '.join(others)} differ. Give those it was begun with, "
            "or another file."
        )
    for part, optimiser, weights, steps in zip(parts, optimisers, state["parts"], state["optimisers"], strict=True):
        part.network.load_state_dict(weights)
        optimiser.load_state_dict(steps)
    return [tuple(each) for each in state["losses"]]

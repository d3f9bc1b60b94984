"""Forward pass: run the model at the data points, for the inputs, logits and tail of a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Bools, Floats
from critical_neurons.errors import InvalidSettingError, UnreadableModelError
from critical_neurons.readers.interpreter import Walk, require_finite
from critical_neurons.readers.trace import copy_for_reading, trace_model
from critical_neurons.structure import unwrap

RUN_BATCH = 256
"""Batch size."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One pass of the data points through a model: the `inputs` (batch, ...) of the span, the model's own `logits`
    (batch, classes) without a final softmax, and the `tail` if the span stops before them."""

    inputs: Floats
    logits: Floats
    tail: Tail | None = None

    def choose(self, points: Bools) -> Passage:
        """Some of the data points."""
        tail = None if self.tail is None else self.tail.choose(points)
        return Passage(self.inputs[points], self.logits[points], tail)


def run_model(model: nn.Module, inputs: Floats, span: Span) -> Passage:
    """Run by torch in float64, unreadable parts included."""
    with torch.inference_mode(False), torch.no_grad():
        runnable = copy_for_reading(unwrap(model)).requires_grad_(False)
        traced, cut = trace_model(runnable, span)
        parts = []
        for at in range(0, len(inputs), RUN_BATCH):
            walk = Walk(traced, cut, differentiable=span.stop is not None)
            walk.run(torch.tensor(inputs[at : at + RUN_BATCH]))
            tail = None if span.stop is None else _expand(walk.logits, walk.leaving, span.stop)
            parts.append(Passage(walk.entering.numpy(), walk.logits.detach().numpy(), tail))
    return _join(parts)


def _expand(logits: Tensor, leaving: Tensor, stop: str) -> Tail:
    """The linearisation f(v_d) + J (v - v_d), by one backward pass per class."""
    with torch.enable_grad():
        totals = [logits[:, label].sum() for label in range(logits.shape[1])]
        first = logits[0].sum()
    try:
        (mixed,) = torch.autograd.grad(first, leaving, retain_graph=True)
        slopes = [torch.autograd.grad(total, leaving, retain_graph=True)[0] for total in totals]
    except RuntimeError as error:
        raise InvalidSettingError(
            f"stop: what follows {stop} cannot be differentiated ({str(error).splitlines()[0]}). Name a later "
            "module, or leave stop out."
        ) from error
    matrix = torch.stack(slopes, dim=1).flatten(2)
    require_finite(matrix, f"the derivative of what follows {stop}")
    if mixed[1:].any():
        raise UnreadableModelError(
            f"what follows {stop} mixes data points: the logits of one depend on the others. Programs are for models "
            "that take them one by one."
        )
    offset = logits.detach() - (matrix @ leaving.detach().flatten(1)[:, :, None])[:, :, 0]
    return Tail(offset.numpy(), matrix.numpy())


def _join(parts: list[Passage]) -> Passage:
    tails = [part.tail for part in parts if part.tail is not None]
    return Passage(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.logits for part in parts]),
        Tail(np.concatenate([tail.offset for tail in tails]), np.concatenate([tail.slopes for tail in tails]))
        if tails
        else None,
    )

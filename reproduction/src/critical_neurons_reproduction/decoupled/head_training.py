"""Head training: auxiliary heads trained behind frozen bodies, on body outputs that are computed once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons_reproduction.decoupled.parts import Decoupled
from critical_neurons_reproduction.recipes import Recipe, set_rate

CHUNK = 500
"""Batch size of the forward passes through the bodies."""


def train_heads(decoupled: Decoupled, inputs: Tensor, labels: Tensor, recipe: Recipe, *, seed: int = 0) -> None:
    """Train every head in place, independently, and leave all parts in evaluation mode. The bodies do not change.

    Where a head begins with a pooling, its pooled input is stored, which takes a sixteenth of the memory.
    """
    parts = [part for part in decoupled.parts if len(part.head)]
    cuts = [int(isinstance(part.head[0], nn.AdaptiveAvgPool2d)) for part in parts]
    decoupled.model.eval()
    kept: list[list[Tensor]] = [[] for _ in parts]
    with torch.no_grad():
        for rows in torch.split(inputs, CHUNK):
            values = rows.to(next(decoupled.model.parameters()))
            for part, cut, found in zip(parts, cuts, kept, strict=True):
                values = part.body.eval()(values)
                found.append(part.head[:cut](values))
    for index, (part, cut) in enumerate(zip(parts, cuts, strict=True)):
        head, rng = nn.Sequential(*list(part.head)[cut:]), np.random.default_rng((seed, index))
        _train(head, torch.cat(kept[index]), labels, recipe, rng)
        kept[index].clear()


def _train(head: nn.Sequential, inputs: Tensor, labels: Tensor, recipe: Recipe, rng: np.random.Generator) -> None:
    optimiser = recipe.build_optimiser(head.parameters())
    head.train()
    for epoch in range(recipe.epochs):
        order = torch.from_numpy(rng.permutation(len(labels)))
        batches = torch.tensor_split(order, max(1, len(labels) // recipe.batch_size))
        for step, rows in enumerate(batches):
            set_rate(optimiser, recipe, (epoch + step / len(batches)) / recipe.epochs)
            optimiser.zero_grad()
            functional.cross_entropy(head(inputs[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    head.eval()

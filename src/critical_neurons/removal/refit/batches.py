"""Batches: calibration inputs split into batches, and from which module on memory suffices for each."""

from __future__ import annotations

import torch
from torch import Tensor

from critical_neurons.removal.refit.dry_run import DryRun

BATCH_SIZE = 64

MOST_BATCHES = 16
"""More inputs make larger batches instead: every batch takes two threads."""

HELD_OUT = 4
"""One in this many batches is held out to choose the regularisation."""

LEAST_INPUTS = 2 * HELD_OUT
"""With fewer inputs at most one would be held out."""

HELD_BYTES = 2**29
"""Memory for all paused passes together."""


def shuffle(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def plan_batches(found: DryRun, run_on: int, rows: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """The batches that join at each module because memory suffices for them from there on, in both models.

    `run_on`: the number of inputs of the dry run.
    """
    joining: dict[str, tuple[Tensor, ...]] = {}
    used = 0
    for place, module in enumerate(found.modules):
        each = max(2 * max(found.held[place:]) // run_on, 1)
        fits = min(max(HELD_BYTES // each, LEAST_INPUTS), len(rows))
        if fits > used and fits >= min(2 * used, len(rows)):  # a few more inputs are not worth further threads
            joining[module] = torch.split(rows[used:fits], _choose_size(fits - used))
            used = fits
    return joining


def _choose_size(count: int) -> int:
    return max(min(BATCH_SIZE, -(-count // (2 * HELD_OUT))), -(-count // MOST_BATCHES))

"""Refitting the layers behind removed units."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from critical_neurons.core.structure import Bools, Structure
from critical_neurons.removal.copies import copy_sharing
from critical_neurons.removal.parametrised import open_attention, plain_weights
from critical_neurons.removal.refit.least_squares import Refit, RowLimit
from critical_neurons.removal.refit.stream import OnOutputs, Stop, refit_modules
from critical_neurons.removal.remove import own_tensors
from critical_neurons.removal.rows import Inputs


def refit_behind(
    original: nn.Module,
    smaller: nn.Module,
    structure: Structure,
    stays: Bools,
    inputs: Inputs,
    method: Refit,
    progress: Callable[[int, int], None] = lambda done, total: None,
    finish: OnOutputs | None = None,
    limit: RowLimit | None = None,
) -> nn.Module:
    """Refit, in place, every layer behind a removed unit to its original outputs, and return the smaller model.

    It may share parameters with the original, which are not changed unless the original's forward writes to them.
    """
    stops, runs = list_stops(structure, stays), open_attention(copy_sharing(original))
    with plain_weights(own_tensors(smaller, original)):
        refit_modules(runs, smaller, stops, inputs, method, progress, finish=finish, limit=limit)
    return smaller


def list_stops(structure: Structure, stays: Bools, *, masked: bool = False) -> list[Stop]:
    """All modules from the first that lost inputs on, in the order of their calls. `masked`: for a model in full
    size, in which removed units are computed but not read."""
    firsts = [at for at, wiring in enumerate(structure.wirings) if wiring.kernel and not stays[wiring.inputs].all()]
    behind = structure.wirings[firsts[0] :] if firsts else ()
    if not masked:
        return [Stop(wiring.module, torch.from_numpy(np.flatnonzero(stays[wiring.outputs]))) for wiring in behind]
    everything = np.ones_like(stays)  # a depthwise convolution passes units through
    return [
        Stop(
            wiring.module,
            torch.arange(len(wiring.outputs)),
            torch.from_numpy((everything if wiring.depthwise else stays)[wiring.inputs]),
        )
        for wiring in behind
    ]

"""Refitting the layers behind removed units."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from critical_neurons.core.structure import Bools, Structure
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.parametrised import open_attention, plain_weights
from critical_neurons.removal.refit.least_squares import Refit
from critical_neurons.removal.refit.stream import OnOutputs, Stop, refit_modules
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
) -> nn.Module:
    """A copy of the smaller model in which every layer behind a removed unit is refitted to its original outputs."""
    stops = list_stops(structure, stays)
    fitted = copy_whole(smaller)
    with plain_weights(fitted):
        refit_modules(open_attention(copy_whole(original)), fitted, stops, inputs, method, progress, finish=finish)
    return fitted


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

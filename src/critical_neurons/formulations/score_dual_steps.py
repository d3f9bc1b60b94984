"""Supergradient steps for the multipliers of `score_dual`, by Adam, and what their bounds decide about the scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from critical_neurons.core.structure import Floats
from critical_neurons.formulations.score_dual import Multipliers, ScoreDual
from critical_neurons.formulations.unit_counts import Box

DECAY, SQUARE_DECAY = 0.9, 0.99
SLOPE_STEP = 0.04
OUTPUT_STEP = 0.04
PRICE_STEP = 0.02
"""Times what is missing to the cutoff."""
LAST_STEP = 0.1
"""The last step, relative to the first."""


class _Adam:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._mean, self._square, self._count = np.zeros(shape), np.zeros(shape), 0

    def __call__(self, gradient: Floats) -> Floats:
        self._count += 1
        self._mean += (1 - DECAY) * (gradient - self._mean)
        self._square += (1 - SQUARE_DECAY) * (gradient**2 - self._square)
        mean = self._mean / (1 - DECAY**self._count)
        return np.asarray(mean / (np.sqrt(self._square / (1 - SQUARE_DECAY**self._count)) + 1e-12))


def raise_bounds(
    dual: ScoreDual, boxes: tuple[Box, Box], start: Multipliers, cutoff: float, steps: int
) -> tuple[Floats, Multipliers, Floats, Floats]:
    """The best bounds found and their multipliers; the best masks met on the way, and their values."""
    limits = dual.bound_elements(boxes[0])
    at = Multipliers(start.outputs.copy(), start.slopes.copy(), start.prices.copy())
    best = Multipliers(start.outputs.copy(), start.slopes.copy(), start.prices.copy())
    bounds = np.full(len(at.outputs), -np.inf)
    slope_adam, price_adam = _Adam(at.slopes.shape), _Adam(at.prices.shape)
    for step in range(steps):
        found = dual.evaluate(at, boxes, limits)
        better = found.bound > bounds
        bounds[better] = found.bound[better]
        best.copy_where(better, at)
        if (bounds >= cutoff).all():
            break
        rate = LAST_STEP ** (step / max(1, steps - 1))
        missing = np.maximum(cutoff - found.bound, 1e-3)[:, None, None]
        at.prices += PRICE_STEP * rate * missing * price_adam(found.prices)
        at.slopes = np.clip(at.slopes + SLOPE_STEP * rate * slope_adam(found.slopes), 0.0, 1.0)
        at.outputs += OUTPUT_STEP * rate * (found.outputs - at.outputs)
    return bounds, best, np.concatenate(found.scores, axis=1), dual.find_values(*found.scores)

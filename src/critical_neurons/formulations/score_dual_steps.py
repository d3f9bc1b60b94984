"""Supergradient steps, by Adam, for the multipliers of `score_dual`, and what its bounds decide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from critical_neurons.core.network import Network
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Bools, Floats
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.convex_hull import Forms
from critical_neurons.formulations.objective import Goal
from critical_neurons.formulations.score_dual import ScoreDual
from critical_neurons.formulations.unit_counts import Box, count_units

DECAY, SQUARE_DECAY = 0.9, 0.99
"""Of Adam's running means."""

PRICE_STEP, SLOPE_STEP, OUTPUT_STEP = 0.003, 0.06, 0.03
"""First steps. That of prices is relative to what the bound lacks; outputs go towards those that attain the bound."""

LAST_STEP = 0.1
"""The last step, relative to the first."""

LACKS = (1e-3, 1.0)
"""Limits of what the bound lacks, for steps."""

MOST_NUMBERS = 10**6
"""With more coefficients of pre-activations linear programs take over."""


class _Adam:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._mean, self._square, self._count = np.zeros(shape), np.zeros(shape), 0

    def __call__(self, gradient: Floats) -> Floats:
        self._count += 1
        self._mean += (1 - DECAY) * (gradient - self._mean)
        self._square += (1 - SQUARE_DECAY) * (gradient**2 - self._square)
        mean = self._mean / (1 - DECAY**self._count)
        return np.asarray(mean / (np.sqrt(self._square / (1 - SQUARE_DECAY**self._count)) + 1e-12))


class ScoreBounds:
    """The bounds of `score_dual` as a `NodeBounds`."""

    def __init__(self, dual: ScoreDual) -> None:
        self._dual = dual
        self._first = len(dual.columns[0])

    @property
    def useless(self) -> Bools:
        return self._dual.useless

    def start(self) -> Floats:
        return np.asarray(self._dual.start().join()[0])

    def raise_bounds(
        self,
        lower: Floats,
        upper: Floats,
        multipliers: Floats,
        *,
        cutoff: float,
        steps: int,
        check: Callable[[], object],
    ) -> tuple[Floats, Floats]:
        dual, boxes = self._dual, self._split(lower, upper)
        limits = dual.bound_elements(boxes[0])
        best = np.array(multipliers, dtype=np.float64)
        at = dual.split(best.copy())
        bounds = np.full(len(best), -np.inf)
        slopes, prices = _Adam(at.slopes.shape), _Adam(at.prices.shape)
        for step in range(steps):
            check()
            found = dual.evaluate(at, boxes, limits)
            better = found.bound > bounds
            bounds[better] = found.bound[better]
            best[better] = at.join()[better]
            if (bounds >= cutoff).all():
                break
            rate = LAST_STEP ** (step / steps)
            lacks = np.clip(cutoff - found.bound, *LACKS)[:, None, None]
            at.prices += PRICE_STEP * rate * lacks * prices(found.prices)
            at.slopes = np.clip(at.slopes + SLOPE_STEP * rate * slopes(found.slopes), 0.0, 1.0)
            at.outputs += OUTPUT_STEP * rate * (found.outputs - at.outputs)
        return bounds, best

    def find_masks(self, lower: Floats, upper: Floats, multipliers: Floats) -> tuple[Floats, Floats]:
        boxes = self._split(lower, upper)
        found = self._dual.evaluate(self._dual.split(multipliers), boxes, self._dual.bound_elements(boxes[0]))
        return np.concatenate(found.scores, axis=1), self._dual.find_values(*found.scores)

    def probe(self, lower: Floats, upper: Floats, multipliers: Floats) -> tuple[Floats, Floats]:
        boxes, split = self._split(lower, upper), self._dual.split(multipliers)
        found = self._dual.evaluate(split, boxes, self._dual.bound_elements(boxes[0]))
        first, second = self._dual.probe(found, split, boxes)
        return np.concatenate([first[0], second[0]], axis=1), np.concatenate([first[1], second[1]], axis=1)

    def _split(self, lower: Floats, upper: Floats) -> tuple[Box, Box]:
        at = self._first
        return Box(lower[:, :at], upper[:, :at]), Box(lower[:, at:], upper[:, at:])


def build_bounds(network: Network, affine: AffineNetwork, program: Program, goal: Goal) -> ScoreBounds | None:
    """For networks of two scored ReLUs, the first with known pre-activations, and goals that count units."""
    indices = [index for index, gate in affine.gates.items() if len(gate.explicit)]
    if len(network.group_sizes) != 2 or len(indices) != 1 or affine.pools or affine.sums:
        return None
    gate = affine.gates[indices[0]]
    first, second = np.split(np.arange(affine.unit_count), [network.group_sizes[0]])
    if affine.column_count * len(gate.explicit) > MOST_NUMBERS or not np.isin(gate.explicit_units, second).all():
        return None
    counts = count_units(goal, network)
    if counts is None:
        return None
    forms = Forms(affine, indices[0], gate, gate.columns)
    if forms.weights[:, len(first) :].any():
        return None
    return ScoreBounds(ScoreDual(forms, (first, second), program, counts))

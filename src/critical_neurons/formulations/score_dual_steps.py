"""Supergradient steps, by Adam, for the multipliers of `score_dual`, and what its bounds decide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from critical_neurons.core.network import Network
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.convex_hull import Forms
from critical_neurons.formulations.objective import Goal
from critical_neurons.formulations.score_dual import DualValue, Multipliers, ScoreDual
from critical_neurons.formulations.unit_counts import Box, count_units

SINGLE: DTypeLike = np.float32
DOUBLE: DTypeLike = np.float64

DECAY, SQUARE_DECAY = 0.8, 0.99
"""Of Adam's running means."""

PRICE_STEP, SLOPE_STEP, OUTPUT_STEP = 0.003, 0.06, 0.1
"""The first of `FEW` steps. That of prices is relative to what the bound lacks; outputs go towards those that attain
the bound."""

FEW = 20
"""With more steps than this, those of prices and outputs are smaller."""

LAST_STEP = 0.1
"""The last step, relative to the first."""

LACKS = (1e-3, 1.0)
"""Limits of what the bound lacks, for steps."""

STILL_GOING = 0.8
"""Nodes that reached the cutoff are dropped once no more than this share is left."""

ROUNDING = 1e-5
"""By how much bounds in single precision must exceed the cutoff, relative to it if it is larger than 1."""

MOST_NUMBERS = 10**6
"""With more coefficients of pre-activations linear programs take over."""


class _Adam:
    def __init__(self, like: Floats) -> None:
        self._mean, self._square, self._count = np.zeros_like(like), np.zeros_like(like), 0

    def keep(self, nodes: Ints) -> None:
        self._mean, self._square = self._mean[:, nodes], self._square[:, nodes]

    def __call__(self, gradient: Floats) -> Floats:
        self._count += 1
        self._mean *= DECAY
        self._mean += (1 - DECAY) * gradient
        self._square *= SQUARE_DECAY
        self._square += (1 - SQUARE_DECAY) * gradient * gradient
        size = np.sqrt(self._square)
        size += 1e-12
        scale = (1 - SQUARE_DECAY**self._count) ** 0.5 / (1 - DECAY**self._count)
        change: Floats = np.divide(self._mean * scale, size, out=size)
        return change


class ScoreBounds:
    """The bounds of `score_dual` as a `NodeBounds`."""

    def __init__(self, dual: ScoreDual) -> None:
        self._dual, self._single = dual, dual.in_single()
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
        dual, boxes = self._single, self._split(lower, upper, SINGLE)
        chords = dual.bound_elements(boxes[0])
        best: Floats = np.array(multipliers, dtype=SINGLE)
        at = dual.split(best)
        bounds, left = np.full(len(best), -np.inf), np.arange(len(best))
        slopes, prices = _Adam(at.slopes), _Adam(at.prices)
        longer = max(1.0, steps / FEW)
        reached = cutoff + ROUNDING * max(1.0, abs(cutoff))
        for step in range(steps):
            check()
            found = dual.evaluate(at, boxes, chords)
            better = np.flatnonzero(found.bound > bounds[left])
            if len(better):
                bounds[left[better]] = found.bound[better]
                best[left[better]] = at.take(better).join()
            rate = LAST_STEP ** (step / steps)
            lacks = np.clip(cutoff - found.bound, *LACKS)[:, None]
            change = prices(found.prices)
            change *= PRICE_STEP / longer**0.25 * rate * lacks
            at.prices += change
            at.slopes += SLOPE_STEP * rate * slopes(found.slopes)
            np.clip(at.slopes, 0.0, 1.0, out=at.slopes)
            at.outputs += OUTPUT_STEP / longer * rate * (found.outputs - at.outputs)
            going = np.flatnonzero(bounds[left] < reached)
            if not len(going):
                break
            if len(going) <= STILL_GOING * len(left):
                left, at, chords = left[going], at.take(going), chords.take(going)
                boxes = boxes[0].take(going), boxes[1].take(going)
                slopes.keep(going)
                prices.keep(going)
        return np.nan_to_num(self._evaluate(lower, upper, best)[0].bound, nan=-np.inf), best

    def find_masks(self, lower: Floats, upper: Floats, multipliers: Floats) -> tuple[Floats, Floats]:
        found, _, _ = self._evaluate(lower, upper, multipliers)
        return np.concatenate(found.scores, axis=1), self._dual.find_values(*found.scores)

    def probe(self, lower: Floats, upper: Floats, multipliers: Floats) -> tuple[Floats, Floats]:
        first, second = self._dual.probe(*self._evaluate(lower, upper, multipliers))
        return np.concatenate([first[0], second[0]], axis=1), np.concatenate([first[1], second[1]], axis=1)

    def _evaluate(
        self, lower: Floats, upper: Floats, multipliers: Floats
    ) -> tuple[DualValue, Multipliers, tuple[Box, Box]]:
        """In double precision: these bounds hold."""
        boxes, split = self._split(lower, upper, DOUBLE), self._dual.split(multipliers)
        return self._dual.evaluate(split, boxes, self._dual.bound_elements(boxes[0])), split, boxes

    def _split(self, lower: Floats, upper: Floats, kind: DTypeLike) -> tuple[Box, Box]:
        at, lower, upper = self._first, lower.astype(kind), upper.astype(kind)
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

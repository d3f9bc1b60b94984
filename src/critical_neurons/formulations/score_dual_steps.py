"""Supergradient steps, by Adam, for the multipliers of `score_dual`, and what its bounds decide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from critical_neurons.core.branching import BoundedNodes
from critical_neurons.core.network import Network
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.convex_hull import Forms
from critical_neurons.formulations.objective import Goal
from critical_neurons.formulations.score_dual import ScoreDual
from critical_neurons.formulations.score_dual_data import DualValue, Multipliers, Nodes
from critical_neurons.formulations.score_dual_probe import probe
from critical_neurons.formulations.unit_counts import Box, count_units

SINGLE: DTypeLike = np.float32
DOUBLE: DTypeLike = np.float64

DECAY, SQUARE_DECAY = 0.8, 0.99
"""Of Adam's running means."""

TINY = 1e-20
"""The first mean of squares, so that nothing is divided by 0."""

PRICE_STEP, SLOPE_STEP, OUTPUT_STEP = 0.008, 0.06, 0.05
"""The first of `FEW` steps. That of prices is relative to what the bound lacks; outputs go towards those that attain
the bound. Chosen for the sub-trees of nodes whose second ReLU is nearly fixed: there most of a tree is."""

FEW = 20
"""With more steps than this, those of prices are smaller."""

LAST_STEP = 0.1
"""The last step, relative to the first."""

LACKS = (1e-2, 1.0)
"""Limits of what the bound lacks, for steps."""

SAME_CASES = 8
"""Steps with the same choice of elements for which both cases are tried."""

STILL_GOING = 0.8
"""Nodes that reached the cutoff are dropped, every `SAME_CASES` steps, once no more than this share is left."""

ROUNDING = 1e-5
"""By how much bounds in single precision must exceed the cutoff, relative to it if it is larger than 1."""

MOST_NUMBERS = 10**6
"""With more coefficients of pre-activations linear programs take over."""


class _Adam:
    def __init__(self, like: Floats) -> None:
        self._mean, self._square, self._count = np.zeros_like(like), np.full_like(like, TINY), 0

    def keep(self, nodes: Ints) -> None:
        self._mean, self._square = self._mean[..., nodes], self._square[..., nodes]

    def move(self, values: Floats, gradient: Floats, step: Floats | float) -> None:
        """Change values in place, by this step for every node. The gradient is overwritten. The running means lack
        the factors 1 - decay, which are applied to the step."""
        self._count += 1
        self._mean *= DECAY
        self._mean += gradient
        np.multiply(gradient, gradient, out=gradient)
        self._square *= SQUARE_DECAY
        self._square += gradient
        np.sqrt(self._square, out=gradient)
        np.divide(self._mean, gradient, out=gradient)
        lengths = [(1 - decay) / (1 - decay**self._count) for decay in (DECAY, SQUARE_DECAY)]
        gradient *= step * np.float32(lengths[0] / lengths[1] ** 0.5)
        values += gradient


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

    def find_values(self, masks: Floats) -> Floats:
        return self._dual.find_values(masks[:, : self._first], masks[:, self._first :])

    def raise_bounds(
        self,
        lower: Floats,
        upper: Floats,
        multipliers: Floats,
        *,
        cutoff: float,
        steps: int,
        check: Callable[[], object],
    ) -> BoundedNodes:
        multipliers = self._take_steps(lower, upper, multipliers, cutoff, steps, check)
        evaluated = self._evaluate(lower, upper, multipliers)
        found = evaluated[0]
        bounds = np.nan_to_num(found.bound, nan=-np.inf)
        zero, one = np.full((2, *lower.shape), -np.inf)
        left = np.flatnonzero(bounds < cutoff)
        if len(left):
            if len(left) < len(lower):
                evaluated = self._evaluate(lower[left], upper[left], multipliers[left])
            zero[left], one[left] = probe(self._dual, *evaluated, cutoff)
        free = lower < upper
        return BoundedNodes(
            bounds=bounds,
            multipliers=multipliers,
            masks=np.concatenate(found.scores, axis=1),
            values=self._dual.find_values(*found.scores),
            lower=np.where(free & (zero >= cutoff), 1.0, lower),
            upper=np.where(free & (one >= cutoff), 0.0, upper),
            probes=(zero, one),
        )

    def _evaluate(self, lower: Floats, upper: Floats, multipliers: Floats) -> tuple[DualValue, Floats, Nodes]:
        """In double precision: these bounds hold."""
        at, nodes, _ = self._start(self._dual, lower, upper, multipliers)
        return self._dual.evaluate(at, nodes), at.prices, nodes

    def _take_steps(
        self,
        lower: Floats,
        upper: Floats,
        multipliers: Floats,
        cutoff: float,
        steps: int,
        check: Callable[[], object],
    ) -> Floats:
        """The multipliers after steps in single precision."""
        dual, counts = self._single, self._single.counts
        at, nodes, boxes = self._start(dual, lower, upper, multipliers)
        result, left, cases = np.empty(multipliers.shape, dtype=SINGLE), np.arange(len(lower)), None
        slopes, prices = _Adam(at.slopes), _Adam(at.prices)
        longer = max(1.0, steps / FEW)
        reached = cutoff + ROUNDING * max(1.0, abs(cutoff))
        for step in range(steps):
            check()
            found = dual.evaluate(at, nodes, cases)
            cases, going = found.cases, None
            if step % SAME_CASES == SAME_CASES - 1:
                cases, going = None, np.flatnonzero(~(found.bound >= reached))
                if len(going) <= STILL_GOING * len(left):
                    result[left] = at.join()
                    if not len(going):
                        return result
            towards = dual.differentiate(found, at, nodes)
            rate = LAST_STEP ** (step / steps)
            lacks = np.clip(cutoff - found.bound, *LACKS) * (PRICE_STEP / longer**0.25 * rate)
            prices.move(at.prices, towards.prices, np.tile(lacks, (at.prices.shape[1], 1)))
            slopes.move(at.slopes, towards.slopes, SLOPE_STEP * rate)
            np.clip(at.slopes, 0.0, 1.0, out=at.slopes)
            towards.outputs -= at.outputs
            towards.outputs *= OUTPUT_STEP * rate
            at.outputs += towards.outputs
            if going is not None and len(going) <= STILL_GOING * len(left):
                left, boxes = left[going], (boxes[0].take(going), boxes[1].take(going))
                at, nodes = at.take(going), Nodes(counts, boxes, nodes.elements.take(going))
                slopes.keep(going)
                prices.keep(going)
        result[left] = at.join()
        return result

    def _start(
        self, dual: ScoreDual, lower: Floats, upper: Floats, multipliers: Floats
    ) -> tuple[Multipliers, Nodes, tuple[Box, Box]]:
        at, kind = self._first, SINGLE if dual is self._single else DOUBLE
        lower, upper = lower.astype(kind), upper.astype(kind)
        boxes = Box(lower[:, :at], upper[:, :at]), Box(lower[:, at:], upper[:, at:])
        nodes, start = Nodes(dual.counts, boxes, dual.bound_elements(boxes[0])), dual.split(multipliers)
        dual.restrict(start, nodes)
        return start, nodes, boxes


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

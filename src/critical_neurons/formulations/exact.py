"""The exact formulation: the masked network itself (method.md, section 5).

The bounds hold for every s in [0, 1] (`bound_network(..., pruned=True)`), the inputs are points, and

    h = max(0, q),   q = p - (1 - s) max(U, 0)

is encoded wherever it is not decided for all s: y U + (1 - z) (L - max(U, 0)) <= q <= y U, y <= z. With scores of 0
or 1 every feasible point is a forward pass of the masked network, and a bound of the program is one on the masked
network's loss. A gate is then open only if its score is 1, which tightens the first row to y U + (1 - z) L <= p, z <=
s.
"""

from __future__ import annotations

import numpy as np

from critical_neurons.core.bounds import Bounds, Interval
from critical_neurons.core.network import Network, Relu
from critical_neurons.core.structure import NO_UNIT, Floats
from critical_neurons.formulations.gates import GateDecision


class ExactGates:
    fixes_windows = False
    completes = True

    def __init__(self, binary: bool) -> None:
        self._binary = binary

    def shrinks(self, network: Network, bounds: Bounds) -> dict[int, Floats]:
        return {
            index: np.where(op.units != NO_UNIT, np.maximum(bounds.before_relu[index].upper, 0.0), 0.0)
            for index, op in enumerate(network.ops)
            if isinstance(op, Relu)
        }

    def decide(self, op: Relu, interval: Interval, shrink: Floats, *, fixed: bool) -> GateDecision:
        """Dead for all scores; live without a score, or with one if p is known, as then q = s p."""
        lower, upper = interval.lower, interval.upper
        dead = upper <= 0
        live = (lower >= 0) & ~dead & ((op.units == NO_UNIT) | (fixed & (lower == upper)))
        least = lower if self._binary else lower - shrink
        return GateDecision(
            live,
            dead,
            np.where(live | dead, -np.inf, least),
            np.where(live | dead, np.inf, upper),
            follow_scores=self._binary,
        )

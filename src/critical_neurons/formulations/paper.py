"""The paper's formulation: bounds of the unpruned network, which keep its activation pattern (method.md, section 5).

With q = p - (1 - s) shrink, equation 2 leaves on every unit, position and data point

    stable     min(L, 0) <= q <= max(U, 0)
    unstable   y U + (1 - z) L <= q,   q <= y U,   y <= z,   where y U is the activation
"""

from __future__ import annotations

import numpy as np

from critical_neurons.core.bounds import Bounds, Interval
from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.loss import Loss
from critical_neurons.core.network import Network, Relu
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.formulations.gates import GateDecision, find_scale
from critical_neurons.formulations.objective import Goal
from critical_neurons.formulations.reduced_space import encode_eliminated
from critical_neurons.formulations.shrinkage import find_shrinks

NEGLIGIBLE = 1e-6
"""An unstable unit whose U is at most this share of its ReLU's largest bound counts as dead: rows may be violated by
as much. Otherwise any positive radius would make every unit with pre-activation 0, as on a black background,
unstable, with coefficients too small for a solver."""


def encode_paper(
    network: Network,
    bounds: Bounds,
    labels: Ints | Loss,
    goal: Goal,
    *,
    integer: bool = True,
    tail: Tail | None = None,
) -> Program:
    return encode_eliminated(network, bounds, labels, goal, PaperGates(), integer=integer, tail=tail)


class PaperGates:
    fixes_windows = False
    completes = False

    def shrinks(self, network: Network, bounds: Bounds) -> dict[int, Floats]:
        return find_shrinks(network, bounds)

    def decide(self, op: Relu, interval: Interval, shrink: Floats, *, fixed: bool) -> GateDecision:
        lower, upper = interval.lower, interval.upper
        dead = (upper <= 0) | ((lower < 0) & (upper <= NEGLIGIBLE * find_scale(interval)))
        ceiling = np.maximum(upper, 0.0)
        if np.array_equal(ceiling, shrink):  # unless a skip lost some before; one copy saves memory
            ceiling = shrink
        return GateDecision((lower >= 0) & ~dead, dead, np.minimum(lower, 0.0), ceiling)

"""The linearised formulation: every gate and max pool fixed as at the data point, and no rows.

The fastest formulation, and a heuristic: the scores found may change a gate. Bounds must be points (radius 0).
"""

from __future__ import annotations

import numpy as np

from critical_neurons.core.bounds import Bounds, Interval
from critical_neurons.core.network import Network, Relu
from critical_neurons.core.structure import Floats
from critical_neurons.formulations.gates import GateDecision
from critical_neurons.formulations.shrinkage import find_shrinks


class LinearisedGates:
    fixes_windows = True
    completes = False

    def shrinks(self, network: Network, bounds: Bounds) -> dict[int, Floats]:
        return find_shrinks(network, bounds)

    def decide(self, op: Relu, interval: Interval, shrink: Floats, *, fixed: bool) -> GateDecision:
        free = np.full(interval.upper.shape, np.inf)
        return GateDecision(interval.upper > 0, interval.upper <= 0, -free, free)

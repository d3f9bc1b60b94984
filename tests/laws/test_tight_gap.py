"""A gap far below the default closes too: no tangent is added twice until the clock runs out."""

import pytest

from critical_neurons.core.solution import Status
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.zoo import ZOO, first_or_slow, share_case

TIGHT = 1e-6
SECONDS = 60.0
RADIUS = 0.05
NARROW = {"mobilenet": 0.005}
"""Radii that leave no more than a few dozen gates, where RADIUS would leave hundreds."""


@pytest.mark.networks(
    *("mlp", "nest", "clamps", "resnet", "grouped convolutions", "tokens", "maxima", "max pool on a stream")
)
@pytest.mark.parametrize("integer", first_or_slow(True, False))
@pytest.mark.parametrize("name", ZOO)
def test_tight_gap_is_reached(name: str, integer: bool) -> None:
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=NARROW.get(name, RADIUS))
    program = encode_paper(case.network, bounds, case.labels, Objective(), integer=integer)
    solution = find_solver("highs").solve(program, Limits(SECONDS, TIGHT), ignore_progress)
    assert solution.status is Status.OPTIMAL
    assert solution.gap is not None
    assert solution.gap <= TIGHT

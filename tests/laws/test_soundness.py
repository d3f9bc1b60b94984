"""Law: whatever the point of the box, its pre-activations stay inside the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from critical_neurons.bounding import bound_network
from critical_neurons.network import MaxPool, Relu
from tests.zoo import ZOO, Case, draw_inputs, share_case

ROUNDING = 1e-12

RADII = st.sampled_from([0.0, 1e-5, 1e-2, 0.3])
SEEDS = st.integers(0, 2**32 - 1)
SHIFTS = st.sampled_from([-5.0, 0.0, 5.0])
"""Whole batches far outside [0, 1] on either side."""


def assert_inside(case: Case, centres, points, radius):
    bounds = bound_network(case.network, centres, radius=radius)
    values = case.network.evaluate(points)
    intervals = {**bounds.before_relu, **bounds.before_pool}
    bounded = {index: op for index, op in enumerate(case.network.ops) if isinstance(op, Relu | MaxPool)}
    assert sorted(intervals) == list(bounded)
    for index, op in bounded.items():
        interval, value = intervals[index], values[op.source]
        slack = ROUNDING * (1.0 + np.abs(value))
        assert np.all(interval.lower - slack <= value)
        assert np.all(value <= interval.upper + slack)


@pytest.mark.parametrize("name", ZOO)
@given(radius=RADII, seed=SEEDS, shift=SHIFTS, corner=st.booleans())
@settings(max_examples=15, deadline=None)
def test_points_of_the_box_stay_inside(name, radius, seed, shift, corner):
    case = share_case(name)
    generator = np.random.default_rng(seed)
    centres = draw_inputs(name, 4, seed % 2**31).numpy() + shift
    steps = generator.uniform(-1.0, 1.0, centres.shape)
    points = centres + radius * (np.sign(steps) if corner else steps)
    assert_inside(case, centres, points, radius)


def test_inputs_of_the_zoo_leave_the_unit_box():
    inputs = draw_inputs("mlp", 100).numpy()
    assert inputs.min() < 0
    assert inputs.max() > 1

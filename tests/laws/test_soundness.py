"""Law: whatever the point of the box and whatever the scores, pre-activations stay inside the bounds."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from critical_neurons.core.formulation import BoundsName
from critical_neurons.core.network import Affine, Concat, Input, MaxPool, Relu, Sum, pool_maximum
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.formulations.bound_propagation import bound_network
from tests.zoo import ZOO, Case, draw_inputs, share_case

ROUNDING = 1e-12

RADII = st.sampled_from([0.0, 1e-5, 1e-2, 0.3])
SEEDS = st.integers(0, 2**32 - 1)
SHIFTS = st.sampled_from([-5.0, 0.0, 5.0])
"""Whole batches far outside [0, 1] on either side."""


METHODS = get_args(BoundsName)


def assert_inside(case: Case, bounds, values):
    intervals = {**bounds.before_relu, **bounds.before_pool}
    bounded = {index: op for index, op in enumerate(case.network.ops) if isinstance(op, Relu | MaxPool)}
    assert sorted(intervals) == list(bounded)
    for index, op in bounded.items():
        interval, value = intervals[index], values[op.source]
        slack = ROUNDING * (1.0 + np.abs(value))
        assert np.all(interval.lower - slack <= value)
        assert np.all(value <= interval.upper + slack)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
@given(radius=RADII, seed=SEEDS, shift=SHIFTS, corner=st.booleans())
def test_points_of_the_box_stay_inside(name, method, radius, seed, shift, corner):
    case = share_case(name)
    generator = np.random.default_rng(seed)
    centres = draw_inputs(name, 4, seed % 2**31).numpy() + shift
    steps = generator.uniform(-1.0, 1.0, centres.shape)
    points = centres + radius * (np.sign(steps) if corner else steps)
    bounds = bound_network(case.network, centres, radius=radius, method=method)
    assert_inside(case, bounds, case.network.evaluate(points))


def evaluate_scored(network, bounds, scores):
    """Every value with h = max(0, p - (1 - s) max(U, 0)) at every ReLU that has a score."""
    values = []
    for index, op in enumerate(network.ops):
        match op:
            case Input():
                values.append(bounds.inputs)
            case Affine():
                values.append(op.map.apply(values[op.source]))
            case Relu():
                taken = (1 - np.append(scores, 1.0)[op.units]) * np.maximum(bounds.before_relu[index].upper, 0)
                values.append(np.maximum(values[op.source] - taken, 0))
            case MaxPool():
                values.append(pool_maximum(op, values[op.source]))
            case Sum():
                values.append(np.sum([values[source] for source in op.sources], axis=0))
            case Concat():
                values.append(np.concatenate([values[source] for source in op.sources], axis=1))
    return values


@pytest.mark.networks(
    *("mlp", "nest", "constants of every channel", "clamps", "resnet", "concatenation on a stream"),
    *("batch norm behind the relu, then padding", "shortcut of slices and zeros", "tokens", "leaky relus", "maxima"),
    *("vgg", "max pool on a stream"),
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
@given(seed=SEEDS, kind=st.sampled_from(["removed or not", "in between", "most of them kept"]))
def test_values_with_any_scores_stay_inside(name, method, seed, kind):
    case = share_case(name)
    centres = draw_inputs(name, 2, seed % 2**31).numpy()
    bounds = bound_network(case.network, centres, pruned=True, method=method)
    scores = np.random.default_rng(seed).uniform(size=case.network.unit_count)
    scores = {"removed or not": np.round(scores), "in between": scores, "most of them kept": scores**0.1}[kind]
    assert_inside(case, bounds, evaluate_scored(case.network, bounds, scores))


def test_scores_matter_somewhere():
    """Otherwise the law above would hold for bounds that know no scores."""
    case = share_case("mlp of three hidden layers")
    bounds = bound_network(case.network, case.inputs)
    assert any((op.units != NO_UNIT).all() for op in case.network.ops if isinstance(op, Relu))
    with pytest.raises(AssertionError):
        assert_inside(case, bounds, evaluate_scored(case.network, bounds, np.zeros(case.network.unit_count)))


def test_inputs_of_the_zoo_leave_the_unit_box():
    inputs = draw_inputs("mlp", 100).numpy()
    assert inputs.min() < 0
    assert inputs.max() > 1

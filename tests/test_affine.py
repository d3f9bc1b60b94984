from __future__ import annotations

import numpy as np
import pytest

from critical_neurons.bounding import bound_network
from critical_neurons.encoding import affine as affine_module
from critical_neurons.encoding.affine import AffineNetwork
from tests.zoo import ZOO, share_case

ROUNDING = 1e-10
RADIUS = 0.1
"""Wide enough to leave explicit activations almost everywhere."""


def build(name):
    case = share_case(name)
    return AffineNetwork(case.network, bound_network(case.network, case.inputs, radius=RADIUS))


def draw_columns(affine, seed=0):
    return np.random.default_rng(seed).uniform(size=affine.column_count)


@pytest.mark.parametrize("name", ZOO)
def test_logit_coefficients_are_differences_of_logits(name):
    affine = build(name)
    origin = affine.logits(np.zeros(affine.column_count))
    batch, classes = origin.shape
    samples = np.repeat(np.arange(batch), classes)
    matrix = affine.differentiate_logits(np.tile(np.eye(classes), (batch, 1)), samples)
    differences = [affine.logits(unit) - origin for unit in np.eye(affine.column_count)]
    assert np.allclose(matrix.toarray(), np.stack([d.reshape(-1) for d in differences], axis=1), atol=ROUNDING)


@pytest.mark.parametrize("name", ZOO)
def test_shrunk_coefficients_are_differences_of_shrunk(name):
    affine = build(name)
    point = draw_columns(affine)
    origin, there = affine.evaluate(np.zeros(affine.column_count)), affine.evaluate(point)
    for index, gate in affine.gates.items():
        elements = np.arange(gate.lower.size)[::-1].copy()  # any order
        matrix = affine.differentiate_shrunk(index, elements)
        expected = (there.shrunk[index] - origin.shrunk[index]).reshape(-1)[elements]
        assert np.allclose(matrix @ point, expected, rtol=0, atol=ROUNDING)
        columns = [affine.evaluate(unit).shrunk[index] - origin.shrunk[index] for unit in np.eye(len(point))]
        differences = np.stack([column.reshape(-1)[elements] for column in columns], axis=1)
        assert np.allclose(matrix.toarray(), differences, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["mlp", "nest", "mean method"])
def test_everything_is_affine(name):
    affine = build(name)
    one, other = draw_columns(affine, 1), draw_columns(affine, 2)
    middle = (affine.logits(one) + affine.logits(other)) / 2
    assert np.allclose(affine.logits((one + other) / 2), middle, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["mlp", "nest"])
def test_several_backward_passes_give_the_same_rows(name, monkeypatch):
    affine = build(name)
    index, gate = max(affine.gates.items())
    elements = np.arange(gate.lower.size)
    at_once = affine.differentiate_shrunk(index, elements).toarray()
    monkeypatch.setattr(affine_module, "CHUNK_BYTES", 1)
    assert np.array_equal(affine.differentiate_shrunk(index, elements).toarray(), at_once)


@pytest.mark.parametrize("name", ZOO)
def test_forward_pass_is_that_of_the_network(name):
    affine, case = build(name), share_case(name)
    columns = affine.forward_pass()
    assert np.all(columns[: affine.unit_count] == 1)
    values = case.network.evaluate(case.inputs)
    for index, gate in affine.gates.items():
        activations = columns[gate.columns] * gate.upper.reshape(-1)[gate.unstable]
        assert np.allclose(activations, values[index].reshape(-1)[gate.unstable], rtol=0, atol=ROUNDING)


def test_no_score_no_loss():
    """A ReLU without units never shrinks."""
    affine = build("view by number")
    first = min(affine.gates)
    assert np.all(affine.gates[first].shrink == 0)
    point = draw_columns(affine)
    assert np.array_equal(affine.evaluate(point).shrunk[first], affine.evaluate(np.ones_like(point)).shrunk[first])

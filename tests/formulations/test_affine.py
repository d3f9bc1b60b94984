from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.formulations import coefficients
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.paper import PaperGates
from critical_neurons.readers import read_network
from tests.zoo import GRAPHS, MAX_POOLED, ZOO, share_case

ROUNDING = 1e-10
RADIUS = 0.1
"""Wide enough to leave explicit activations almost everywhere."""


def build(name):
    case = share_case(name)
    return AffineNetwork(case.network, bound_network(case.network, case.inputs, radius=RADIUS), PaperGates())


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
    shrunk = [affine.evaluate(unit).shrunk for unit in np.eye(len(point))]
    for index, gate in affine.gates.items():
        elements = np.arange(gate.live.size)[::-1].copy()  # any order
        matrix = affine.differentiate_shrunk(index, elements)
        expected = (there.shrunk[index] - origin.shrunk[index]).reshape(-1)[elements]
        assert np.allclose(matrix @ point, expected, rtol=0, atol=ROUNDING)
        columns = [each[index] - origin.shrunk[index] for each in shrunk]
        differences = np.stack([column.reshape(-1)[elements] for column in columns], axis=1)
        assert np.allclose(matrix.toarray(), differences, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["mlp", "nest", "mean method", *GRAPHS, *MAX_POOLED])
def test_everything_is_affine(name):
    affine = build(name)
    one, other = draw_columns(affine, 1), draw_columns(affine, 2)
    middle = (affine.logits(one) + affine.logits(other)) / 2
    assert np.allclose(affine.logits((one + other) / 2), middle, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["mlp", "nest", "densenet", "vgg"])
def test_several_backward_passes_give_the_same_rows(name, monkeypatch):
    affine = build(name)
    index, gate = max(affine.gates.items())
    elements = np.arange(gate.live.size)
    at_once = affine.differentiate_shrunk(index, elements).toarray()
    monkeypatch.setattr(coefficients, "CHUNK_BYTES", 1)
    assert np.array_equal(affine.differentiate_shrunk(index, elements).toarray(), at_once)


@pytest.mark.parametrize("name", ZOO)
def test_columns_of_the_forward_pass_are_those_of_the_network(name):
    affine, case = build(name), share_case(name)
    values = case.network.evaluate(case.inputs)
    columns = affine.columns_of(values)
    assert np.all(columns[: affine.unit_count] == 1)
    for index, part in {**affine.gates, **affine.pools}.items():
        activations = columns[part.columns] * part.tops
        assert np.allclose(activations, values[index].reshape(-1)[part.explicit], rtol=0, atol=ROUNDING)
    there = affine.evaluate(columns)
    for index in affine.gates:
        before = values[case.network.ops[index].source]
        assert np.allclose(there.shrunk[index], before, rtol=0, atol=ROUNDING)
    for index in affine.pools:
        assert np.allclose(there.pooled[index], values[case.network.ops[index].source], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", MAX_POOLED)
def test_pooled_coefficients_are_differences_of_pooled(name):
    affine = build(name)
    assert affine.pools
    point, origin = draw_columns(affine), affine.evaluate(np.zeros(affine.column_count))
    for index in affine.pools:
        elements = np.arange(origin.pooled[index].size)[::-1].copy()  # any order
        matrix = affine.differentiate_pooled(index, elements)
        expected = (affine.evaluate(point).pooled[index] - origin.pooled[index]).reshape(-1)[elements]
        assert np.allclose(matrix @ point, expected, rtol=0, atol=ROUNDING)


def test_no_score_no_loss():
    """A ReLU without units never shrinks."""
    affine = build("view by number")
    first = min(affine.gates)
    assert np.all(affine.gates[first].shrink == 0)
    point = draw_columns(affine)
    assert np.array_equal(affine.evaluate(point).shrunk[first], affine.evaluate(np.ones_like(point)).shrunk[first])


class Twice(nn.Module):
    """Reads one value twice."""

    def __init__(self, join):
        super().__init__()
        self.first, self.last, self.join = nn.Linear(4, 3), nn.Linear(join(torch.zeros(1, 3)).shape[1], 2), join

    def forward(self, inputs):
        return self.last(self.join(self.first(inputs).relu()))


@pytest.mark.parametrize("join", [lambda x: x + x, lambda x: torch.cat([x, x], 1)], ids=["sum", "concatenation"])
def test_a_value_may_be_read_twice_by_one_op(join):
    torch.manual_seed(0)
    model, inputs = Twice(join).eval(), torch.randn(5, 4)
    network = read_network(model, inputs[:1])
    affine = AffineNetwork(network, bound_network(network, inputs.double().numpy(), radius=0.0), PaperGates())
    with torch.no_grad():
        wanted = model.double()(inputs.double()).numpy()
    assert np.allclose(affine.logits(np.ones(affine.column_count)), wanted, rtol=0, atol=1e-6)

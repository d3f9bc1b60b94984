from __future__ import annotations

import numpy as np
import pytest

from critical_neurons.bounding import bound_network
from critical_neurons.encoding import literal as literal_module
from critical_neurons.encoding.literal import encode_literal
from critical_neurons.encoding.objective import Objective
from critical_neurons.network import NO_UNIT, Affine, Input, Relu
from tests.zoo import ZOO, share_case

ROUNDING = 1e-10
RADIUS = 0.05


def encode(name, **settings):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=RADIUS)
    return case, bounds, encode_literal(case.network, bounds, case.labels, Objective(), **settings)


def evaluate_with(network, inputs, activations):
    """The pre-activation of every ReLU, and the logits, when every ReLU gives the next of `activations`."""
    values, before, rest = [], {}, activations
    for index, op in enumerate(network.ops):
        match op:
            case Input():
                values.append(inputs)
            case Affine():
                values.append(op.map.apply(values[op.source]))
            case Relu():
                before[index] = values[op.source]
                here, rest = np.split(rest, [before[index].size])
                values.append(here.reshape(before[index].shape))
    return before, values[-1]


@pytest.mark.parametrize("name", ZOO)
def test_rows_are_those_of_equation_two(name):
    """At a random point, by how much every row is satisfied: (A), (B), (C), computed one ReLU after the other."""
    case, bounds, program = encode(name)
    point = np.random.default_rng(0).normal(size=program.column_count)
    scores = np.append(point[program.blocks["score"]], 1.0)  # the last entry answers for NO_UNIT
    assert NO_UNIT == -1
    h, z = point[program.blocks["activation"]], point[program.blocks["gate"]]
    before, logits = evaluate_with(case.network, case.inputs, h)
    expected, first = [], 0
    for index, p in before.items():
        here = slice(first, first + p.size)
        first += p.size
        interval = bounds.before_relu[index]
        score = np.broadcast_to(scores[case.network.ops[index].units], p.shape)
        q = (p - (1 - score) * np.maximum(interval.upper, 0)).reshape(-1)
        lower, upper = interval.lower.reshape(-1), interval.upper.reshape(-1)
        expected += [q - h[here] - (1 - z[here]) * lower, h[here] - q, z[here] * upper - h[here]]
    values = program.rows.matrix @ point
    slack = np.minimum(values - program.rows.lower, program.rows.upper - values)
    sparsity_rows = len(program.rows) - 3 * len(h)
    assert np.allclose(slack[sparsity_rows:], np.concatenate(expected), rtol=0, atol=ROUNDING)
    assert np.allclose(program.term.model.logits(point), logits, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ZOO)
def test_every_activation_and_gate_is_a_column(name):
    case, bounds, program = encode(name)
    count = sum(interval.lower.size for interval in bounds.before_relu.values())
    sizes = {block: columns.stop - columns.start for block, columns in program.blocks.items()}
    batch = len(case.inputs)
    assert sizes == {
        "score": case.network.unit_count,
        "activation": count,
        "gate": count,
        "sparsity": 1,
        "softmax": batch,
    }
    assert program.sources == ()


@pytest.mark.parametrize("name", ["mlp", "nest", "view by number"])
def test_only_open_gates_are_integer(name):
    _, bounds, program = encode(name)
    unstable = [(i.lower < 0) & (i.upper > 0) for i in bounds.before_relu.values()]
    expected = np.concatenate([mask.reshape(-1) for mask in unstable])
    assert expected.any()
    assert np.array_equal(program.integer[program.blocks["gate"]], expected)
    assert program.integer.sum() == expected.sum()
    assert not encode(name, integer=False)[2].integer.any()


def test_tangents_are_those_of_the_softmax():
    """A cut is tight where it was made and below the term everywhere else."""
    _, _, program = encode("nest")
    there, elsewhere = (np.random.default_rng(seed).uniform(size=program.column_count) for seed in (0, 1))
    which = np.array([2, 0])
    rows = program.term.cuts(there, which)
    tight, below = program.raise_term(there), program.raise_term(elsewhere)
    assert np.allclose(rows.matrix @ tight, rows.lower, rtol=0, atol=ROUNDING)
    assert np.all(rows.matrix @ below >= rows.lower - ROUNDING)


def test_matrices_written_in_pieces_are_the_same(monkeypatch):
    _, _, at_once = encode("nest")
    monkeypatch.setattr(literal_module, "CHUNK_BYTES", 1)
    _, _, in_pieces = encode("nest")
    assert np.allclose(at_once.rows.matrix.toarray(), in_pieces.rows.matrix.toarray(), rtol=0, atol=ROUNDING)

from __future__ import annotations

import numpy as np
import pytest

from critical_neurons.core.network import NO_POSITION, Affine, Concat, Input, MaxPool, Relu, Sum
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.formulations import full_space as literal_module
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.shrinkage import find_shrinks
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
            case Relu() | MaxPool():
                before[index] = values[op.source]
                here, rest = np.split(rest, [len(inputs) * int(np.prod(op.shape))])
                values.append(here.reshape(len(inputs), *op.shape))
            case Sum():
                values.append(sum(values[source] for source in op.sources))
            case Concat():
                values.append(np.concatenate([values[source] for source in op.sources], axis=1))
    return before, values[-1]


def judge_pool(op, interval, read, value, choices):
    """By how much x >= h_i, x <= h_i + M (1 - m_i) and sum m_i = 1 hold, by window; and its number of choices."""
    windows = [
        (data, channel, out, [position for position in op.windows[out] if position != NO_POSITION])
        for data in range(len(read))
        for channel in range(read.shape[1])
        for out in range(len(op.windows))
    ]
    above, below, total, first = [], [], [], 0
    for data, channel, out, positions in windows:
        x = value.reshape(*value.shape[:2], -1)[data, channel, out]
        h = read[data, channel].reshape(-1)[positions]
        top = max(0.0, interval.upper[data, channel].reshape(-1)[positions].max())
        m = choices[first : first + len(positions)]
        first += len(positions)
        above.append(x - h)
        below.append(h + top * (1 - m) - x)
        total.append(-abs(m.sum() - 1))
    return [*above, *below, np.array(total)], first


@pytest.mark.parametrize("name", ZOO)
def test_rows_are_those_of_equation_two(name):
    """At a random point, by how much every row is satisfied: (A), (B), (C), computed one ReLU after the other."""
    case, bounds, program = encode(name)
    point = np.random.default_rng(0).normal(size=program.column_count)
    scores = np.append(point[program.blocks["score"]], 1.0)  # the last entry answers for NO_UNIT
    assert NO_UNIT == -1
    h, z = point[program.blocks["activation"]], point[program.blocks["gate"]]
    before, logits = evaluate_with(case.network, case.inputs, h)
    shrinks = find_shrinks(case.network, bounds)
    expected, h_rest, z_rest = [], h, z
    for index, p in before.items():
        op = case.network.ops[index]
        here, h_rest = np.split(h_rest, [len(p) * int(np.prod(op.shape))])
        if isinstance(op, MaxPool):
            slacks, used = judge_pool(op, bounds.before_pool[index], p, here.reshape(len(p), *op.shape), z_rest)
            expected += slacks
        else:
            interval, used = bounds.before_relu[index], p.size
            score = np.broadcast_to(scores[op.units], p.shape)
            q = (p - (1 - score) * shrinks[index]).reshape(-1)
            lower, upper = interval.lower.reshape(-1), interval.upper.reshape(-1)
            expected += [q - here - (1 - z_rest[:used]) * lower, here - q, z_rest[:used] * upper - here]
        z_rest = z_rest[used:]
    assert h_rest.size == z_rest.size == 0
    values = program.rows.matrix @ point
    slack = np.minimum(values - program.rows.lower, program.rows.upper - values)
    assert np.allclose(slack[len(case.network.group_sizes) :], np.concatenate(expected), rtol=0, atol=ROUNDING)
    assert np.allclose(program.term.model.logits(point), logits, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ZOO)
def test_every_activation_and_gate_is_a_column(name):
    case, bounds, program = encode(name)
    count = sum(interval.lower.size for interval in bounds.before_relu.values())
    pools = [op for op in case.network.ops if isinstance(op, MaxPool)]
    pooled = len(case.inputs) * sum(int(np.prod(op.shape)) for op in pools)
    choices = len(case.inputs) * sum(op.shape[0] * int((op.windows != NO_POSITION).sum()) for op in pools)
    sizes = {block: columns.stop - columns.start for block, columns in program.blocks.items()}
    batch = len(case.inputs)
    assert sizes == {
        "score": case.network.unit_count,
        "activation": count + pooled,
        "gate": count + choices,
        "sparsity": 1,
        "softmax": batch,
    }
    assert program.sources == ()


@pytest.mark.parametrize("name", ["mlp", "nest", "view by number", "resnet"])
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

"""Encoding: the paper's program as printed, every activation h and every gate z a column (method.md, section 2).

On every ReLU, position and data point, with q = p - (1 - s) max(U, 0):

    h + (1 - z) L <= q     (A)
    h             >= q     (B)
    h             <= z U   (C)

Nothing is eliminated, so this is the yardstick of the eliminated program, not the one to use on a large network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from scipy import sparse

from critical_neurons.bounds import Bounds, Interval
from critical_neurons.encoding.affine import CHUNK_BYTES
from critical_neurons.encoding.columns import assemble_program, lay_out_columns
from critical_neurons.encoding.objective import Objective
from critical_neurons.encoding.softmax import SoftmaxTerm
from critical_neurons.network import NO_UNIT, Affine, Floats, Input, Ints, LinearMap, Network, Relu, Shape
from critical_neurons.program import Program, Rows, stack_rows


def encode_literal(
    network: Network, bounds: Bounds, labels: Ints, objective: Objective, *, integer: bool = True
) -> Program:
    intervals = bounds.before_relu
    values = network.evaluate(bounds.inputs)
    activations = np.concatenate([values[index].reshape(-1) for index in intervals])
    blocks = lay_out_columns(network.unit_count, len(activations), len(bounds.inputs))
    logits, rows = _write_out(network, bounds, blocks)
    # A decided gate needs no integrality: (A) and (B) leave z = 1 where L > 0, (C) z = 0 where U < 0, and where
    # an end is 0 the activation is the same for every z.
    unstable = [((interval.lower < 0) & (interval.upper > 0)).reshape(-1) for interval in intervals.values()]
    return assemble_program(
        blocks,
        objective,
        network.sizes,
        SoftmaxTerm(logits, labels, blocks["softmax"], blocks["softmax"].stop),
        rows=rows,
        sources=(),
        activations=activations,
        integer_gates=np.concatenate(unstable) & integer,
    )


@dataclass(frozen=True)
class Form:
    """A value of the network on the whole batch as a function of the columns: matrix · x + constant.

    The constant is (batch, *shape); the matrix has one row for each of its elements.
    """

    matrix: sparse.csr_array
    constant: Floats


@dataclass(frozen=True)
class MatrixLogits:
    """Logits with their matrix (batch · classes, columns) written out."""

    form: Form

    def logits(self, point: Floats) -> Floats:
        constant = self.form.constant
        result: Floats = (self.form.matrix @ point).reshape(constant.shape) + constant
        return result

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        rows, classes = seeds.shape
        columns = samples[:, None] * classes + np.arange(classes)
        indptr = np.arange(rows + 1) * classes
        chosen = sparse.csr_array(
            (seeds.reshape(-1), columns.reshape(-1), indptr), shape=(rows, self.form.constant.size)
        )
        return sparse.csr_array(chosen @ self.form.matrix)


def _write_out(network: Network, bounds: Bounds, blocks: Mapping[str, slice]) -> tuple[MatrixLogits, Rows]:
    """The logits and the rows (A), (B), (C) of every ReLU."""
    column_count = blocks["softmax"].stop
    forms: list[Form] = []
    rows: list[Rows] = []
    first = 0
    for index, op in enumerate(network.ops):
        match op:
            case Input():
                nothing = sparse.csr_array((bounds.inputs.size, column_count))
                forms.append(Form(nothing, bounds.inputs))
            case Affine():
                forms.append(_push(forms[op.source], op.map))
            case Relu():
                before = forms[op.source]
                numbers = np.arange(first, first + before.constant.size)
                activation = _choose(blocks["activation"].start + numbers, column_count)
                gate = _choose(blocks["gate"].start + numbers, column_count)
                rows += _encode_relu(op, bounds.before_relu[index], before, activation, gate)
                forms.append(Form(activation, np.zeros_like(before.constant)))
                first += len(numbers)
            case _:
                assert_never(op)
    return MatrixLogits(forms[-1]), stack_rows(rows, column_count)


def _encode_relu(
    op: Relu, interval: Interval, before: Form, activation: sparse.csr_array, gate: sparse.csr_array
) -> list[Rows]:
    """(A) q - h + L z >= L,   (B) q - h <= 0,   (C) h - U z <= 0,   with q = p - shrink + shrink s."""
    lower, upper = interval.lower.reshape(-1), interval.upper.reshape(-1)
    units = np.broadcast_to(op.units, before.constant.shape).reshape(-1)
    shrink = np.where(units != NO_UNIT, np.maximum(upper, 0.0), 0.0)
    scored = np.flatnonzero(units != NO_UNIT)
    own = sparse.csr_array((shrink[scored], (scored, units[scored])), shape=before.matrix.shape)
    below = sparse.csr_array(before.matrix + own - activation)
    offset = before.constant.reshape(-1) - shrink
    nothing = np.full(len(lower), np.inf)
    return [
        Rows(sparse.csr_array(below + _scale_rows(gate, lower)), lower - offset, nothing),
        Rows(below, -nothing, -offset),
        Rows(sparse.csr_array(activation - _scale_rows(gate, upper)), -nothing, np.zeros(len(upper))),
    ]


def _push(form: Form, linear: LinearMap) -> Form:
    """A (M x + c) + b: the same A for every data point."""
    constant = linear.apply(form.constant)
    if form.matrix.nnz == 0:  # still the input: its weights multiply no column
        return Form(sparse.csr_array((constant.size, form.matrix.shape[1])), constant)
    weights = sparse.block_diag([_write_out_map(linear, form.constant.shape[1:])] * len(constant), format="csr")
    return Form(sparse.csr_array(weights @ form.matrix), constant)


def _write_out_map(linear: LinearMap, shape: Shape) -> sparse.csr_array:
    """The matrix of a linear map on inputs of the shape: its columns are the images of the unit vectors."""
    size = int(np.prod(shape))
    width = max(size, linear.apply_linear(np.zeros((1, *shape))).size)
    step = max(1, CHUNK_BYTES // (8 * width))
    images = []
    for first in range(0, size, step):
        units = np.eye(min(step, size - first), size, first)
        image = linear.apply_linear(units.reshape(-1, *shape))
        images.append(sparse.csr_array(image.reshape(len(units), -1)))
    return sparse.csr_array(sparse.vstack(images, format="csr").T)


def _choose(columns: Ints, column_count: int) -> sparse.csr_array:
    """One row per chosen column, with a 1 in it."""
    count = len(columns)
    return sparse.csr_array((np.ones(count), columns, np.arange(count + 1)), shape=(count, column_count))


def _scale_rows(matrix: sparse.csr_array, factors: Floats) -> sparse.csr_array:
    return sparse.csr_array(sparse.diags_array(factors) @ matrix)

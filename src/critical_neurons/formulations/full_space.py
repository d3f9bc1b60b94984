"""Full space: the paper's program as printed, every activation h and every gate z a column (method.md, section 2).

On every ReLU, position and data point, with q = p - (1 - s) max(U, 0):

    h + (1 - z) L <= q     (A)
    h             >= q     (B)
    h             <= z U   (C)

Nothing is eliminated. This program is too large for large networks; the eliminated one is tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from scipy import sparse

from critical_neurons.core.bounds import Bounds, Interval
from critical_neurons.core.deadline import check_time
from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.loss import Loss, as_loss
from critical_neurons.core.network import (
    NO_POSITION,
    Affine,
    Concat,
    Input,
    LinearMap,
    MaxPool,
    Network,
    Op,
    Relu,
    Shape,
    Sum,
    add_up,
    join_channels,
    pool_maximum,
    spread_windows,
)
from critical_neurons.core.program import Program, Rows, place, stack_rows
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints
from critical_neurons.formulations.coefficients import CHUNK_BYTES
from critical_neurons.formulations.loss_term import LossTerm, follow
from critical_neurons.formulations.objective import Goal
from critical_neurons.formulations.program_assembly import assemble_program, lay_out_columns
from critical_neurons.formulations.shrinkage import find_shrinks


def encode_literal(
    network: Network,
    bounds: Bounds,
    labels: Ints | Loss,
    goal: Goal,
    *,
    integer: bool = True,
    tail: Tail | None = None,
) -> Program:
    values = network.evaluate(bounds.inputs)
    explicit = [index for index, op in enumerate(network.ops) if isinstance(op, Relu | MaxPool)]
    activations = np.concatenate([values[index].reshape(-1) for index in explicit])
    gates, integral = zip(
        *(_start_gates(network.ops[index], index, bounds, values) for index in explicit), strict=True
    )
    start = np.concatenate(gates)
    blocks = lay_out_columns(network.unit_count, len(activations), len(start), len(bounds.inputs))
    logits, rows = _write_out(network, bounds, blocks)
    return assemble_program(
        blocks,
        goal,
        network,
        LossTerm(follow(logits, tail), as_loss(labels), blocks["softmax"], blocks["softmax"].stop),
        rows=rows,
        sources=(),
        activations=activations,
        gates=start,
        integer=np.concatenate(integral) & integer,
    )


def _start_gates(op: Op, index: int, bounds: Bounds, values: list[Floats]) -> tuple[Bools, Bools]:
    """The gates of a ReLU or the choices of a max pool in the unpruned network, and which of them must be integer.

    Decided gates need not: (A) and (B) imply z = 1 if L > 0, (C) implies z = 0 if U < 0, and if a bound is 0 the
    activation does not depend on z.
    """
    if isinstance(op, MaxPool):
        windows = spread_windows(op, values[op.source])
        best = windows.argmax(axis=3)[..., None] == np.arange(windows.shape[3])
        inside = np.broadcast_to(op.windows != NO_POSITION, best.shape)
        return best[inside], np.ones(int(inside.sum()), dtype=bool)
    interval = bounds.before_relu[index]
    return values[index].reshape(-1) > 0, ((interval.lower < 0) & (interval.upper > 0)).reshape(-1)


@dataclass(frozen=True)
class ColumnForm:
    """A value of the network on the whole batch as a function of the columns: matrix · x + constant.

    The constant is (batch, *shape); the matrix has one row for each of its elements.
    """

    matrix: sparse.csr_array
    constant: Floats


@dataclass(frozen=True)
class MatrixLogits:
    """Logits with an explicit matrix (batch · classes, columns)."""

    form: ColumnForm

    def logits(self, point: Floats) -> Floats:
        constant = self.form.constant
        result: Floats = (self.form.matrix @ point).reshape(constant.shape) + constant
        return result

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        rows, width = seeds.shape
        columns = samples[:, None] * width + np.arange(width)
        indptr = np.arange(rows + 1) * width
        chosen = sparse.csr_array(
            (seeds.reshape(-1), columns.reshape(-1), indptr), shape=(rows, self.form.constant.size)
        )
        return sparse.csr_array(chosen @ self.form.matrix)


def _write_out(network: Network, bounds: Bounds, blocks: Mapping[str, slice]) -> tuple[MatrixLogits, Rows]:
    """The logits and the rows (A), (B), (C) of every ReLU."""
    column_count = blocks["softmax"].stop
    forms: list[ColumnForm] = []
    rows: list[Rows] = []
    shrinks = find_shrinks(network, bounds)
    first, first_gate = blocks["activation"].start, blocks["gate"].start
    for index, op in enumerate(network.ops):
        check_time()
        match op:
            case Input():
                nothing = sparse.csr_array((bounds.inputs.size, column_count))
                forms.append(ColumnForm(nothing, bounds.inputs))
            case Affine():
                forms.append(_push(forms[op.source], op.map))
            case Relu():
                before = forms[op.source]
                numbers = np.arange(before.constant.size)
                activation = place(1.0, first + numbers, column_count)
                gate = place(1.0, first_gate + numbers, column_count)
                rows += _encode_relu(op, bounds.before_relu[index], shrinks[index], before, activation, gate)
                forms.append(ColumnForm(activation, np.zeros_like(before.constant)))
                first, first_gate = first + len(numbers), first_gate + len(numbers)
            case MaxPool():
                value = ColumnForm(
                    place(1.0, first + np.arange(len(bounds.inputs) * int(np.prod(op.shape))), column_count),
                    np.zeros((len(bounds.inputs), *op.shape)),
                )
                pool_rows = _encode_pool(op, bounds.before_pool[index], forms[op.source], value, first_gate)
                rows += pool_rows
                forms.append(value)
                first, first_gate = first + value.constant.size, first_gate + len(pool_rows[0])
            case Sum():
                added = [forms[source] for source in op.sources]
                matrix = sum((form.matrix for form in added[1:]), added[0].matrix)
                forms.append(ColumnForm(sparse.csr_array(matrix), add_up(*(form.constant for form in added))))
            case Concat():
                forms.append(_join([forms[source] for source in op.sources]))
            case _:
                assert_never(op)
    return MatrixLogits(forms[-1]), stack_rows(rows, column_count)


def _encode_relu(
    op: Relu,
    interval: Interval,
    shrinks: Floats,
    before: ColumnForm,
    activation: sparse.csr_array,
    gate: sparse.csr_array,
) -> list[Rows]:
    """(A) q - h + L z >= L,   (B) q - h <= 0,   (C) h - U z <= 0,   with q = p - shrink + shrink s."""
    lower, upper = interval.lower.reshape(-1), interval.upper.reshape(-1)
    units = np.broadcast_to(op.units, before.constant.shape).reshape(-1)
    shrink = np.broadcast_to(shrinks, before.constant.shape).reshape(-1)
    scored = np.flatnonzero(units != NO_UNIT)
    own = sparse.csr_array((shrink[scored], (scored, units[scored])), shape=before.matrix.shape)
    below = sparse.csr_array(before.matrix + (own - activation))
    check_time()
    offset = before.constant.reshape(-1) - shrink
    nothing = np.full(len(lower), np.inf)
    return [
        Rows(sparse.csr_array(below + _scale_rows(gate, lower)), lower - offset, nothing),
        Rows(below, -nothing, -offset),
        Rows(sparse.csr_array(activation - _scale_rows(gate, upper)), -nothing, np.zeros(len(upper))),
    ]


def _encode_pool(
    op: MaxPool, interval: Interval, before: ColumnForm, value: ColumnForm, first_gate: int
) -> list[Rows]:
    """x >= h_i,   x <= h_i + M (1 - m_i),   sum m_i = 1,   with M = max_j U_j, for every window."""
    inside = np.broadcast_to(op.windows != NO_POSITION, (*value.constant.shape[:2], *op.windows.shape)).reshape(-1)
    numbers = np.arange(before.constant.size, dtype=np.float64).reshape(before.constant.shape)
    elements = spread_windows(op, numbers, -1.0).reshape(-1)[inside].astype(np.int64)
    windows = np.repeat(np.arange(value.constant.size), op.windows.shape[1])[inside]
    tops = np.maximum(pool_maximum(op, interval.upper).reshape(-1), 0.0)[windows]
    over = sparse.csr_array(value.matrix[windows] - before.matrix[elements])
    offset = before.constant.reshape(-1)[elements]
    choice = place(1.0, first_gate + np.arange(len(elements)), over.shape[1])
    totals = sparse.csr_array(
        (np.ones(len(elements)), (windows, first_gate + np.arange(len(elements)))),
        shape=(value.constant.size, over.shape[1]),
    )
    nothing, one = np.full(len(elements), np.inf), np.ones(value.constant.size)
    return [
        Rows(over, offset, nothing),
        Rows(sparse.csr_array(over + _scale_rows(choice, tops)), -nothing, tops + offset),
        Rows(totals, one, one),
    ]


def _join(forms: list[ColumnForm]) -> ColumnForm:
    """Concatenation along channels, for every data point."""
    constant = join_channels(*(form.constant for form in forms))
    stacked = sparse.csr_array(sparse.vstack([form.matrix for form in forms], format="csr"))
    firsts = np.cumsum([0, *(form.constant.size for form in forms)])[:-1]
    numbers = [first + np.arange(form.constant.size) for first, form in zip(firsts, forms, strict=True)]
    order = np.concatenate(
        [number.reshape(form.constant.shape) for number, form in zip(numbers, forms, strict=True)], axis=1
    )
    return ColumnForm(stacked[order.reshape(-1)], constant)


def _push(form: ColumnForm, linear: LinearMap) -> ColumnForm:
    """A (M x + c) + b: the same A for every data point."""
    constant = linear.apply(form.constant)
    if form.matrix.nnz == 0:  # still the input, which has no columns
        return ColumnForm(sparse.csr_array((constant.size, form.matrix.shape[1])), constant)
    weights = sparse.block_diag([_write_out_map(linear, form.constant.shape[1:])] * len(constant), format="csr")
    check_time()
    return ColumnForm(sparse.csr_array(weights @ form.matrix), constant)


def _write_out_map(linear: LinearMap, shape: Shape) -> sparse.csr_array:
    """The matrix of a linear map on inputs of the shape: its columns are the images of the unit vectors."""
    size = int(np.prod(shape))
    width = max(size, linear.apply_linear(np.zeros((1, *shape))).size)
    step = max(1, CHUNK_BYTES // (8 * width))
    images = []
    for first in range(0, size, step):
        check_time()
        units = np.eye(min(step, size - first), size, first)
        image = linear.apply_linear(units.reshape(-1, *shape))
        images.append(sparse.csr_array(image.reshape(len(units), -1)))
    return sparse.csr_array(sparse.vstack(images, format="csr").T)


def _scale_rows(matrix: sparse.csr_array, factors: Floats) -> sparse.csr_array:
    return sparse.csr_array(sparse.diags_array(factors) @ matrix)

"""Encoding: the paper's program after exact elimination; same optimum, hardly any columns (method.md, section 3).

Columns: the scores, activations and gates of the unstable units only, the sparsity term, one softmax value per
data point. With q = p - (1 - s) max(U, 0), affine in the columns, equation 2 leaves on every unit and position

    stable     min(L, 0) <= q <= max(U, 0)
    unstable   y U + (1 - z) L <= q,   q <= y U,   y <= z,   where y U is the activation

far too many to write out: they are added when violated.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from scipy import sparse

from critical_neurons.bounds import Bounds
from critical_neurons.encoding.affine import AffineNetwork, Gate
from critical_neurons.encoding.columns import assemble_program, lay_out_columns
from critical_neurons.encoding.objective import Objective
from critical_neurons.encoding.softmax import SoftmaxTerm
from critical_neurons.network import Floats, Ints, Network
from critical_neurons.program import Program, Rows, stack_rows, widen

PIECE_ELEMENTS = 2 * 10**7
"""Numbers a backward pass may touch: a second or so of work."""


def encode_paper(
    network: Network, bounds: Bounds, labels: Ints, objective: Objective, *, integer: bool = True
) -> Program:
    affine = AffineNetwork(network, bounds)
    blocks = lay_out_columns(affine.unit_count, affine.unstable_count, affine.batch_size)
    column_count = blocks["softmax"].stop
    return assemble_program(
        blocks,
        objective,
        network.sizes,
        SoftmaxTerm(affine, labels, blocks["softmax"], column_count),
        rows=_encode_gate_limits(affine.unstable_count, blocks, column_count),
        sources=(ReluRows(affine, blocks["gate"].start, column_count),),
        activations=affine.forward_pass()[blocks["activation"]],
        integer_gates=np.full(affine.unstable_count, integer),
    )


class ReluRows:
    """The rows of every ReLU, numbered ReLU by ReLU in the order (data point, *shape)."""

    def __init__(self, affine: AffineNetwork, first_gate: int, column_count: int) -> None:
        self._affine = affine
        self._first_gate = first_gate
        self._column_count = column_count
        self._ends = np.cumsum([gate.lower.size for gate in affine.gates.values()])

    @property
    def count(self) -> int:
        return int(self._ends[-1])

    @property
    def piece(self) -> int:
        return max(1, PIECE_ELEMENTS // self._affine.size)

    @cached_property
    def _offsets(self) -> dict[int, Floats]:
        return self._affine.evaluate(np.zeros(self._column_count)).shrunk

    def violations(self, point: Floats) -> Floats:
        shrunk = self._affine.evaluate(point).shrunk
        parts = []
        for index, gate in self._affine.gates.items():
            lower, upper = self._limits(gate, point)
            q = shrunk[index].reshape(-1)
            parts.append(np.maximum(lower - q, q - upper) / gate.scale)
        return np.concatenate(parts)

    def _limits(self, gate: Gate, point: Floats) -> tuple[Floats, Floats]:
        lower = np.minimum(gate.lower, 0.0).reshape(-1)
        upper = np.maximum(gate.upper, 0.0).reshape(-1)
        if len(gate.unstable):
            activation, z = gate.tops * point[gate.columns], point[self._gate_columns(gate)]
            lower[gate.unstable] = activation + (1.0 - z) * gate.lower.reshape(-1)[gate.unstable]
            upper[gate.unstable] = activation
        return lower, upper

    def build(self, numbers: Ints) -> Rows:
        owners = np.searchsorted(self._ends, numbers, side="right")
        parts = []
        for position, (index, gate) in enumerate(self._affine.gates.items()):
            elements = numbers[owners == position] - (self._ends[position] - gate.lower.size)
            if len(elements):
                parts.append(self._build_gate(index, gate, elements))
        return stack_rows(parts, self._column_count)

    def _build_gate(self, index: int, gate: Gate, elements: Ints) -> Rows:
        forms = widen(self._affine.differentiate_shrunk(index, elements), self._column_count)
        offset = self._offsets[index].reshape(-1)[elements]
        unstable = np.isin(elements, gate.unstable)
        stable = elements[~unstable]
        parts = [
            Rows(
                forms[np.flatnonzero(~unstable)],
                np.minimum(gate.lower.reshape(-1)[stable], 0.0) - offset[~unstable],
                np.maximum(gate.upper.reshape(-1)[stable], 0.0) - offset[~unstable],
            )
        ]
        if unstable.any():
            parts += self._build_unstable(gate, elements[unstable], forms[np.flatnonzero(unstable)], offset[unstable])
        return _normalise(stack_rows(parts, self._column_count), gate.scale)

    def _build_unstable(self, gate: Gate, elements: Ints, forms: sparse.csr_array, offset: Floats) -> list[Rows]:
        """q - y U + L z >= L and q - y U <= 0."""
        numbers = np.searchsorted(gate.unstable, elements)
        rows = np.arange(len(elements))
        lower = gate.lower.reshape(-1)[elements]
        activation = sparse.csr_array((gate.tops[numbers], (rows, gate.first + numbers)), shape=forms.shape)
        z = sparse.csr_array((lower, (rows, self._gate_columns(gate).start + numbers)), shape=forms.shape)
        nothing = np.full(len(elements), np.inf)
        below = sparse.csr_array(forms - activation)
        return [Rows(sparse.csr_array(below + z), lower - offset, nothing), Rows(below, -nothing, -offset)]

    def _gate_columns(self, gate: Gate) -> slice:
        first = self._first_gate + gate.first - self._affine.unit_count
        return slice(first, first + len(gate.unstable))


def _encode_gate_limits(count: int, blocks: dict[str, slice], column_count: int) -> Rows:
    """y <= z."""
    rows = np.arange(count)
    columns = np.concatenate([blocks["activation"].start + rows, blocks["gate"].start + rows])
    signs = np.repeat([1.0, -1.0], count)
    matrix = sparse.csr_array((signs, (np.tile(rows, 2), columns)), shape=(count, column_count))
    return Rows(matrix, np.full(count, -np.inf), np.zeros(count))


def _normalise(rows: Rows, scale: float) -> Rows:
    """Each row divided by its largest coefficient, so that one tolerance fits all; nearly empty rows by the scale."""
    largest = abs(rows.matrix).max(axis=1).toarray().reshape(-1)
    largest[largest < 1e-6 * scale] = scale
    matrix = sparse.csr_array(sparse.diags_array(1.0 / largest) @ rows.matrix)
    return Rows(matrix, rows.lower / largest, rows.upper / largest)

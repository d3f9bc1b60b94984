"""Lazy constraints of the eliminated program: checked by a forward pass, built by backward passes when violated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Rows, place, stack_rows, widen
from critical_neurons.core.structure import NO_UNIT, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.pooled_columns import Sums

NUMBERS_AT_ONCE = 2 * 10**7
"""Numbers computed by the backward passes of one call: about a second of work."""


SUM_ROWS_AT_ONCE = 10**5
"""Rows of sums built between two checks of the deadline; each has two coefficients."""

_Part = TypeVar("_Part")


class NumberedRows(Generic[_Part]):
    """Rows of the `parts` of a network, by the index of their op, numbered part by part."""

    def __init__(self, parts: Mapping[int, _Part], sizes: Sequence[int], column_count: int) -> None:
        self._parts, self._column_count = parts, column_count
        self.ends: Ints = np.cumsum([0, *sizes])[1:]

    @property
    def count(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def row_count(self) -> int:
        return self.count

    @property
    def defining(self) -> Ints:
        return np.arange(self.count)

    @property
    def block_count(self) -> int:
        return 1

    def find_violated(self, point: Floats, block: int, least: float) -> tuple[Ints, Floats]:
        violations = self.violations(point)
        numbers = np.flatnonzero(violations > least)
        return numbers, violations[numbers]

    def label(self, numbers: Ints) -> Ints:
        """By part of the network; a subclass knows the units."""
        return np.searchsorted(self.ends, numbers, side="right")

    def violations(self, point: Floats) -> Floats:
        judged = [self._judge(index, part, point) for index, part in self._parts.items()]
        return np.concatenate([np.zeros(0), *judged])

    def build(self, numbers: Ints) -> Rows:
        owners = np.searchsorted(self.ends, numbers, side="right")
        starts = np.concatenate([[0], self.ends])
        rows: list[Rows] = []
        for owner, (index, part) in enumerate(self._parts.items()):
            own = numbers[owners == owner] - starts[owner]
            if len(own):
                rows += self._build_part(index, part, own)
        return stack_rows(rows, self._column_count)

    def _judge(self, index: int, part: _Part, point: Floats) -> Floats:
        """The violations of the rows of one part."""
        raise NotImplementedError

    def _build_part(self, index: int, part: _Part, numbers: Ints) -> list[Rows]:
        """Rows of one part, by their numbers within it."""
        raise NotImplementedError


class AffineRows(NumberedRows[_Part]):
    """Rows that take a backward pass each."""

    def __init__(
        self, affine: AffineNetwork, parts: Mapping[int, _Part], sizes: Sequence[int], column_count: int
    ) -> None:
        super().__init__(parts, sizes, column_count)
        self._affine = affine

    @property
    def rows_at_once(self) -> int:
        return max(1, NUMBERS_AT_ONCE // self._affine.size)


class ReluRows(AffineRows[Gate]):
    """Equations 8 and 9 for every ReLU, numbered ReLU by ReLU in the order (data point, *shape).

    `gate_columns` holds the columns of each ReLU's gates.
    """

    def __init__(self, affine: AffineNetwork, gate_columns: Mapping[int, slice], column_count: int) -> None:
        super().__init__(affine, affine.gates, [gate.floor.size for gate in affine.gates.values()], column_count)
        self._gate_columns = gate_columns

    @property
    def row_count(self) -> int:
        return self.count + sum(len(gate.explicit) for gate in self._affine.gates.values())

    @property
    def defining(self) -> Ints:
        starts = np.concatenate([[0], self.ends[:-1]])
        return np.concatenate(
            [start + gate.explicit for start, gate in zip(starts, self._affine.gates.values(), strict=True)]
        )

    @property
    def block_count(self) -> int:
        return len(self._affine.blocks)

    def find_violated(self, point: Floats, block: int, least: float) -> tuple[Ints, Floats]:
        if self.block_count == 1:
            return super().find_violated(point, block, least)
        part = self._affine.blocks[block]
        first = sum(each.batch_size for each in self._affine.blocks[:block])
        shrunk = part.evaluate(point).shrunk
        found: list[Ints] = [np.zeros(0, dtype=np.int64)]
        amounts: list[Floats] = [np.zeros(0)]
        for start, (index, gate) in zip([0, *self.ends[:-1]], part.gates.items(), strict=True):
            if index not in self._affine.settled:
                q = shrunk[index]
                violations = np.maximum(gate.floor - q, q - gate.ceiling).reshape(-1)
                numbers = np.flatnonzero(violations > least * gate.scale)
                found.append(start + first * gate.floor[0].size + numbers)
                amounts.append(violations[numbers] / gate.scale)
        return np.concatenate(found), np.concatenate(amounts)

    def label(self, numbers: Ints) -> Ints:
        owners = super().label(numbers)
        starts = np.concatenate([[0], self.ends])
        labels = owners.copy()
        for owner, gate in enumerate(self._parts.values()):
            mine = np.flatnonzero(owners == owner)
            units = np.broadcast_to(gate.units, gate.floor.shape[1:]).reshape(-1)
            unit = units[(numbers[mine] - starts[owner]) % units.size]
            labels[mine] = owner + len(self._parts) * (1 + unit)
        return labels

    def _judge(self, index: int, gate: Gate, point: Floats) -> Floats:
        lower, upper = self._limits(index, gate, point)
        q = self._affine.evaluate(point).shrunk[index].reshape(-1)
        violations: Floats = np.maximum(lower - q, q - upper) / gate.scale
        return violations

    def _limits(self, index: int, gate: Gate, point: Floats) -> tuple[Floats, Floats]:
        if len(gate.explicit) == 0:
            return gate.floor.reshape(-1), gate.ceiling.reshape(-1)
        lower, upper = gate.floor.flatten(), gate.ceiling.flatten()
        activation, z = gate.tops * point[gate.columns], point[self._gate_columns[index]]
        lower[gate.explicit] = activation + (1.0 - z) * lower[gate.explicit]
        if gate.follow_scores:
            loss = np.append(1.0 - point[: self._affine.unit_count], 0.0)
            lower[gate.explicit] -= loss[gate.explicit_units] * gate.shrink.reshape(-1)[gate.explicit]
        upper[gate.explicit] = activation
        return lower, upper

    def _build_part(self, index: int, gate: Gate, elements: Ints) -> list[Rows]:
        forms = widen(self._affine.differentiate_shrunk(index, elements), self._column_count)
        offset = self._affine.at_zero.shrunk[index].reshape(-1)[elements]
        floor, ceiling = (limits.reshape(-1)[elements] - offset for limits in (gate.floor, gate.ceiling))
        if len(gate.explicit) == 0:
            return [_normalise(Rows(forms, floor, ceiling), gate.scale)]
        unstable = np.isin(elements, gate.explicit)
        parts = [Rows(forms[np.flatnonzero(~unstable)], floor[~unstable], ceiling[~unstable])]
        if unstable.any():
            chosen = np.flatnonzero(unstable)
            parts += self._build_unstable(index, gate, elements[chosen], forms[chosen], offset[chosen])
        return [_normalise(stack_rows(parts, self._column_count), gate.scale)]

    def _build_unstable(
        self, index: int, gate: Gate, elements: Ints, forms: sparse.csr_array, offset: Floats
    ) -> list[Rows]:
        """q - y U + L z >= L and q - y U <= 0; where gates follow scores the first with p = q + (1 - s) shrink."""
        numbers = np.searchsorted(gate.explicit, elements)
        lower = gate.floor.reshape(-1)[elements]
        activation = place(gate.tops[numbers], gate.first + numbers, self._column_count)
        z = place(lower, self._gate_columns[index].start + numbers, self._column_count)
        nothing = np.full(len(elements), np.inf)
        below = sparse.csr_array(forms - activation)
        above, least = sparse.csr_array(below + z), lower - offset
        if gate.follow_scores:
            shrink, units = gate.shrink.reshape(-1)[elements], gate.explicit_units[numbers]
            own = np.where(units == NO_UNIT, 0.0, shrink)
            above = sparse.csr_array(above - place(own, np.maximum(units, 0), self._column_count))
            least = least - own
        return [Rows(above, least, nothing), Rows(below, -nothing, -offset)]


class SumRows(NumberedRows[Sums]):
    """Both sides of every sum, numbered op by op: one ceiling per output, then one piece per element."""

    rows_at_once = SUM_ROWS_AT_ONCE

    def __init__(self, sums: Mapping[int, Sums], column_count: int) -> None:
        super().__init__(sums, [len(each.explicit) + len(each.elements) for each in sums.values()], column_count)

    def _judge(self, index: int, sums: Sums, point: Floats) -> Floats:
        values, scores = point[sums.columns], np.where(sums.units == NO_UNIT, 1.0, point[sums.units])
        highest, rise = sums.ceiling
        pieces, tilts = sums.pieces
        below = pieces + tilts * scores[sums.owners] - values[sums.owners]
        return np.concatenate([values - highest - rise * scores, below])

    def _build_part(self, index: int, sums: Sums, numbers: Ints) -> list[Rows]:
        """y - slope s <= constant of the ceilings, and >= of the pieces."""
        count = len(sums.explicit)
        ceilings, pieces = numbers[numbers < count], numbers[numbers >= count] - count
        above, highest = self._subtract(sums, ceilings, *(side[ceilings] for side in sums.ceiling))
        below, least = self._subtract(sums, sums.owners[pieces], *(side[pieces] for side in sums.pieces))
        return [
            Rows(above, np.full(len(ceilings), -np.inf), highest),
            Rows(below, least, np.full(len(pieces), np.inf)),
        ]

    def _subtract(self, sums: Sums, owners: Ints, constant: Floats, slope: Floats) -> tuple[sparse.csr_array, Floats]:
        """y - slope s, and the constant."""
        units = sums.units[owners]
        own = np.where(units == NO_UNIT, 0.0, slope)
        scores = place(own, np.maximum(units, 0), self._column_count)
        return sparse.csr_array(place(1.0, sums.first + owners, self._column_count) - scores), constant


def _normalise(rows: Rows, scale: float) -> Rows:
    """Divide each row by its largest coefficient, nearly empty rows by the scale, so that one tolerance suits all."""
    matrix, counts = rows.matrix, np.diff(rows.matrix.indptr)
    largest, filled = np.zeros(len(rows)), counts > 0
    if matrix.nnz:
        largest[filled] = np.maximum.reduceat(np.abs(matrix.data), matrix.indptr[:-1][filled])
    largest[largest < 1e-6 * scale] = scale
    scaled = matrix.data / np.repeat(largest, counts)
    matrix = sparse.csr_array((scaled, matrix.indices, matrix.indptr), shape=matrix.shape)
    return Rows(matrix, rows.lower / largest, rows.upper / largest)

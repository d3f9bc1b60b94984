"""Cutting planes from the convex hull of a gated activation (Anderson et al., 2020), for scores of 0 or 1.

With p = b + sum_i w_i x_i over columns x_i in [0, 1], h = z p if the gate is open and h >= s p always. Each product
is replaced by its McCormick bounds:

    h <= b z + sum_{w_i > 0} w_i min(x_i, z)           + sum_{w_i < 0} w_i max(0, x_i + z - 1)
    h >= b s + sum_{w_i > 0} w_i max(0, x_i + s - 1)   + sum_{w_i < 0} w_i min(x_i, s)

Each choice in every minimum and maximum gives a row, and the tightest one at a point is found in one pass. If the
columns below are 0 or 1, these rows leave only h = s max(p, 0) whatever z is; big-M rows are much weaker.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Rows, stack_rows
from critical_neurons.core.structure import NO_UNIT, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.gates import Gate

MOST_NUMBERS = 2 * 10**7
"""Programs with more coefficients do without these rows."""

VIOLATION = 1e-2
"""Least violation of a row worth adding, relative to the activation's upper bound."""

MOST_ROWS = 200
"""Rows added per call, the most violated first."""


def count_numbers(affine: AffineNetwork) -> int:
    return affine.column_count * sum(len(gate.explicit) for gate in affine.gates.values())


class HullRows:
    """Separates points from the hull. `gate_columns` holds the columns of each ReLU's gates."""

    def __init__(self, affine: AffineNetwork, gate_columns: dict[int, slice], column_count: int) -> None:
        self._column_count = column_count
        parts = [Forms(affine, index, gate, gate_columns[index]) for index, gate in affine.gates.items()]
        self._weights = np.concatenate([part.weights for part in parts])
        self._offsets = np.concatenate([part.offsets for part in parts])
        self._tops = np.concatenate([part.tops for part in parts])
        self._values = np.concatenate([part.values for part in parts])
        self._gates = np.concatenate([part.gates for part in parts])
        self._units = np.concatenate([part.units for part in parts])

    def separate(self, point: Floats) -> Rows:
        """The most violated rows at the point."""
        columns = point[: self._weights.shape[1]]
        activation = self._tops * point[self._values]
        z = point[self._gates]
        s = np.where(self._units == NO_UNIT, 1.0, point[self._units])
        over = activation - self._product(columns, z, least=False)
        under = np.where(self._units == NO_UNIT, 0.0, self._product(columns, s, least=True) - activation)
        violations = np.concatenate([over, under]) / np.tile(self._tops, 2)
        chosen = np.flatnonzero(violations > VIOLATION)
        chosen = chosen[np.argsort(-violations[chosen], kind="stable")[:MOST_ROWS]]
        count = len(over)
        above, below = chosen[chosen < count], chosen[chosen >= count] - count
        return stack_rows(
            [
                self._build(above, self._gates[above], columns, z[above], least=False),
                self._build(below, self._units[below], columns, s[below], least=True),
            ],
            self._column_count,
        )

    def _product(self, columns: Floats, factor: Floats, *, least: bool) -> Floats:
        """The lower or upper bound of factor · p."""
        small, large = _factors(columns, factor[:, None])
        rising, falling = (small, large) if least else (large, small)
        total = np.maximum(self._weights, 0.0) * rising + np.minimum(self._weights, 0.0) * falling
        return np.asarray(total.sum(axis=1) + self._offsets * factor)

    def _build(self, which: Ints, partners: Ints, columns: Floats, factor: Floats, *, least: bool) -> Rows:
        """h minus the bound of the product, as a row in the columns and the `partners` (gates or scores)."""
        weights = self._weights[which]
        low = (weights > 0) == least
        total = columns + factor[:, None]
        in_column = np.where(low, total > 1.0, columns < factor[:, None])
        in_partner = np.where(low, total > 1.0, columns >= factor[:, None])
        matrix = np.zeros((len(which), self._column_count))
        matrix[:, : weights.shape[1]] = -weights * in_column
        rows = np.arange(len(which))
        np.add.at(matrix, (rows, partners), -(self._offsets[which] + (weights * in_partner).sum(axis=1)))
        matrix[rows, self._values[which]] += self._tops[which]
        side = -(weights * (low & (total > 1.0))).sum(axis=1)
        largest = np.abs(matrix).max(axis=1, initial=1e-12)
        free = np.full(len(which), np.inf)
        scaled = sparse.csr_array(matrix / largest[:, None])
        return Rows(scaled, side / largest if least else -free, free if least else side / largest)


class Forms:
    """The pre-activations p of one ReLU's explicit elements as rows over the columns, and their own columns."""

    def __init__(self, affine: AffineNetwork, index: int, gate: Gate, gate_columns: slice) -> None:
        shrink = gate.shrink.reshape(-1)[gate.explicit]
        self.units = gate.explicit_units
        own = np.where(self.units == NO_UNIT, 0.0, shrink)
        self.weights = affine.differentiate_shrunk(index, gate.explicit).toarray()
        rows = np.flatnonzero(self.units != NO_UNIT)
        self.weights[rows, self.units[rows]] -= own[rows]
        self.offsets = affine.at_zero.shrunk[index].reshape(-1)[gate.explicit] + own
        self.tops = gate.tops
        self.values = np.arange(gate.columns.start, gate.columns.stop)
        self.gates = np.arange(gate_columns.start, gate_columns.stop)


def _factors(columns: Floats, factor: Floats) -> tuple[Floats, Floats]:
    """Lower and upper McCormick bounds of a column times the factor."""
    return np.maximum(columns + factor - 1.0, 0.0), np.minimum(columns, factor)

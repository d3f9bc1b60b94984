"""The rows of the eliminated program, too many to write out: judged by a forward pass, built by backward passes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Rows, place, stack_rows, widen
from critical_neurons.core.structure import NO_UNIT, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.max_pooling import Pool

PIECE_ELEMENTS = 2 * 10**7
"""Numbers a backward pass may touch: a second or so of work."""


class ReluRows:
    """Equations 8 and 9 for every ReLU, numbered ReLU by ReLU in the order (data point, *shape).

    `gate_columns` says where the gates of each ReLU are.
    """

    def __init__(self, affine: AffineNetwork, gate_columns: Mapping[int, slice], column_count: int) -> None:
        self._affine = affine
        self._gate_columns = gate_columns
        self._column_count = column_count
        self.ends: Ints = np.cumsum([gate.floor.size for gate in affine.gates.values()])

    @property
    def count(self) -> int:
        return int(self.ends[-1])

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
    def piece(self) -> int:
        return max(1, PIECE_ELEMENTS // self._affine.size)

    def violations(self, point: Floats) -> Floats:
        shrunk = self._affine.evaluate(point).shrunk
        parts = []
        for index, gate in self._affine.gates.items():
            lower, upper = self._limits(index, gate, point)
            q = shrunk[index].reshape(-1)
            parts.append(np.maximum(lower - q, q - upper) / gate.scale)
        return np.concatenate(parts)

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

    def build(self, numbers: Ints) -> Rows:
        parts = []
        for (index, gate), elements in zip(self._affine.gates.items(), _deal(numbers, self.ends), strict=True):
            if len(elements):
                parts.append(self._build_gate(index, gate, elements))
        return stack_rows(parts, self._column_count)

    def _build_gate(self, index: int, gate: Gate, elements: Ints) -> Rows:
        forms = widen(self._affine.differentiate_shrunk(index, elements), self._column_count)
        offset = self._affine.at_zero.shrunk[index].reshape(-1)[elements]
        unstable = np.isin(elements, gate.explicit)
        stable = elements[~unstable]
        parts = [
            Rows(
                forms[np.flatnonzero(~unstable)],
                gate.floor.reshape(-1)[stable] - offset[~unstable],
                gate.ceiling.reshape(-1)[stable] - offset[~unstable],
            )
        ]
        if unstable.any():
            chosen = np.flatnonzero(unstable)
            parts += self._build_unstable(index, gate, elements[chosen], forms[chosen], offset[chosen])
        return _normalise(stack_rows(parts, self._column_count), gate.scale)

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


class PoolRows:
    """x >= h_i and x <= h_i + M (1 - m_i) for every live element i of every undecided window, M = max_j U_j.

    Numbered max pool by max pool, element by element; x = y M.
    """

    def __init__(self, affine: AffineNetwork, gate_columns: Mapping[int, slice], column_count: int) -> None:
        self._affine = affine
        self._gate_columns = gate_columns
        self._column_count = column_count
        self.ends: Ints = np.cumsum([0, *(len(pool.rivals) for pool in affine.pools.values())])[1:]

    @property
    def count(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def row_count(self) -> int:
        return 2 * self.count

    @property
    def defining(self) -> Ints:
        return np.arange(self.count)

    @property
    def piece(self) -> int:
        return max(1, PIECE_ELEMENTS // self._affine.size)

    def violations(self, point: Floats) -> Floats:
        pooled = self._affine.evaluate(point).pooled
        parts = [np.zeros(0)]
        for index, pool in self._affine.pools.items():
            tops = pool.tops[pool.rivalries]
            over = point[pool.columns][pool.rivalries] - pooled[index].reshape(-1)[pool.rivals] / tops
            parts.append(np.maximum(-over, over - (1.0 - point[self._gate_columns[index]])))
        return np.concatenate(parts)

    def build(self, numbers: Ints) -> Rows:
        parts = []
        for (index, pool), rivals in zip(self._affine.pools.items(), _deal(numbers, self.ends), strict=True):
            if len(rivals):
                parts += self._build_pool(index, pool, rivals)
        return stack_rows(parts, self._column_count)

    def _build_pool(self, index: int, pool: Pool, rivals: Ints) -> list[Rows]:
        """y - h_i / M >= 0 and y - h_i / M + m_i <= 1."""
        elements, windows = pool.rivals[rivals], pool.rivalries[rivals]
        tops = pool.tops[windows]
        forms = widen(self._affine.differentiate_pooled(index, elements), self._column_count)
        offset = self._affine.at_zero.pooled[index].reshape(-1)[elements] / tops
        value = place(1.0, pool.first + windows, self._column_count)
        choice = place(1.0, self._gate_columns[index].start + rivals, self._column_count)
        over = sparse.csr_array(value - sparse.diags_array(1.0 / tops) @ forms)
        nothing = np.full(len(rivals), np.inf)
        return [Rows(over, offset, nothing), Rows(sparse.csr_array(over + choice), -nothing, 1.0 + offset)]


class RelaxedPoolRows:
    """The same without columns for the choices, where these need not be whole (docs/method.md, section 3).

    Numbered max pool by max pool: 0 <= x - h_i <= M, as many as rivals; then the sum over its k rivals of
    1 - (x - h_i) / M is at least 1, as many as undecided windows.
    """

    def __init__(self, affine: AffineNetwork, column_count: int) -> None:
        self._affine = affine
        self._column_count = column_count
        sizes = [len(pool.rivals) + len(pool.explicit) for pool in affine.pools.values()]
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
    def piece(self) -> int:
        return max(1, PIECE_ELEMENTS // self._affine.size)

    def violations(self, point: Floats) -> Floats:
        pooled = self._affine.evaluate(point).pooled
        parts = [np.zeros(0)]
        for index, pool in self._affine.pools.items():
            read = pooled[index].reshape(-1)[pool.rivals] / pool.tops[pool.rivalries]
            over = point[pool.columns][pool.rivalries] - read
            parts += [np.maximum(-over, over - 1.0), point[pool.columns] - pool.most(pooled[index])]
        return np.concatenate(parts)

    def build(self, numbers: Ints) -> Rows:
        parts = []
        for (index, pool), chosen in zip(self._affine.pools.items(), _deal(numbers, self.ends), strict=True):
            count = len(pool.rivals)
            if len(chosen):
                parts += self._build_pool(index, pool, chosen[chosen < count], chosen[chosen >= count] - count)
        return stack_rows(parts, self._column_count)

    def _build_pool(self, index: int, pool: Pool, rivals: Ints, windows: Ints) -> list[Rows]:
        """0 <= y - h_i / M <= 1, and y - mean of h_i / M <= 1 - 1 / k."""
        ones, nothing = np.ones(len(rivals)), np.full(len(windows), np.inf)
        matrix, offset = self._subtract(index, pool, pool.rivalries[rivals], rivals, ones)
        contested = np.flatnonzero(np.isin(pool.rivalries, windows))
        sharing = pool.rivalries[contested]
        shares = 1.0 / pool.rival_counts[sharing]
        below, mean = self._subtract(index, pool, windows, contested, shares, np.searchsorted(windows, sharing))
        most = 1.0 - 1.0 / pool.rival_counts[windows] + mean
        return [Rows(matrix, offset, offset + 1.0), Rows(below, -nothing, most)]

    def _subtract(
        self, index: int, pool: Pool, windows: Ints, rivals: Ints, weights: Floats, rows: Ints | None = None
    ) -> tuple[sparse.csr_array, Floats]:
        """y of every window minus the weighted sum of the h_i / M that belong to its row, coefficients and constant
        of the sum; without `rows` one rival each."""
        elements, tops = pool.rivals[rivals], pool.tops[pool.rivalries[rivals]]
        places = (np.arange(len(rivals)) if rows is None else rows, np.arange(len(rivals)))
        gather = sparse.csr_array((weights / tops, places), shape=(len(windows), len(rivals)))
        forms = widen(self._affine.differentiate_pooled(index, elements), self._column_count)
        value = place(1.0, pool.first + windows, self._column_count)
        offset: Floats = np.asarray(gather @ self._affine.at_zero.pooled[index].reshape(-1)[elements])
        return sparse.csr_array(value - gather @ forms), offset


def _deal(numbers: Ints, ends: Ints) -> list[Ints]:
    """Numbers through all parts to numbers within each part."""
    owners = np.searchsorted(ends, numbers, side="right")
    starts = np.concatenate([[0], ends])
    return [numbers[owners == part] - starts[part] for part in range(len(ends))]


def _normalise(rows: Rows, scale: float) -> Rows:
    """Each row divided by its largest coefficient, so that one tolerance fits all; nearly empty rows by the scale."""
    largest = abs(rows.matrix).max(axis=1).toarray().reshape(-1)
    largest[largest < 1e-6 * scale] = scale
    matrix = sparse.csr_array(sparse.diags_array(1.0 / largest) @ rows.matrix)
    return Rows(matrix, rows.lower / largest, rows.upper / largest)

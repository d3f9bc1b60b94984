"""Lazy constraints of max pools with undecided windows, by choices that are columns or relaxed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Rows, place, widen
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.lazy_rows import AffineRows
from critical_neurons.formulations.max_pooling import Pool


class PoolRows(AffineRows[Pool]):
    """x >= h_i and x <= h_i + M (1 - m_i) for every live element i of every undecided window, M = max_j U_j.

    Numbered max pool by max pool, element by element; x = y M.
    """

    def __init__(self, affine: AffineNetwork, gate_columns: Mapping[int, slice], column_count: int) -> None:
        super().__init__(affine, affine.pools, [len(pool.rivals) for pool in affine.pools.values()], column_count)
        self._gate_columns = gate_columns

    @property
    def row_count(self) -> int:
        return 2 * self.count

    def _judge(self, index: int, pool: Pool, point: Floats) -> Floats:
        read = self._affine.evaluate(point).pooled[index].reshape(-1)[pool.rivals]
        over = point[pool.columns][pool.rivalries] - read / pool.tops[pool.rivalries]
        return np.maximum(-over, over - (1.0 - point[self._gate_columns[index]]))

    def _build_part(self, index: int, pool: Pool, rivals: Ints) -> list[Rows]:
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


class RelaxedPoolRows(AffineRows[Pool]):
    """Max pools with relaxed choices, which need no columns (docs/method.md, section 3).

    Numbered max pool by max pool: 0 <= x - h_i <= M, one per rival; then the sum of 1 - (x - h_i) / M over the k
    rivals is at least 1, one per undecided window.
    """

    def __init__(self, affine: AffineNetwork, column_count: int) -> None:
        sizes = [len(pool.rivals) + len(pool.explicit) for pool in affine.pools.values()]
        super().__init__(affine, affine.pools, sizes, column_count)

    def _judge(self, index: int, pool: Pool, point: Floats) -> Floats:
        pooled = self._affine.evaluate(point).pooled[index]
        over = point[pool.columns][pool.rivalries] - pooled.reshape(-1)[pool.rivals] / pool.tops[pool.rivalries]
        return np.concatenate([np.maximum(-over, over - 1.0), point[pool.columns] - pool.most(pooled)])

    def _build_part(self, index: int, pool: Pool, numbers: Ints) -> list[Rows]:
        """0 <= y - h_i / M <= 1, and y - mean of h_i / M <= 1 - 1 / k."""
        count = len(pool.rivals)
        rivals, windows = numbers[numbers < count], numbers[numbers >= count] - count
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
        """Coefficients and constant of y minus the weighted sum of the h_i / M of each row; without `rows` there is
        one rival per row."""
        elements, tops = pool.rivals[rivals], pool.tops[pool.rivalries[rivals]]
        places = (np.arange(len(rivals)) if rows is None else rows, np.arange(len(rivals)))
        gather = sparse.csr_array((weights / tops, places), shape=(len(windows), len(rivals)))
        forms = widen(self._affine.differentiate_pooled(index, elements), self._column_count)
        value = place(1.0, pool.first + windows, self._column_count)
        offset: Floats = np.asarray(gather @ self._affine.at_zero.pooled[index].reshape(-1)[elements])
        return sparse.csr_array(value - gather @ forms), offset

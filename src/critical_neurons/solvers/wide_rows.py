"""Wide rows: Newton's equations of a program with many columns, all shared by the data points.

Thin columns, such as those of the last layer's units, are coupled only by the loss and a few rows. So they are
eliminated first, and only the matrix of the other columns has to be factorised. It is summed up by groups of rows
with coefficients in the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import linalg, sparse

from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.fronts import Root, add_squares
from critical_neurons.solvers.low_rank import LowRank
from critical_neurons.solvers.row_groups import SortedRows, sort_rows

GROWN = 1.15
"""All rows are sorted anew when there are this many times as many; until then, new ones form groups."""

MOST_COUPLED = 1e6
"""Thin columns in which the square of the coupling is more than this many times the diagonal are eliminated last: the
Woodbury formula would lose their digits."""

ROWS_AT_ONCE = 128
"""Rows of a sum that are added to a matrix at once, up to the diagonal."""


class WideRows:
    """Rows as sparse matrices, and sorted."""

    def __init__(self, column_count: int) -> None:
        self.column_count = column_count
        self._parts = [sparse.csr_array((0, column_count))]
        self.sorted, self._sorted_count = sort_rows(self._parts[0]), 0
        self.squares = np.zeros(0)

    @property
    def row_count(self) -> int:
        return len(self.squares)

    def add(self, rows: sparse.csr_array) -> None:
        self._parts.append(rows)
        squares = np.asarray(rows.multiply(rows).sum(axis=1)).reshape(-1)
        self.squares = np.concatenate([self.squares, squares])
        if self.row_count > GROWN * self._sorted_count:
            self._parts = [sparse.csr_array(sparse.vstack(self._parts, format="csr"))]
            self.sorted, self._sorted_count = sort_rows(self._parts[0]), self.row_count
        else:
            self.sorted = self.sorted.append(rows)

    def write_out(self) -> Floats:
        return np.concatenate([part.toarray() for part in self._parts])

    def multiply(self, point: Floats) -> Floats:
        return self.sorted.multiply(point)

    def gather(self, multipliers: Floats) -> Floats:
        """A' times the multipliers."""
        return self.sorted.gather(multipliers)


class WideElimination:
    """D + A'WA + the sum of R'R, factorised: first the thin columns except the most coupled, then the others."""

    def __init__(self, rows: WideRows, diagonal: Floats, weights: Floats, roots: Sequence[Root]) -> None:
        self._rows, self._diagonal, self._weights, self._roots = rows, diagonal, weights, roots
        found = rows.sorted
        coupling = [np.sqrt(weights[found.coupled])[:, None] * found.coupling]
        joined = np.concatenate([*coupling, *(root.spread(len(diagonal)) for root in roots)])
        numbers, thin, values = found.single_entries
        given = diagonal[found.thin]
        strengths = given + np.bincount(thin, weights[numbers] * values**2, len(given))
        is_first = np.einsum("rc,rc->c", joined, joined)[found.thin] <= MOST_COUPLED * strengths
        late = np.flatnonzero(~is_first)

        # Thin columns that only one row has are eliminated by reducing the weight of the row.
        shared = np.bincount(thin, minlength=len(given)) > 1
        alone = is_first[thin] & ~shared[thin]
        reduced = weights.copy()
        reduced[numbers[alone]] *= (given / strengths)[thin[alone]]

        matrix, across = _add_up(found, weights, reduced, late)
        met_first = is_first[found.met]
        met, self._across = found.met[met_first], across[met_first]
        several = shared[met]
        _add_square(matrix, self._across[several] / np.sqrt(strengths[met[several]])[:, None], sign=-1.0)
        matrix[np.diag_indices(len(matrix))] += np.concatenate([diagonal[found.wide], strengths[late]])

        self._first, self._last = found.thin[is_first], np.concatenate([found.wide, found.thin[late]])
        self._met = np.searchsorted(np.flatnonzero(is_first), met)
        self._first_root, self._last_root = joined[:, self._first], joined[:, self._last]
        self._inner = LowRank(strengths[is_first], self._first_root)
        left = self._last_root - (self._first_root[:, self._met] / strengths[met]) @ self._across
        _add_square(matrix, self._inner.whiten(left))
        self._factor = linalg.cho_factor(matrix.T, lower=False, overwrite_a=True, check_finite=False)

    def solve(self, right: Floats) -> Floats:
        solved, first = np.zeros(len(right)), self._inner.solve(right[self._first])
        last = right[self._last] - first[self._met] @ self._across - (self._first_root @ first) @ self._last_root
        last = linalg.cho_solve(self._factor, last, check_finite=False)
        coupled = (self._last_root @ last) @ self._first_root
        coupled[self._met] += self._across @ last
        solved[self._last], solved[self._first] = last, first - self._inner.solve(coupled)
        return solved

    def multiply(self, point: Floats) -> Floats:
        total = self._diagonal * point + self._rows.gather(self._weights * self._rows.multiply(point))
        return add_squares(total, self._roots, point)


def _add_up(found: SortedRows, weights: Floats, reduced: Floats, late: Ints) -> tuple[Floats, Floats]:
    """A'WA of the rows in groups: with reduced weights the lower triangle for the wide columns, then the `late` thin
    ones, without their diagonal; and of the thin columns that rows have with the wide ones."""
    count = len(found.wide)
    matrix = np.zeros((count + len(late), count + len(late)))
    across = np.zeros((len(found.met), len(matrix)))
    for group in found.groups:
        roots, columns = np.sqrt(reduced[group.numbers])[:, None], group.columns
        dense = roots * group.dense
        _add_lower(matrix, columns, dense.T @ dense)
        single, met = group.single.scale(weights[group.numbers]), np.searchsorted(found.met, group.single.columns)
        across[np.ix_(met, columns)] += single.T @ group.dense
        if len(group.rest.columns):
            rest, others = group.rest.scale(roots[:, 0]), group.rest.columns
            along = rest.T @ dense
            matrix[np.ix_(others, columns)] += along
            matrix[np.ix_(columns, others)] += along.T
            matrix[np.ix_(others, others)] += (rest.T @ rest).toarray()
            across[np.ix_(met, others)] += (single.T @ group.rest.matrix).toarray()
    # no row in a group has two thin columns
    places, at = np.searchsorted(found.met, late), np.arange(len(late))
    has_rows = np.isin(late, found.met)
    matrix[count + at[has_rows]] = across[places[has_rows]]
    return matrix, across


def _add_lower(matrix: Floats, places: Ints, part: Floats) -> None:
    """Add at these places, in order, at least up to the diagonal."""
    flat = matrix.reshape(-1)
    for start in range(0, len(places), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        at = len(matrix) * places[start:end, None] + places[:end]
        flat[at.reshape(-1)] += part[start:end, :end].reshape(-1)


def _add_square(matrix: Floats, root: Floats, sign: float = 1.0) -> None:
    """Add R'R to the lower triangle, in place."""
    if root.size:
        linalg.blas.dsyrk(sign, np.ascontiguousarray(root).T, beta=1.0, c=matrix.T, overwrite_c=True)

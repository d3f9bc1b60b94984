"""Dense rows: Newton's equations of a program whose columns are all shared by the data points.

Rows of the same layer have coefficients in the same columns: all of the layers before, and one of their own layer.
A'WA is summed up over groups of such rows, from a dense part and a sparse rest, which is several times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg, sparse

from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.fronts import Root, add_at

FILLED = 0.1
"""Columns in which at least this share of a group's rows have coefficients belong to its dense part."""

FEW_COLUMNS = 500
"""Up to this many columns groups are not worth it."""


@dataclass(frozen=True)
class _RowGroup:
    """Rows by number; `rest` are their coefficients outside the dense columns."""

    numbers: Ints
    dense: Ints
    rest: sparse.csr_array
    others: Ints


class DenseRows:
    """Rows in one array, which has spare room for those added later."""

    def __init__(self, column_count: int) -> None:
        self.row_count, self.column_count = 0, column_count
        self._matrix = np.zeros((0, column_count))
        self.squares = np.zeros(0)
        self._sizes = np.zeros(0, dtype=np.int64)
        """The binary logarithm of every row's number of coefficients."""
        self._groups: list[_RowGroup] | None = None

    @property
    def matrix(self) -> Floats:
        return self._matrix[: self.row_count]

    def add(self, rows: Floats) -> None:
        count = self.row_count + len(rows)
        if count > len(self._matrix):
            larger = np.zeros((max(count, 3 * len(self._matrix) // 2), self.column_count))
            larger[: self.row_count] = self.matrix
            self._matrix = larger
        self._matrix[self.row_count : count] = rows
        self.row_count, self._groups = count, None
        self.squares = np.concatenate([self.squares, np.einsum("rc,rc->r", rows, rows)])
        self._sizes = np.concatenate([self._sizes, np.frexp(np.count_nonzero(rows, axis=1))[1]])

    def multiply(self, point: Floats) -> Floats:
        product: Floats = self.matrix @ point
        return product

    def gather(self, multipliers: Floats) -> Floats:
        """A' times the multipliers."""
        total: Floats = multipliers @ self.matrix
        return total

    def weigh(self, weights: Floats) -> Floats:
        """A'WA."""
        if self.column_count <= FEW_COLUMNS:
            scaled = np.sqrt(weights)[:, None] * self.matrix
            square: Floats = scaled.T @ scaled
            return square
        if self._groups is None:
            sizes = np.unique(self._sizes)
            self._groups = [self._form_group(np.flatnonzero(self._sizes == size)) for size in sizes]
        total = np.zeros((self.column_count, self.column_count))
        for group in self._groups:
            roots = np.sqrt(weights[group.numbers])
            scaled = self._matrix[np.ix_(group.numbers, group.dense)] * roots[:, None]
            add_at(total, group.dense, scaled.T @ scaled)
            if group.rest.nnz:
                rest = sparse.csr_array(sparse.diags_array(roots) @ group.rest)
                across = rest.T @ scaled
                total[np.ix_(group.others, group.dense)] += across
                total[np.ix_(group.dense, group.others)] += across.T
                own = sparse.coo_array(rest.T @ rest)
                total[group.others[own.coords[0]], group.others[own.coords[1]]] += own.data
        return total

    def _form_group(self, numbers: Ints) -> _RowGroup:
        rows = self._matrix[numbers]
        filled = np.count_nonzero(rows, axis=0) >= FILLED * len(numbers)
        others = np.flatnonzero(~filled)
        return _RowGroup(numbers, np.flatnonzero(filled), sparse.csr_array(rows[:, others]), others)


class DenseElimination:
    """D + A'WA + the sum of R'R, factorised."""

    def __init__(self, rows: DenseRows, diagonal: Floats, weights: Floats, roots: Sequence[Root]) -> None:
        self._rows, self._diagonal, self._weights, self._roots = rows, diagonal, weights, roots
        matrix = rows.weigh(weights)
        for root in roots:
            add_at(matrix, root.columns, root.square)
        matrix[np.diag_indices(len(matrix))] += diagonal
        self._factor = linalg.cho_factor(matrix.T, lower=True, overwrite_a=True, check_finite=False)

    def solve(self, right: Floats) -> Floats:
        solved: Floats = linalg.cho_solve(self._factor, right, check_finite=False)
        return solved

    def multiply(self, point: Floats) -> Floats:
        total: Floats = self._diagonal * point + self._rows.gather(self._weights * self._rows.multiply(point))
        for root in self._roots:
            total[root.columns] += root.matrix.T @ (root.matrix @ point[root.columns])
        return total

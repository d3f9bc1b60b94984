"""Dense rows: Newton's equations of a program with few columns, all shared by the data points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import linalg

from critical_neurons.core.structure import Floats
from critical_neurons.solvers.fronts import Root, add_at, add_squares

FEW_COLUMNS = 500
"""Up to this many columns, rows are dense; sorting them takes longer than it saves."""


class DenseRows:
    """Rows in one array, which has spare room for those added later."""

    def __init__(self, column_count: int) -> None:
        self.row_count, self.column_count = 0, column_count
        self._matrix = np.zeros((0, column_count))
        self.squares = np.zeros(0)

    def write_out(self) -> Floats:
        return self._matrix[: self.row_count]

    def add(self, rows: Floats) -> None:
        count = self.row_count + len(rows)
        if count > len(self._matrix):
            larger = np.zeros((max(count, 3 * len(self._matrix) // 2), self.column_count))
            larger[: self.row_count] = self.write_out()
            self._matrix = larger
        self._matrix[self.row_count : count] = rows
        self.row_count = count
        self.squares = np.concatenate([self.squares, np.einsum("rc,rc->r", rows, rows)])

    def multiply(self, point: Floats) -> Floats:
        product: Floats = self.write_out() @ point
        return product

    def gather(self, multipliers: Floats) -> Floats:
        """A' times the multipliers."""
        total: Floats = multipliers @ self.write_out()
        return total


class DenseElimination:
    """D + A'WA + the sum of R'R, factorised."""

    def __init__(self, rows: DenseRows, diagonal: Floats, weights: Floats, roots: Sequence[Root]) -> None:
        self._rows, self._diagonal, self._weights, self._roots = rows, diagonal, weights, roots
        scaled = np.sqrt(weights)[:, None] * rows.write_out()
        matrix = scaled.T @ scaled
        for root in roots:
            add_at(matrix, root.columns, root.square)
        matrix[np.diag_indices(len(matrix))] += diagonal
        self._factor = linalg.cho_factor(matrix.T, lower=True, overwrite_a=True, check_finite=False)

    def solve(self, right: Floats) -> Floats:
        solved: Floats = linalg.cho_solve(self._factor, right, check_finite=False)
        return solved

    def multiply(self, point: Floats) -> Floats:
        total = self._diagonal * point + self._rows.gather(self._weights * self._rows.multiply(point))
        return add_squares(total, self._roots, point)

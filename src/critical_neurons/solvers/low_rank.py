"""A diagonal matrix plus one of low rank, inverted by the Woodbury formula."""

from __future__ import annotations

import numpy as np
from scipy import linalg

from critical_neurons.core.structure import Floats


class LowRank:
    """D + R'R where R has few rows (Woodbury): D^-1 - D^-1 R' (1 + R D^-1 R')^-1 R D^-1.

    Cancellation between small and large entries of D is corrected by iterative refinement.
    """

    def __init__(self, diagonal: Floats, root: Floats) -> None:
        self._diagonal, self._root = diagonal, root
        scaled = root / np.sqrt(diagonal)
        matrix = scaled @ scaled.T
        matrix[np.diag_indices(len(root))] += 1.0
        self._factor, _ = linalg.cho_factor(matrix, overwrite_a=True, check_finite=False)

    def solve(self, right: Floats) -> Floats:
        scaled = right / self._diagonal
        inner = linalg.cho_solve((self._factor, False), self._root @ scaled, check_finite=False)
        solved: Floats = scaled - (self._root.T @ inner) / self._diagonal
        return solved

    def multiply(self, point: Floats) -> Floats:
        product: Floats = self._diagonal * point + self._root.T @ (self._root @ point)
        return product

    def whiten(self, values: Floats) -> Floats:
        """Values V with V'V = values' (1 + R D^-1 R')^-1 values."""
        whitened: Floats = linalg.solve_triangular(self._factor, values, trans="T", check_finite=False)
        return whitened

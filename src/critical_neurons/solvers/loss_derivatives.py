"""Derivatives of the loss, the weighted sum of a convex term's functions of affine logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from critical_neurons.core.program import SHARED, Program
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.fronts import Root

NO_CURVATURE = 1e-7
"""Share of the curvature that is left out: that of most outputs of data points classified with certainty. Newton's
steps change by as little; bounds depend on the gradient alone."""


SAME_LOGITS = 0.1
"""Second derivatives are computed anew only if a logit moved by more than this since they were computed last: they
change by about as much, relatively."""


@dataclass(frozen=True)
class Derivatives:
    value: float
    slope: Floats
    logits: Floats


class Loss:
    """The loss over the searched `columns` of a program, each shared or of one data point (`points`). `base` are the
    values of all columns before the term's, with 0 for the searched ones."""

    def __init__(self, program: Program, base: Floats, columns: Ints, points: Ints) -> None:
        matrix, offset, self._loss = program.term.affine_forms()
        self._weights = program.cost[program.term.columns]
        count, self._classes = len(self._loss), len(offset) // len(self._loss)
        forms = sparse.csr_array(matrix[:, : len(base)])
        self._offset = (offset + forms @ base).reshape(count, self._classes)
        forms = sparse.csr_array(forms[:, columns])
        self._shared = np.flatnonzero(points == SHARED)
        self._forms = forms[:, self._shared].toarray().reshape(count, self._classes, -1)
        self._unit_forms = np.broadcast_to(np.eye(self._classes), (count, self._classes, self._classes))
        self._local: dict[int, tuple[Floats, Ints]] = {}
        for point in np.unique(points[points != SHARED]):
            own = forms[point * self._classes : (point + 1) * self._classes]
            own_columns = np.setdiff1d(own.indices, self._shared)
            if len(own_columns):
                self._local[int(point)] = own[:, own_columns].toarray(), own_columns
        self.pattern = forms
        self._roots: list[Root] = []
        self._logits_of_roots = np.full_like(self._offset, np.inf)

    def differentiate(self, point: Floats) -> Derivatives:
        logits = self._offset + self._forms @ point[self._shared]
        for at, (forms, columns) in self._local.items():
            logits[at] += forms @ point[columns]
        gradients = self._weights[:, None] * self._loss.gradients(logits)
        slope = np.zeros(len(point))
        slope[self._shared] = gradients.reshape(-1) @ self._forms.reshape(-1, len(self._shared))
        for at, (forms, columns) in self._local.items():
            slope[columns] += gradients[at] @ forms
        return Derivatives(float(self._weights @ self._loss.values(logits)), slope, logits)

    def find_roots(self, logits: Floats) -> list[Root]:
        """Second derivatives are the sum of R'R over all roots R. These may be those of nearly the same logits."""
        if not np.abs(logits - self._logits_of_roots).max(initial=0.0) <= SAME_LOGITS:
            self._roots, self._logits_of_roots = self._compute_roots(logits), logits
        return self._roots

    def _compute_roots(self, logits: Floats) -> list[Root]:
        roots_of_points = np.sqrt(self._weights)[:, None, None] * self._loss.apply_root(logits, self._unit_forms)
        sizes = np.einsum("prc,prc->pr", roots_of_points, roots_of_points)
        curved = sizes > find_cut(sizes.reshape(-1), NO_CURVATURE)
        roots: list[Root] = []
        for at, (forms, columns) in self._local.items():
            whole = np.concatenate([forms, self._forms[at]], axis=1)
            roots.append(Root(roots_of_points[at] @ whole, np.concatenate([columns, self._shared])))
        curved[list(self._local)] = False
        others = np.flatnonzero(curved.any(axis=1))
        spread = np.matmul(roots_of_points[others], self._forms[others])
        return [*roots, Root(spread[curved[others]], self._shared)]


def find_cut(sizes: Floats, share: float) -> float:
    """The largest size such that all sizes up to it add up to at most this share of their sum."""
    ordered = np.sort(sizes)
    total = np.cumsum(ordered)
    count = int(np.searchsorted(total, share * total[-1], side="right"))
    return float(ordered[count - 1]) if count else -1.0

"""Derivatives of the loss, the weighted sum of a convex term's functions of affine logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from critical_neurons.core.program import SHARED, Program
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.solvers.fronts import Root


@dataclass(frozen=True)
class Derivatives:
    """Second derivatives are the sum of R'R over all roots R."""

    value: float
    slope: Floats
    roots: list[Root]


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
        self._local: dict[int, tuple[Floats, Ints]] = {}
        for point in np.unique(points[points != SHARED]):
            own = forms[point * self._classes : (point + 1) * self._classes]
            own_columns = np.setdiff1d(own.indices, self._shared)
            if len(own_columns):
                self._local[int(point)] = own[:, own_columns].toarray(), own_columns
        self.pattern = forms

    def differentiate(self, point: Floats) -> Derivatives:
        logits = self._offset + self._forms @ point[self._shared]
        for at, (forms, columns) in self._local.items():
            logits[at] += forms @ point[columns]
        gradients = self._weights[:, None] * self._loss.gradients(logits)
        slope = np.zeros(len(point))
        slope[self._shared] = np.einsum("pc,pcs->s", gradients, self._forms)
        scale = np.sqrt(self._weights)[:, None, None]
        spread = scale * self._loss.apply_root(logits, self._forms)
        roots: list[Root] = []
        for at, (forms, columns) in self._local.items():
            slope[columns] += gradients[at] @ forms
            own = scale[at] * self._loss.choose(np.array([at])).apply_root(logits[[at]], forms[None])[0]
            roots.append((np.concatenate([own, spread[at]], axis=1), np.concatenate([columns, self._shared])))
        others = np.setdiff1d(np.arange(len(logits)), list(self._local))
        roots.append((spread[others].reshape(-1, len(self._shared)), self._shared))
        return Derivatives(float(self._weights @ self._loss.values(logits)), slope, roots)

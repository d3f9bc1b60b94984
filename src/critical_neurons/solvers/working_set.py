"""The working set: which violated rows are added, and the sides of built rows that no point has violated yet."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from critical_neurons.core.structure import Floats, Ints

ROWS_PER_STEP = 200
"""Rows added per step, the most violated first: each makes later steps more expensive."""

ROWS_PER_UNIT = 2
"""Of these, so many of one unit. Rows of the same unit on similar data points are nearly parallel, and one of them
often satisfies the others: without this limit twice as many rows and steps are needed."""

LEAST_VIOLATION = 1e-9
"""An idle side that is violated by more than this is added."""


def choose_rows(numbers: Ints, violations: Floats, labels: Ints) -> Ints:
    """The most violated rows of every label, in order."""
    order = np.lexsort((-violations, labels))
    _, firsts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    ranks = np.arange(len(order)) - np.repeat(firsts, counts)
    chosen = order[ranks < ROWS_PER_UNIT]
    chosen = chosen[np.argsort(-violations[chosen], kind="stable")[:ROWS_PER_STEP]]
    return np.sort(numbers[chosen])


class IdleSides:
    """Sides a · x <= b of built rows that are not in the program. A row has two sides; mostly one of them matters."""

    def __init__(self) -> None:
        self._parts: list[tuple[sparse.csr_array | Floats, Floats]] = []

    def add(self, sides: sparse.csr_array | Floats, limits: Floats) -> None:
        while self._parts and isinstance(sides, sparse.csr_array) and len(self._parts[-1][1]) <= len(limits):
            before, lower = self._parts.pop()
            assert isinstance(before, sparse.csr_array)  # as all sides of a program
            sides = sparse.csr_array(sparse.vstack([before, sides], format="csr"))
            limits = np.concatenate([lower, limits])
        self._parts.append((sides, limits))

    def take_violated(self, point: Floats) -> list[tuple[sparse.csr_array | Floats, Floats]]:
        """The sides that the point violates, which are idle no longer."""
        taken, kept = [], []
        for sides, limits in self._parts:
            violated = sides @ point - limits > LEAST_VIOLATION
            if violated.any():
                taken.append((sides[np.flatnonzero(violated)], limits[violated]))
            if not violated.any():
                kept.append((sides, limits))
            elif not violated.all():
                kept.append((sides[np.flatnonzero(~violated)], limits[~violated]))
        self._parts = kept
        return taken

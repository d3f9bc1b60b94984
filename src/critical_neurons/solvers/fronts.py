"""Fronts: Newton's equations of a program with nearly independent parts, by multifrontal Cholesky factorisation.

Columns of different data points share no row; only the shared columns, the scores, couple them. So they are
eliminated first, data point by data point, which leaves a small dense matrix of the shared columns. Within a data
point, columns of the first layers may form groups, such as the positions of a feature map, that are coupled only by
columns of later layers. The elimination tree has these groups as leaves, data points as their parents, and the shared
columns as root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy import linalg, sparse

from critical_neurons.core.deadline import check_time
from critical_neurons.core.program import SHARED, Origins
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.solvers.front_groups import split_point

FEW_COEFFICIENTS = 8
"""A row with at most this many coefficients is kept sparse."""

MOST_RUNS = 30
"""Indices in at most this many runs of consecutive numbers are added by slices."""

MOST_CHUNKS = 8
"""Blocks of dense rows per front before they are merged."""


@dataclass(frozen=True, eq=False)
class Root:
    """A matrix R over some columns, which contributes R'R."""

    matrix: Floats
    columns: Ints

    @cached_property
    def square(self) -> Floats:
        square: Floats = self.matrix.T @ self.matrix
        return square

    @cached_property
    def trace(self) -> float:
        return float(np.vdot(self.matrix, self.matrix))

    def spread(self, column_count: int) -> Floats:
        """Over all columns."""
        spread = np.zeros((len(self.matrix), column_count))
        spread[:, self.columns] = self.matrix
        return spread


def add_squares(total: Floats, roots: Sequence[Root], point: Floats) -> Floats:
    """Add the sum of R'R times the point, in place."""
    for root in roots:
        total[root.columns] += root.matrix.T @ (root.matrix @ point[root.columns])
    return total


@dataclass(frozen=True)
class Chunk:
    """Some rows, by number, restricted to their nonzero columns."""

    matrix: Floats | sparse.csr_array
    columns: Ints
    numbers: Ints

    def write_out(self) -> Floats:
        return self.matrix if isinstance(self.matrix, np.ndarray) else self.matrix.toarray()

    def weigh(self, weights: Floats) -> Floats:
        """A'WA of these rows."""
        roots = np.sqrt(weights[self.numbers])
        if isinstance(self.matrix, np.ndarray):
            scaled = roots[:, None] * self.matrix
            return scaled.T @ scaled
        thin = sparse.csr_array(sparse.diags_array(roots) @ self.matrix)
        return (thin.T @ thin).toarray()


@dataclass
class Front:
    """Columns that are eliminated together; `parent` is None at the root."""

    own: Ints
    parent: int | None
    dense: list[Chunk] = field(default_factory=list)
    thin: list[Chunk] = field(default_factory=list)


class Tree:
    """The rows of a program, assigned to fronts; rows can be added."""

    def __init__(self, origins: Origins, pattern: sparse.csr_array) -> None:
        """`pattern`: rows that show which columns are coupled; rows added later may couple more."""
        points = np.unique(origins.points[origins.points != SHARED])
        leaves: list[Front] = []
        trunks: list[Front] = []
        groups = [split_point(np.flatnonzero(origins.points == point), origins.depths, pattern) for point in points]
        count = sum(len(split) for split, _ in groups)
        for number, (split, rest) in enumerate(groups):
            leaves += [Front(own, count + number) for own in split]
            trunks.append(Front(rest, count + len(points)))
        self._leaf_count = count
        self.fronts = [*leaves, *trunks, Front(np.flatnonzero(origins.points == SHARED), None)]
        self.column_count = len(origins.points)
        self._front_of = np.zeros(self.column_count, dtype=np.int64)
        for number, front in enumerate(self.fronts):
            self._front_of[front.own] = number
        self.row_count = 0
        self.squares = np.zeros(0)

    def add(self, rows: sparse.csr_array) -> None:
        """Add rows with the next numbers. Each belongs to the first front that has one of its columns."""
        numbers = self.row_count + np.arange(rows.shape[0])
        self.row_count += len(numbers)
        self.squares = np.concatenate([self.squares, np.asarray(rows.multiply(rows).sum(axis=1)).reshape(-1)])
        owners = self.assign(rows)
        few = np.diff(rows.indptr) <= FEW_COEFFICIENTS
        for front in np.unique(owners):
            check_time()
            mine = owners == front
            into = self.fronts[front]
            if np.any(mine & few):
                into.thin.append(_cut(rows, mine & few, numbers, dense=False))
            if np.any(mine & ~few):
                into.dense.append(_cut(rows, mine & ~few, numbers, dense=True))
            if len(into.dense) > MOST_CHUNKS:
                into.dense = [_join(into.dense)]
            if len(into.thin) > MOST_CHUNKS:
                into.thin = [_join_thin(into.thin, self.column_count)]

    def assign(self, rows: sparse.csr_array) -> Ints:
        """The front of each row. Leaves that a row couples are dissolved into their parent."""
        entries = sparse.coo_array(rows)
        numbers, columns = entries.coords
        while True:
            owners = np.full(rows.shape[0], len(self.fronts) - 1)
            np.minimum.at(owners, numbers, self._front_of[columns])
            fronts = self._front_of[columns]
            meeting = (fronts < self._leaf_count) & (fronts != owners[numbers])
            if not meeting.any():
                return owners
            for leaf in np.unique(np.concatenate([fronts[meeting], owners[numbers[meeting]]])):
                self._dissolve(self.fronts[leaf])

    def _dissolve(self, leaf: Front) -> None:
        """Move the columns of a leaf to its parent."""
        assert leaf.parent is not None
        parent = self.fronts[leaf.parent]
        self._front_of[leaf.own] = leaf.parent
        parent.own, leaf.own = np.concatenate([parent.own, leaf.own]), leaf.own[:0]

    @property
    def _chunks(self) -> list[Chunk]:
        return [chunk for front in self.fronts for chunk in front.dense + front.thin]

    def multiply(self, point: Floats) -> Floats:
        values = np.zeros(self.row_count)
        for chunk in self._chunks:
            values[chunk.numbers] = chunk.matrix @ point[chunk.columns]
        return values

    def gather(self, multipliers: Floats) -> Floats:
        """A' times the multipliers."""
        total = np.zeros(self.column_count)
        for chunk in self._chunks:
            total[chunk.columns] += chunk.matrix.T @ multipliers[chunk.numbers]
        return total


@dataclass(frozen=True)
class _Factor:
    """Of one front: the Cholesky factor of its own columns, the border, and the coupling to it."""

    own: Ints
    border: Ints
    lower: Floats
    coupling: Floats


class FrontElimination:
    """D + A'WA + the sum of R'R, factorised front by front. `check` is called before each."""

    def __init__(
        self, tree: Tree, diagonal: Floats, weights: Floats, roots: Sequence[Root], check: Callable[[], object]
    ) -> None:
        self._tree, self._diagonal, self._weights = tree, diagonal, weights
        self._squares = [(root.square, root.columns) for root in roots]
        self._factors: list[_Factor] = []
        place = np.zeros(tree.column_count, dtype=np.int64)
        passed_on: list[list[tuple[Floats, Ints]]] = [[] for _ in tree.fronts]
        owners = [int(tree.assign(_mark(root.columns, tree.column_count))[0]) for root in roots]
        for number, front in enumerate(tree.fronts):
            check()
            added = [(chunk.weigh(weights), chunk.columns) for chunk in front.dense + front.thin]
            added += [square for square, owner in zip(self._squares, owners, strict=True) if owner == number]
            added += passed_on[number]
            passed_on[number] = []
            border = np.setdiff1d(np.concatenate([front.own[:0], *(columns for _, columns in added)]), front.own)
            columns = np.concatenate([front.own, border])
            place[columns] = np.arange(len(columns))
            matrix = np.zeros((len(columns), len(columns)))
            for part, at in added:
                add_at(matrix, place[at], part)
            size = len(front.own)
            matrix[np.arange(size), np.arange(size)] += diagonal[front.own]
            update = matrix[size:, size:]
            if size:
                lower = linalg.cholesky(matrix[:size, :size], lower=True, check_finite=False)
                coupling = linalg.solve_triangular(lower, matrix[:size, size:], lower=True, check_finite=False)
                update = update - coupling.T @ coupling
                self._factors.append(_Factor(front.own, border, lower, coupling))
            if front.parent is not None:
                passed_on[front.parent].append((update, border))

    def solve(self, right: Floats) -> Floats:
        rest, solved = right.copy(), np.zeros(len(right))
        for factor in self._factors:
            rest[factor.own] = _solve_lower(factor.lower, rest[factor.own])
            rest[factor.border] -= factor.coupling.T @ rest[factor.own]
        for factor in reversed(self._factors):
            known = rest[factor.own] - factor.coupling @ solved[factor.border]
            solved[factor.own] = _solve_lower(factor.lower, known, transposed=True)
        return solved

    def multiply(self, point: Floats) -> Floats:
        total = self._diagonal * point + self._tree.gather(self._weights * self._tree.multiply(point))
        for square, columns in self._squares:
            total[columns] += square @ point[columns]
        return total


def add_at(matrix: Floats, places: Ints, part: Floats) -> None:
    """Add by slices if the places form few runs, which is several times as fast. The matrix is contiguous."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(places) != 1) + 1, [len(places)]])
    if len(starts) > MOST_RUNS or len(places) == 0:
        flat = (len(matrix) * places[:, None] + places).reshape(-1)
        matrix.reshape(-1)[flat] += part.reshape(-1)
        return
    runs = [(slice(a, b), slice(places[a], places[a] + b - a)) for a, b in pairwise(starts.tolist())]
    for of_rows, rows in runs:
        for of_columns, columns in runs:
            matrix[rows, columns] += part[of_rows, of_columns]


def _solve_lower(lower: Floats, right: Floats, *, transposed: bool = False) -> Floats:
    trans: Literal["T", "N"] = "T" if transposed else "N"
    solved: Floats = linalg.solve_triangular(lower, right, lower=True, trans=trans, check_finite=False)
    return solved


def _cut(rows: sparse.csr_array, chosen: Bools, numbers: Ints, *, dense: bool) -> Chunk:
    part = rows[np.flatnonzero(chosen)]
    columns: Ints = np.unique(part.indices).astype(np.int64)
    matrix = sparse.csr_array(part[:, columns])
    return Chunk(matrix.toarray() if dense else matrix, columns, numbers[chosen])


def _join(chunks: list[Chunk]) -> Chunk:
    columns = np.unique(np.concatenate([chunk.columns for chunk in chunks]))
    numbers = np.concatenate([chunk.numbers for chunk in chunks])
    matrix = np.zeros((len(numbers), len(columns)))
    start = 0
    for chunk in chunks:
        end = start + len(chunk.numbers)
        matrix[start:end, np.searchsorted(columns, chunk.columns)] = chunk.write_out()
        start = end
    return Chunk(matrix, columns, numbers)


def _join_thin(chunks: list[Chunk], column_count: int) -> Chunk:
    entries = [(sparse.coo_array(chunk.matrix), chunk.columns) for chunk in chunks]
    starts = np.cumsum([0, *(len(chunk.numbers) for chunk in chunks)])
    rows = np.concatenate([part.coords[0] + start for (part, _), start in zip(entries, starts[:-1], strict=True)])
    columns = np.concatenate([at[part.coords[1]] for part, at in entries])
    values = np.concatenate([part.data for part, _ in entries])
    joined = sparse.csr_array((values, (rows, columns)), shape=(starts[-1], column_count))
    numbers = np.concatenate([chunk.numbers for chunk in chunks])
    return _cut(joined, np.ones(len(numbers), dtype=bool), numbers, dense=False)


def _mark(columns: Ints, count: int) -> sparse.csr_array:
    """A row with these columns."""
    return sparse.csr_array((np.ones(len(columns)), columns, np.array([0, len(columns)])), shape=(1, count))

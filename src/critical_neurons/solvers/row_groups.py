"""Row groups: rows over many columns, sorted by the columns in which they have coefficients.

A row of layer l for a data point has coefficients of the units of earlier layers that are live on it, and one of its
own unit. So rows of one layer and data point are alike, and columns such as those of the last layer's units are
*thin*: few rows have them, and hardly any row has two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import sparse

from critical_neurons.core.structure import Bools, Floats, Ints

THIN = (0.05, 0.02, 0.005)
"""Columns are thin if at most this share of all rows have them: the first share with which few rows have several."""

FEW_COUPLED = 0.1
"""How many rows may have several thin columns, as a share of these."""

FILLED = 0.1
"""Columns in which at least this share of a group's rows have coefficients belong to its dense part."""

ALIKE = 0.8
"""Rows belong together if they have in common this share of the columns that one or the other has."""

MOST_PATTERNS = 16
"""How many rows the others are compared with."""

ADDING_UP = 150
"""Adding a group's sum to a matrix takes about as long as computing it for this many rows."""


@dataclass(frozen=True)
class SparsePart:
    """Some rows, restricted to the columns in which they have coefficients."""

    columns: Ints
    matrix: sparse.csr_array

    @classmethod
    def of(cls, rows: sparse.csr_array, columns: Ints) -> SparsePart:
        """Of rows over the given columns."""
        used: Ints = np.unique(rows.indices).astype(np.int64)
        return cls(columns[used], sparse.csr_array(rows[:, used]))

    def scale(self, factors: Floats) -> sparse.csr_array:
        matrix = self.matrix
        values = matrix.data * np.repeat(factors, np.diff(matrix.indptr))
        return sparse.csr_array((values, matrix.indices, matrix.indptr), shape=matrix.shape)

    @cached_property
    def entries(self) -> tuple[Ints, Ints, Floats]:
        """Rows, columns and values."""
        counts = np.diff(self.matrix.indptr)
        return np.repeat(np.arange(len(counts)), counts), self.columns[self.matrix.indices], self.matrix.data


@dataclass(frozen=True)
class RowGroup:
    """Rows by number: `dense` over some of the wide columns, the `rest` over others of these, and `single` over the
    thin columns, at most one coefficient per row. Wide and thin columns are each numbered by themselves."""

    numbers: Ints
    columns: Ints
    dense: Floats
    rest: SparsePart
    single: SparsePart


@dataclass(frozen=True)
class SortedRows:
    """Rows in groups, over `wide` and `thin` columns; those with several thin ones, which are `coupled`, are written
    out over all columns."""

    wide: Ints
    thin: Ints
    groups: tuple[RowGroup, ...]
    coupled: Ints
    coupling: Floats

    @property
    def row_count(self) -> int:
        return len(self.coupled) + sum(len(group.numbers) for group in self.groups)

    @cached_property
    def single_entries(self) -> tuple[Ints, Ints, Floats]:
        """All coefficients of thin columns in groups: numbers of the rows, places among the thin columns, values."""
        return _join_entries((group.numbers, group.single) for group in self.groups)

    @cached_property
    def met(self) -> Ints:
        """The places of the thin columns that rows in groups have."""
        return np.unique(self.single_entries[1])

    @cached_property
    def _sparse(self) -> tuple[sparse.csr_array, sparse.csr_array]:
        """All coefficients in groups that are not dense, over all columns, and the transpose."""
        rows, wide, values = _join_entries((group.numbers, group.rest) for group in self.groups)
        more_rows, thin, more_values = self.single_entries
        places = np.concatenate([rows, more_rows]), np.concatenate([self.wide[wide], self.thin[thin]])
        shape = self.row_count, len(self.wide) + len(self.thin)
        matrix = sparse.csr_array((np.concatenate([values, more_values]), places), shape=shape)
        return matrix, sparse.csr_array(matrix.T)

    def multiply(self, point: Floats) -> Floats:
        values, wide = self._sparse[0] @ point, point[self.wide]
        for group in self.groups:
            values[group.numbers] += group.dense @ wide[group.columns]
        values[self.coupled] = self.coupling @ point
        return np.asarray(values, dtype=np.float64)

    def gather(self, multipliers: Floats) -> Floats:
        """The sum of the rows times their multipliers."""
        total, wide = self._sparse[1] @ multipliers, np.zeros(len(self.wide))
        for group in self.groups:
            wide[group.columns] += multipliers[group.numbers] @ group.dense
        total[self.wide] += wide
        return np.asarray(total + multipliers[self.coupled] @ self.coupling, dtype=np.float64)

    def append(self, rows: sparse.csr_array) -> SortedRows:
        """With further rows, those without several thin columns as a group."""
        numbers = np.arange(self.row_count, self.row_count + rows.shape[0])
        several = np.diff(rows[:, self.thin].indptr) > 1
        coupling = np.concatenate([self.coupling, rows[np.flatnonzero(several)].toarray()])
        group = _form_group(rows, np.flatnonzero(~several), self.wide, self.thin)
        group = replace(group, numbers=numbers[~several])
        coupled = np.concatenate([self.coupled, numbers[several]])
        return SortedRows(self.wide, self.thin, (*self.groups, group), coupled, coupling)


def sort_rows(matrix: sparse.csr_array) -> SortedRows:
    pattern = sparse.csr_array((np.ones(matrix.nnz, np.float32), matrix.indices, matrix.indptr), shape=matrix.shape)
    is_thin, is_coupled = _find_thin(pattern)
    wide, thin, coupled = (np.flatnonzero(each) for each in (~is_thin, is_thin, is_coupled))
    groups = _find_groups(pattern, np.flatnonzero(~is_coupled), ~is_thin)
    formed = tuple(_form_group(matrix, group, wide, thin) for group in groups)
    return SortedRows(wide, thin, formed, coupled, matrix[coupled].toarray())


def _find_thin(pattern: sparse.csr_array) -> tuple[Bools, Bools]:
    """Which columns are thin, and which rows have several of them."""
    row_count, column_count = pattern.shape
    counts = np.bincount(pattern.indices, minlength=column_count)
    for share in THIN:
        thin = counts <= share * row_count
        several: Bools = pattern @ thin.astype(np.float32) > 1
        if several.sum() <= FEW_COUPLED * thin.sum():
            return thin, several
    return np.zeros(column_count, dtype=bool), np.zeros(row_count, dtype=bool)


def _find_groups(pattern: sparse.csr_array, numbers: Ints, wide: Bools) -> list[Ints]:
    """Rows that are alike, if they are worth a group; the others by their number of coefficients."""
    sizes = pattern @ wide.astype(np.float32)
    groups: list[Ints] = []
    left, others = numbers, [numbers[:0]]
    for _ in range(MOST_PATTERNS):
        if not len(left):
            break
        first, mask = left[0], np.zeros(len(wide), np.float32)
        mask[pattern.indices[pattern.indptr[first] : pattern.indptr[first + 1]]] = 1.0
        common = (pattern @ (mask * wide))[left]
        alike = common >= ALIKE * (sizes[left] + sizes[first] - common)
        own, left = left[alike], left[~alike]
        apart = (len(own) + ADDING_UP) * sizes[first] ** 2 < len(own) * wide.sum() ** 2
        (groups if apart else others).append(own)
    rest = np.sort(np.concatenate([*others, left]))
    scales = np.frexp(sizes[rest])[1]
    return groups + [rest[scales == scale] for scale in np.unique(scales)]


def _form_group(matrix: sparse.csr_array, numbers: Ints, wide: Ints, thin: Ints) -> RowGroup:
    rows = sparse.csr_array(matrix[numbers])
    counts = np.bincount(rows.indices, minlength=rows.shape[1])[wide]
    filled = (counts > 0) & (counts >= FILLED * len(numbers))
    dense = sparse.csr_array(rows[:, wide[filled]]).toarray()
    over = np.flatnonzero(~filled)
    rest = SparsePart.of(sparse.csr_array(rows[:, wide[over]]), over)
    single = SparsePart.of(sparse.csr_array(rows[:, thin]), np.arange(len(thin)))
    return RowGroup(numbers, np.flatnonzero(filled), dense, rest, single)


def _join_entries(parts: Iterable[tuple[Ints, SparsePart]]) -> tuple[Ints, Ints, Floats]:
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    entries = [nothing, *((numbers[part.entries[0]], *part.entries[1:]) for numbers, part in parts)]
    rows, columns, values = (np.concatenate(each) for each in zip(*entries, strict=True))
    return rows, columns, values

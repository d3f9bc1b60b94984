"""Bounds of columns that have none of their own, implied by the rows and the bounds of the other columns."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from critical_neurons.core.program import Program
from critical_neurons.core.structure import Floats

ROOM = 1.0
"""Added to the implied upper bound of a column, so that this bound is never active."""


def imply_bounds(program: Program) -> tuple[Floats, Floats]:
    """Bounds of the columns before those of the convex term. A column with a positive cost is at an optimum no larger
    than the rows require."""
    count = program.term.columns.start
    lower, upper = program.lower[:count].copy(), program.upper[:count].copy()
    open_ended = np.flatnonzero(~np.isfinite(lower) | ~np.isfinite(upper))
    by_column = sparse.csc_array(program.rows.matrix[:, open_ended])
    for column, start, end in zip(open_ended.tolist(), by_column.indptr[:-1], by_column.indptr[1:], strict=True):
        rows, own = by_column.indices[start:end], by_column.data[start:end]
        others = sparse.coo_array(program.rows.matrix[rows, :count])
        least, most = _span(others, column, lower, upper), -_span(-others, column, lower, upper)
        sides = np.stack([(program.rows.lower[rows] - most) / own, (program.rows.upper[rows] - least) / own])
        rising = own > 0
        lower[column] = max(lower[column], np.where(rising, sides[0], sides[1]).max(initial=-np.inf))
        upper[column] = min(upper[column], np.where(rising, sides[1], sides[0]).min(initial=np.inf))
        if upper[column] == np.inf and program.cost[column] > 0 and rising.all() and len(rows):
            upper[column] = ((program.rows.lower[rows] - least) / own).max() + ROOM
    return lower, upper


def find_least_cost(program: Program) -> float:
    """The least cost within these bounds: a lower bound of the program without solving anything. The functions of the
    term are never below the bounds of their columns."""
    lower, upper = (
        np.append(implied, own[len(implied) :])
        for implied, own in zip(imply_bounds(program), (program.lower, program.upper), strict=True)
    )
    return find_least(program.cost, lower, upper)


def find_least(slope: Floats, lower: Floats, upper: Floats) -> float:
    """The minimum of slope · x over the box."""
    used = np.flatnonzero(slope)
    return float(slope[used] @ np.where(slope > 0, lower, upper)[used])


def _span(matrix: sparse.coo_array, column: int, lower: Floats, upper: Floats) -> Floats:
    """The least value of every row within the bounds, without its coefficient in the column."""
    rows, columns = matrix.coords
    values = np.where((columns == column) | (matrix.data == 0), 0.0, matrix.data)
    ends = np.where(values > 0, lower[columns], upper[columns])
    products = values * np.where(values == 0, 0.0, ends)
    least: Floats = np.bincount(rows, products, minlength=matrix.shape[0]).astype(np.float64)
    return least

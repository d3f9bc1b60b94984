"""Linear programs as text in free MPS format, which every solver reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse

from critical_neurons.core.structure import Bools, Floats

OBJECTIVE = "objective"


def format_mps(
    columns: tuple[Sequence[str], Floats, Floats, Floats, Bools],
    rows: tuple[Sequence[str], sparse.csr_array, Floats, Floats],
) -> str:
    """`columns`: names, cost, lower, upper, integer. `rows`: names, matrix, lower, upper.

    Numbers are written in full precision, except the lower bound of rows with two bounds, which the format stores as
    a difference. Rows without bounds are left out.
    """
    names, cost, lower, upper, integer = columns
    row_names, matrix, row_lower, row_upper = rows
    said = np.flatnonzero(np.isfinite(row_lower) | np.isfinite(row_upper))
    row_names = [row_names[row] for row in said.tolist()]
    row_lower, row_upper = row_lower[said], row_upper[said]
    lines = [
        "NAME critical_neurons",
        "ROWS",
        f" N {OBJECTIVE}",
        *_format_kinds(row_names, row_lower, row_upper),
        "COLUMNS",
        *_format_columns(names, cost, integer, matrix[said], row_names),
        "RHS",
        *_format_sides("RHS", row_names, np.where(np.isfinite(row_upper), row_upper, row_lower)),
        "RANGES",
        *_format_sides("RANGES", row_names, _differ(row_lower, row_upper)),
        "BOUNDS",
        *_format_bounds(names, lower, upper, integer),
        "ENDATA",
    ]
    return "\n".join(lines) + "\n"


def _format_kinds(names: Sequence[str], lower: Floats, upper: Floats) -> Iterator[str]:
    kinds = np.where(lower == upper, "E", np.where(np.isfinite(upper), "L", "G"))
    return (f" {kind} {name}" for kind, name in zip(kinds.tolist(), names, strict=True))


def _format_columns(
    names: Sequence[str], cost: Floats, integer: Bools, matrix: sparse.csr_array, row_names: Sequence[str]
) -> Iterator[str]:
    """Every column has its cost, even if zero, then its coefficients; integer columns are between markers."""
    whole = sparse.csc_array(matrix)
    whole.sum_duplicates()
    whole.eliminate_zeros()
    ends = whole.indptr.tolist()
    entries = [
        f" {row_names[row]} {value!r}" for row, value in zip(whole.indices.tolist(), whole.data.tolist(), strict=True)
    ]
    inside = False
    for column, (name, price, marked) in enumerate(zip(names, cost.tolist(), integer.tolist(), strict=True)):
        if marked != inside:
            yield f" MARKER 'MARKER' '{'INTORG' if marked else 'INTEND'}'"
            inside = marked
        yield f" {name} {OBJECTIVE} {price!r}"
        for entry in entries[ends[column] : ends[column + 1]]:
            yield f" {name}{entry}"
    if inside:
        yield " MARKER 'MARKER' 'INTEND'"


def _format_sides(section: str, names: Sequence[str], values: Floats) -> Iterator[str]:
    """Zeros are omitted."""
    return (f" {section} {names[row]} {float(values[row])!r}" for row in np.flatnonzero(values).tolist())


def _differ(lower: Floats, upper: Floats) -> Floats:
    """Upper minus lower bound for rows with both, else zero."""
    both = np.isfinite(lower) & np.isfinite(upper)
    return np.where(both, np.where(both, upper, 0.0) - np.where(both, lower, 0.0), 0.0)


def _format_bounds(names: Sequence[str], lower: Floats, upper: Floats, integer: Bools) -> Iterator[str]:
    """Every bound is written: defaults for integer columns and negative bounds differ between solvers."""
    for name, low, high in zip(names, lower.tolist(), upper.tolist(), strict=True):
        if low == high:
            yield f" FX BOUNDS {name} {low!r}"
        elif low == -np.inf and high == np.inf:
            yield f" FR BOUNDS {name}"
        else:
            yield f" MI BOUNDS {name}" if low == -np.inf else f" LO BOUNDS {name} {low!r}"
            yield f" PL BOUNDS {name}" if high == np.inf else f" UP BOUNDS {name} {high!r}"

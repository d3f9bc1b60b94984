"""Linear programs as text in LP format, which is easier to read than MPS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse

from critical_neurons.core.structure import Bools, Floats

TERMS_PER_LINE = 6
"""Some readers accept no more than 510 characters per line."""


def format_lp(
    columns: tuple[Sequence[str], Floats, Floats, Floats, Bools],
    rows: tuple[Sequence[str], sparse.csr_array, Floats, Floats],
) -> str:
    """Arguments as in `format_mps`. Brackets in names become parentheses; a row with two bounds becomes two rows."""
    given, cost, lower, upper, integer = columns
    row_names, matrix, row_lower, row_upper = rows
    names = [_rename(name) for name in given]
    lines = [
        "\\ critical_neurons",
        "Minimize",
        *_format_row("objective", names, range(len(names)), cost.tolist()),
        "Subject To",
        *_format_rows(row_names, names, matrix, row_lower, row_upper),
        "Bounds",
        *_format_bounds(names, lower, upper),
        *(["General", *(f" {names[column]}" for column in np.flatnonzero(integer))] if integer.any() else []),
        "End",
    ]
    return "\n".join(lines) + "\n"


def _rename(name: str) -> str:
    return name.replace("[", "(").replace("]", ")")


def _format_rows(
    row_names: Sequence[str], names: Sequence[str], matrix: sparse.csr_array, lower: Floats, upper: Floats
) -> Iterator[str]:
    whole = sparse.csr_array(matrix, copy=True)
    whole.sum_duplicates()
    whole.eliminate_zeros()
    for row, (name, low, high) in enumerate(
        zip(map(_rename, row_names), lower.tolist(), upper.tolist(), strict=True)
    ):
        inside = slice(whole.indptr[row], whole.indptr[row + 1])
        columns, values = whole.indices[inside].tolist(), whole.data[inside].tolist()
        if low == high:
            ends = [(name, "=", low)]
        else:
            both = np.isfinite(low) and np.isfinite(high)
            ends = [(f"{name}_low" if both else name, ">=", low)] if np.isfinite(low) else []
            ends += [(f"{name}_high" if both else name, "<=", high)] if np.isfinite(high) else []
        for label, sense, end in ends:
            *first, last = _format_row(label, names, columns, values)
            yield from first
            yield f"{last} {sense} {end!r}"


def _format_row(label: str, names: Sequence[str], columns: Sequence[int], values: Sequence[float]) -> Iterator[str]:
    """At least one term, since readers do not accept a row without any."""
    terms = [
        f"{'-' if value < 0 else '+'} {abs(value)!r} {names[column]}"
        for column, value in zip(columns, values, strict=True)
    ] or [f"+ 0.0 {names[0]}"]
    for start in range(0, len(terms), TERMS_PER_LINE):
        yield f" {label + ': ' if start == 0 else ''}{' '.join(terms[start : start + TERMS_PER_LINE])}"


def _format_bounds(names: Sequence[str], lower: Floats, upper: Floats) -> Iterator[str]:
    """Every bound is written, as in MPS files."""
    for name, low, high in zip(names, lower.tolist(), upper.tolist(), strict=True):
        if low == -np.inf and high == np.inf:
            yield f" {name} free"
        elif low == high:
            yield f" {name} = {low!r}"
        else:
            yield f" {_format_end(low)} <= {name} <= {_format_end(high)}"


def _format_end(value: float) -> str:
    return repr(value) if np.isfinite(value) else "+inf" if value > 0 else "-inf"

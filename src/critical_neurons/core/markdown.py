"""Markdown: tables as text, for model cards and all generated pages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence


def format_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def format_table(
    header: Sequence[str], rows: Iterable[Iterable[object]], *, numbers: Container[int] = ()
) -> list[str]:
    """Lines of a table; the columns with these indices are right-aligned."""
    rule = ["---:" if column in numbers else "---" for column in range(len(header))]
    return [format_row(line) for line in (header, rule, *rows)]


def replace_table(text: str, header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """The text with new rows in its table with this header."""
    before, _, after = text.partition(format_row(header))
    return before + "\n".join(format_table(header, rows)) + after[after.index("\n\n") :]

"""Result tables: our results over seeds beside the paper's, as Markdown, CSV and LaTeX; gaps are marked."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TypeAlias

from critical_neurons.core.markdown import format_table
from critical_neurons.errors import InvalidSettingError

Labels: TypeAlias = tuple[str, ...]

MISSING = "missing"
NOT_APPLICABLE = "n/a"

LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "λ": r"$\lambda$",
        "<": r"$<$",
        ">": r"$>$",
        "\n": " ",
    }
)


@dataclass(frozen=True)
class Figure:
    """Mean and standard deviation over `seeds` runs. `seeds` is None for the paper's figures, shown as printed."""

    mean: float
    deviation: float | None = None
    seeds: int | None = None

    def show(self, wanted: int | None = None) -> str:
        """As text; with the number of seeds if there are fewer than `wanted`."""
        digits = "g" if self.seeds is None else ".2f"
        text = format(self.mean, digits)
        if self.deviation is not None:
            text += f" ± {format(self.deviation, digits)}"
        if self.seeds is not None and wanted is not None and self.seeds < wanted:
            text += f" ({self.seeds} of {wanted} seeds)"
        return text


def summarise(values: Sequence[float]) -> Figure | None:
    """Mean and sample standard deviation; no deviation for one value, None for no values."""
    if not values:
        return None
    if not all(math.isfinite(value) for value in values):
        raise InvalidSettingError(f"summarise: found {list(values)}. Accepted: finite numbers.")
    return Figure(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Published:
    """A table of the paper: figures by row labels and column. None stands for n/a in the paper."""

    title: str
    headings: tuple[str, ...]
    columns: tuple[str, ...]
    figures: Mapping[Labels, Mapping[str, Figure | None]] = field(hash=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """Figures by column. In `ours` a column is absent if it has no result yet, and None if it cannot have one.

    `schedule` says how training was shortened, None if it was not.
    """

    labels: Labels
    ours: Mapping[str, Figure | None] = field(hash=False)
    paper: Mapping[str, Figure | None] = field(hash=False, default_factory=dict)
    schedule: str | None = None


@dataclass(frozen=True)
class Table:
    """`seeds` is the number of runs that each of our figures should be averaged over."""

    title: str
    headings: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    seeds: int
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.labels) != len(self.headings):
                raise InvalidSettingError(
                    f"{self.title}: a row is labelled {row.labels}. Accepted: one label for each of {self.headings}."
                )
            unknown = sorted({*row.ours, *row.paper} - set(self.columns))
            if unknown:
                raise InvalidSettingError(
                    f"{self.title}, {', '.join(row.labels)}: no column {', '.join(unknown)}. Columns: "
                    f"{', '.join(self.columns)}."
                )

    def to_markdown(self) -> str:
        header, *rows = self._lay_out()
        escaped = [list(map(_escape_markdown, line)) for line in (header, *rows)]
        table = format_table(escaped[0], escaped[1:], numbers=range(len(self.headings), len(header)))
        return "\n\n".join([f"**{self.title}**", "\n".join(table), *self.notes]) + "\n"

    def to_latex(self) -> str:
        """A `table` for the package booktabs."""
        header, *rows = ([text.translate(LATEX) for text in line] for line in self._lay_out())
        alignment = "l" * len(self.headings) + "r" * (len(header) - len(self.headings))
        lines = [
            r"\begin{table}",
            rf"  \caption{{{self.title.translate(LATEX)}}}",
            rf"  \begin{{tabular}}{{{alignment}}}",
            r"    \toprule",
            rf"    {' & '.join(header)} \\",
            r"    \midrule",
            *(rf"    {' & '.join(row)} \\" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            *(rf"  \par {note.translate(LATEX)}" for note in self.notes),
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """Mean, deviation and number of seeds in columns of their own, unrounded; title and notes are left out."""
        compared, shortened = self._compared(), self._shortened()
        header = [*self.headings]
        for column in self.columns:
            header += [f"{column} {part}" for part in ("mean", "deviation", "seeds")]
            if column in compared:
                header += [f"{column} {part}, paper" for part in ("mean", "deviation")]
        content = io.StringIO()
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow([*header, "schedule"] if shortened else header)
        for row in self.rows:
            line: list[object] = [*row.labels]
            for column in self.columns:
                ours, paper = row.ours.get(column), row.paper.get(column)
                line += [ours.mean, ours.deviation, ours.seeds] if ours else [_say_none(row.ours, column), "", ""]
                if column in compared:
                    nothing = _say_none(row.paper, column, "")
                    line += [paper.mean, paper.deviation] if paper else [nothing, ""]
            writer.writerow([*line, row.schedule or ""] if shortened else line)
        return content.getvalue()

    def pair_up(self) -> list[list[str]]:
        """Header and rows as text, the paper's figure in a second line below ours: for a narrow screen."""
        compared, shortened = self._compared(), self._shortened()
        lines = [[*self.headings, *self.columns, *(["schedule"] if shortened else [])]]
        for row in self.rows:
            line = [*row.labels]
            for column in self.columns:
                ours, paper = row.ours.get(column), row.paper.get(column)
                text = ours.show(self.seeds) if ours else _say_none(row.ours, column)
                line.append(f"{text}\npaper {paper.show()}" if column in compared and paper else text)
            lines.append([*line, *([row.schedule or ""] if shortened else [])])
        return lines

    def _lay_out(self) -> list[list[str]]:
        """Header and rows as text, the paper's figure in a column after ours, where the paper has one."""
        compared, shortened = self._compared(), self._shortened()
        header = [*self.headings]
        for column in self.columns:
            header += [column, f"{column}, paper"] if column in compared else [column]
        lines = [[*header, "schedule"] if shortened else header]
        for row in self.rows:
            line = [*row.labels]
            for column in self.columns:
                ours, paper = row.ours.get(column), row.paper.get(column)
                line.append(ours.show(self.seeds) if ours else _say_none(row.ours, column))
                if column in compared:
                    line.append(paper.show() if paper else _say_none(row.paper, column, ""))
            lines.append([*line, row.schedule or ""] if shortened else line)
        return lines

    def _compared(self) -> set[str]:
        """The columns that the paper has too."""
        return {column for row in self.rows for column in row.paper}

    def _shortened(self) -> bool:
        return any(row.schedule is not None for row in self.rows)


def set_beside(
    published: Published,
    ours: Mapping[Labels, Mapping[str, Sequence[float] | None]],
    *,
    seeds: int,
    schedules: Mapping[Labels, str] | None = None,
    further: tuple[str, ...] = (),
) -> Table:
    """A table in the paper's layout, from our values by row, column and seed, in the paper's units.

    `further` are columns that the paper does not have. None marks a figure that cannot exist, as where the paper's
    table is empty.
    """
    shortened = schedules or {}
    unknown = [labels for labels in (*ours, *shortened) if labels not in published.figures]
    if unknown:
        raise InvalidSettingError(
            f"{published.title}: no row {', '.join(unknown[0])}. Rows: "
            f"{'; '.join(', '.join(labels) for labels in published.figures)}."
        )
    rows = []
    for labels, figures in published.figures.items():
        empty = dict.fromkeys(column for column in published.columns if column not in figures)
        rows.append(Row(labels, empty | _summarise_all(ours.get(labels, {})), figures, shortened.get(labels)))
    columns = (*published.columns, *further)
    return Table(published.title, published.headings, columns, tuple(rows), seeds, published.notes)


def _summarise_all(values: Mapping[str, Sequence[float] | None]) -> dict[str, Figure | None]:
    """Columns without values yet are left out: they are missing."""
    return {
        column: None if given is None else summarise(given)
        for column, given in values.items()
        if given is None or len(given)
    }


def _say_none(figures: Mapping[str, Figure | None], column: str, absent: str = MISSING) -> str:
    return NOT_APPLICABLE if column in figures else absent


def _escape_markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")

"""Terminal tables: our results beside the paper's, and the state of the cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from critical_neurons.cli.tables import list_notes, make_table

if TYPE_CHECKING:
    from critical_neurons_reproduction.result_tables import Table as Figures
    from critical_neurons_reproduction.store import CellState


CELLS_SHOWN = 12
"""Largest number of missing cells listed; JSON has all."""


def report_figures(figures: Figures) -> RenderableType:
    """A table of results, ours above the paper's."""
    header, *rows = figures.pair_up()
    count = len(figures.headings)
    table = make_table(*header[:count], *(f">{name}" for name in header[count:]))
    for row in rows:
        table.add_row(*row)
    return Group(Text(figures.title), table, *list_notes(figures.notes))


def report_states(states: Sequence[CellState]) -> RenderableType:
    """The number of finished cells per table, and the missing cells."""
    table = make_table("Table", ">Done", ">Shortened", ">Missing", "Schedules")
    for name in dict.fromkeys(state.table for state in states):
        mine = [state for state in states if state.table == name]
        counts = Counter(state.state for state in mine)
        schedules = "; ".join(dict.fromkeys(str(state.schedule) for state in mine if state.state == "shortened"))
        table.add_row(name, *(str(counts[each]) for each in ("done", "shortened", "missing")), schedules)
    missing = [f"{state.table} {state.cell}" for state in states if state.state == "missing"]
    shown = ", ".join(missing[:CELLS_SHOWN]) + (", ..." if len(missing) > CELLS_SHOWN else "")
    return Group(table, *([Text(f"Missing: {shown}")] if missing else []))

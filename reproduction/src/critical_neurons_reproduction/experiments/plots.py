"""Plots: the table of a figure as an image, accuracy above and the share removed below."""

from __future__ import annotations

import io
from collections.abc import Sequence

from critical_neurons.errors import MissingExtraError
from critical_neurons_reproduction.result_tables import Figure, Row, Table

LOGARITHMIC = "λ"
"""The axis with a logarithmic scale."""


def draw_figure(table: Table) -> dict[str, bytes]:
    """PNG and SVG by suffix. Error bars are standard deviations over seeds; the same table gives the same bytes."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise MissingExtraError("matplotlib", "reproduce") from error
    *forms, axis = table.headings
    lines = dict.fromkeys(row.labels[:-1] for row in table.rows)
    with rc_context({"svg.hashsalt": "critical_neurons", "font.size": 9}):
        picture = Picture(figsize=(6.4, 5.2), layout="constrained")
        above, below = picture.subplots(2, 1, sharex=True)
        for at, form in enumerate(lines):
            rows = [row for row in table.rows if row.labels[:-1] == form]
            places = [float(row.labels[-1]) for row in rows]
            style = {"color": f"C{at}", "marker": "o", "markersize": 3, "capsize": 2, "linewidth": 1}
            name = form[0] if forms else "ours"
            for column, chart in (("accuracy", above), ("prune", below)):
                chart.errorbar(places, _means(rows, column), yerr=_deviations(rows, column), label=name, **style)
            whole = f"{name}, before removal" if forms else "nothing removed"
            above.plot(places, _means(rows, "reference"), color=f"C{at}", linestyle=":", linewidth=1, label=whole)
        above.set_title(table.title, fontsize=10)
        above.set_ylabel("test accuracy, %")
        below.set_ylabel("parameters removed\n(authors' count), %")
        below.set_xlabel(axis)
        if axis == LOGARITHMIC:
            below.set_xscale("log")
        above.legend(fontsize=8)
        for chart in (above, below):
            chart.grid(alpha=0.3)
        contents = {}
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            content = io.BytesIO()
            picture.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
            contents[suffix] = content.getvalue()
    return contents


def _means(rows: Sequence[Row], column: str) -> list[float]:
    return [_figure(row, column).mean for row in rows]


def _deviations(rows: Sequence[Row], column: str) -> list[float]:
    """0 for a single seed."""
    return [_figure(row, column).deviation or 0.0 for row in rows]


def _figure(row: Row, column: str) -> Figure:
    found = row.ours[column]
    assert found is not None
    return found

"""Figures: matplotlib plots of scores, plans, comparisons, curves and histories."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, singledispatch
from typing import Any

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.curve import Curve
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.search_history import SearchHistory
from critical_neurons.core.solution import Step
from critical_neurons.errors import InvalidSettingError, MissingExtraError
from critical_neurons.reports.content import TradeOff, Trials
from critical_neurons.reports.content_assembly import list_gains
from critical_neurons.reports.course import trade_off
from critical_neurons.reports.diagram import list_layers, list_strips
from critical_neurons.reports.wording import show_change, show_quantity

KEPT, REMOVED, WHOLE, INK, MUTED = "#2f6db3", "#b9581c", "#d5dbe2", "#1c232b", "#5d6874"

ON_THE_PAGE = {
    KEPT: "var(--kept)",
    REMOVED: "var(--removed)",
    WHOLE: "var(--whole)",
    INK: "var(--ink)",
    MUTED: "var(--muted)",
}
"""Colours on a page: CSS variables, which follow the light or dark theme."""

ON_DARK = {KEPT: "#6ea8e8", REMOVED: "#e39a62", WHOLE: "#37424e", INK: "#e4e9ee", MUTED: "#98a4b0"}
"""Colours for matplotlib styles with a dark background."""

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "critical_neurons",
}
COLOURED = {
    INK: ("text.color",),
    MUTED: ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
}

WIDTH, CHART = 6.0, (4.4, 2.5)
"""In inches: the width of a figure, and the size of a chart on a page, readable on a phone."""

ROWS_FULL_SIZE, CHART_ROWS = 60, 10
"""The number of rows up to which a figure grows, and the height of a chart in rows."""


ACROSS = {
    "macs": ("macs", "multiply-adds"),
    "params": ("parameters", "parameters"),
    "time": ("time", "measured time"),
}
"""Horizontal axes of a curve: field of its points, and label."""

DARK = 1.5
"""Sum of red, green and blue below which a background is dark."""


@singledispatch
def plot(shown: Any, axes: Any = None) -> Any:
    """Plot scores, a plan, a comparison or a curve; returns the matplotlib axes."""
    raise TypeError(f"{type(shown).__name__} cannot be plotted.")


@plot.register
def _(scores: Scores, axes: Any = None) -> Any:
    """A row per group, its units sorted by decreasing score."""
    strips = list_strips(scores.structure, scores, None)
    with _drawing(axes, len(strips)) as (found, paint):
        longest = max(len(strip.scores or ()) for strip in strips)
        rows = [sorted(strip.scores or (), reverse=True) for strip in strips]
        filled = [row + [float("nan")] * (longest - len(row)) for row in rows]
        shades = "Blues" if paint(INK) == INK else "Blues_r"  # low scores blend into the background
        image = found.imshow(filled, aspect="auto", interpolation="nearest", cmap=shades, vmin=0, vmax=1)
        _name_rows(found, [strip.layers[0] for strip in strips])
        found.set_xlabel("units, from the highest score to the lowest")
        found.figure.colorbar(image, ax=found, label="score", fraction=0.05)
    return found


@plot.register
def _(plan: Plan, axes: Any = None) -> Any:
    """The number of channels of every layer, before and after."""
    layers = list_layers(plan.structure, plan)
    with _drawing(axes, len(layers)) as (found, paint):
        before, after = [each.before for each in layers], [each.after for each in layers]
        found.barh(range(len(layers)), before, color=paint(WHOLE), label="before")
        found.barh(range(len(layers)), after, color=paint(KEPT), height=0.5, label="after")
        _name_rows(found, [each.name for each in layers])
        found.set_xlabel("channels")
        found.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return found


@plot.register
def _(comparison: Comparison, axes: Any = None) -> Any:
    """Every quantity after pruning, as a share of its value before."""
    gains = [(gain, gain.after / gain.before) for gain in list_gains(comparison) if gain.before]
    most = max(1.0, *(share for _, share in gains))
    with _drawing(axes, len(gains)) as (found, paint):
        found.barh(range(len(gains)), [1.0] * len(gains), color=paint(WHOLE))
        found.barh(range(len(gains)), [share for _, share in gains], color=paint(KEPT), height=0.5)
        for place, (gain, share) in enumerate(gains):
            text = f" {show_quantity(gain.after, gain.kind)} ({show_change(gain)})"
            found.text(max(1.0, share), place, text, va="center", fontsize=8)
        _name_rows(found, [gain.name for gain, _ in gains])
        found.set_xlabel("after, as a share of before")
        found.set_xlim(0, 1.55 * most)
        found.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    return found


@plot.register
def _(curve: Curve, axes: Any = None, *, by: str = "macs") -> Any:
    """The quality of every network of a sweep, by its size."""
    if by not in ACROSS:
        raise InvalidSettingError(f"by: found {by!r}. Accepted: {', '.join(ACROSS)}.")
    with _drawing(axes, CHART_ROWS) as (found, paint):
        _draw_trade_off(trade_off(curve), found, paint, by=by)
    return found


def draw_trade_off(found: TradeOff, by: str) -> str:
    return _write_svg(partial(_draw_trade_off, found, by=by))


def _draw_trade_off(found: TradeOff, axes: Any, paint: Callable[[str], str] = str, *, by: str) -> None:
    field, name = ACROSS[by]
    colours = map(paint, (KEPT, REMOVED, INK, MUTED))
    for colour, method in zip(colours, dict.fromkeys(dot.method for dot in found.dots), strict=False):
        mine = [(getattr(dot, field), dot.worth) for dot in found.dots if dot.method == method]
        points = sorted(point for point in mine if None not in point)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1.5, label=method)
    if found.before is not None:
        axes.axhline(found.before, color=paint(MUTED), linewidth=1, linestyle=":", label="before")
    axes.set_xlabel(f"{name}, as a share of before")
    _show_percent(axes.xaxis)
    if found.before is not None:  # an accuracy
        _show_percent(axes.yaxis)
    axes.set_ylabel(found.worth)
    axes.set_xlim(left=0)
    axes.legend(loc="best")


def draw_history(history: Sequence[Step]) -> str:
    """Bound and incumbent over time."""

    def draw(axes: Any) -> None:
        for label, colour, name in (("incumbent", REMOVED, "objective"), ("bound", KEPT, "bound")):
            known = [(step.seconds, getattr(step, name)) for step in history if getattr(step, name) is not None]
            if known:
                line = {"color": colour, "marker": "o", "markersize": 2.5, "label": label}
                axes.step(*zip(*known, strict=True), where="post", **line)
        both = [step for step in history if step.objective is not None and step.bound is not None]
        if len(both) > 1:
            seconds, upper, lower = zip(*((step.seconds, step.objective, step.bound) for step in both), strict=True)
            axes.fill_between(seconds, lower, upper, step="post", color=WHOLE, alpha=0.5, linewidth=0)
        axes.set_xlabel("seconds")
        axes.set_ylabel("objective")
        axes.legend(loc="best")

    return _write_svg(draw)


def draw_drafts(history: SearchHistory) -> str:
    """The distance between the outputs of every candidate network and the model's."""

    def draw(axes: Any) -> None:
        losses = [math.nan if each.loss is None else each.loss for each in history.drafts]  # a gap in the line
        seconds = [each.seconds for each in history.drafts]
        axes.plot(seconds, losses, "o-", color=KEPT, markersize=2.5, linewidth=1.2, label="tried")
        axes.plot(seconds[history.taken], losses[history.taken], "o", color=REMOVED, markersize=6, label="taken")
        axes.set_xlabel("seconds")
        axes.set_ylabel("distance of the outputs")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")

    return _write_svg(draw)


def draw_trials(trials: Trials) -> str:
    """The quality of candidate networks, by the share kept."""

    def draw(axes: Any) -> None:
        axes.axhline(trials.before, color=MUTED, linewidth=1, label="before")
        axes.axhline(trials.before - trials.max_drop, color=REMOVED, linewidth=1, linestyle="--", label="allowed")
        allowed = trials.before - trials.max_drop
        for colour, label, chosen in (
            (KEPT, "within max_drop", [point for point in trials.points if point[1] >= allowed]),
            (REMOVED, "beyond max_drop", [point for point in trials.points if point[1] < allowed]),
        ):
            if chosen:
                axes.plot(*zip(*chosen, strict=True), "o", color=colour, markersize=5, label=label)
        _show_percent(axes.xaxis)
        axes.set_xlabel("share kept at most")
        axes.set_ylabel("accuracy")
        axes.legend(loc="best")

    return _write_svg(draw)


@contextmanager
def _styled(paint: Callable[[str], str] = str) -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(STYLE | {name: paint(colour) for colour, names in COLOURED.items() for name in names}):
        yield


@contextmanager
def _drawing(axes: Any, rows: int) -> Iterator[tuple[Any, Callable[[str], str]]]:
    """The given axes, or those of a new pyplot figure, which notebooks show; and a function that maps colours to
    those for the background."""
    _require_matplotlib()
    from matplotlib import colors, pyplot

    figure = None
    if axes is None:  # not inside the style context: loading a backend changes settings that must persist
        size = (WIDTH, 0.8 + 0.24 * min(rows, ROWS_FULL_SIZE))
        figure = pyplot.figure(figsize=size, layout="constrained")
    behind = [figure] if figure is not None else [axes, axes.figure]
    seen = [each for each in map(colors.to_rgba, (part.get_facecolor() for part in behind)) if each[3] > 0]
    dark = bool(seen) and sum(seen[0][:3]) < DARK
    with _styled(paint := ON_DARK.__getitem__ if dark else str):
        yield axes if figure is None else figure.add_subplot(), paint


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error


def _write_svg(draw: Callable[[Any], None]) -> str:
    """SVG to embed in a page: its colours, no XML header, deterministic, without pyplot."""
    _require_matplotlib()
    with _styled():
        from matplotlib.figure import Figure

        figure, text = Figure(figsize=CHART, layout="constrained"), io.StringIO()
        draw(figure.add_subplot())
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in ON_THE_PAGE.items():
        svg = svg.replace(colour, variable)
    return svg


def _show_percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0))


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Label the rows, from the top down."""
    size = 8 if len(names) <= ROWS_FULL_SIZE else 8 * ROWS_FULL_SIZE / len(names)
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names], fontsize=size)
    axes.set_ylim(len(names) - 0.5, -0.5)

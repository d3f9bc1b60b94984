"""Render: content as HTML, a self-contained page or a notebook view."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from functools import cache, partial, singledispatch
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.curve import Curve
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.errors import MissingExtraError
from critical_neurons.reports.content import Content
from critical_neurons.reports.content_assembly import assemble
from critical_neurons.reports.drawing import (
    FINE,
    HEIGHT,
    SHADES,
    draw_cost,
    draw_rails,
    draw_units,
    find_lowest_percent,
    place_stages,
)
from critical_neurons.reports.figures import draw_drafts, draw_history, draw_trade_off, draw_trials
from critical_neurons.reports.pictures import MOST_PICTURES
from critical_neurons.reports.wording import show_change, show_number, show_quantity, show_share

TEMPLATES = Path(__file__).parent / "templates"

ROWS_SHOWN = 24
"""Tables with more rows than this are folded."""

FEWEST_DRAWN = 6
"""Smallest number of candidate networks for a chart; fewer are shown as a table."""

NO_PLOTS = "This chart needs matplotlib: pip install 'critical_neurons[plot]'."


def render_page(content: Content, pictures: Mapping[int, str] | None = None) -> str:
    """The report as an HTML page. `pictures`: thumbnails of inputs by row, as `data:` URLs."""
    packed = json.dumps(content.to_dict(), allow_nan=False, separators=(",", ":")).encode()
    return _fill(
        "page.html",
        content,
        pictures=pictures or {},
        charts=_draw_charts(content),
        data="data:application/json;base64," + base64.b64encode(packed).decode(),
    )


@singledispatch
def render_html(shown: Any) -> str:
    """The notebook view of scores, a plan, a comparison or a curve."""
    raise TypeError(f"{type(shown).__name__} has no HTML view.")


@render_html.register
def _(scores: Scores) -> str:
    return _fill("scores.html", assemble(scores=scores))


@render_html.register
def _(plan: Plan) -> str:
    return _fill("plan.html", assemble(plan=plan))


@render_html.register
def _(comparison: Comparison) -> str:
    return _fill("comparison.html", assemble(comparison=comparison))


@render_html.register
def _(curve: Curve) -> str:
    content = assemble(curve=curve)
    return _fill("curve.html", content, charts=_draw_charts(content))


def _draw_charts(content: Content) -> dict[str, Markup | str]:
    charts: dict[str, Markup | str] = {}
    if content.course is not None and content.course.history:
        charts["history"] = _draw(partial(draw_history, content.course.history))
    search = None if content.course is None else content.course.search
    if search is not None and len(search.drafts) >= FEWEST_DRAWN:
        charts["drafts"] = _draw(partial(draw_drafts, search))
    if content.course is not None and content.course.trials is not None:
        charts["trials"] = _draw(partial(draw_trials, content.course.trials))
    if content.trade_off is not None:
        charts["trade_off"] = _draw(partial(draw_trade_off, content.trade_off, "macs"))
        if any(dot.time is not None for dot in content.trade_off.dots):
            charts["trade_off_by_time"] = _draw(partial(draw_trade_off, content.trade_off, "time"))
    return charts


def _draw(draw: Callable[[], str]) -> Markup | str:
    """A chart by matplotlib, which escapes its text; without matplotlib, a hint."""
    try:
        return Markup(draw())
    except MissingExtraError:
        return NO_PLOTS


def _fill(template: str, content: Content, **more: Any) -> str:
    return _environment().get_template(template).render(content=content, track=draw_rails(content), **more)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "quantity": show_quantity,
        "change": show_change,
        "number": show_number,
        "share": show_share,
    }
    environment.globals |= {
        "inline": lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8")),
        "draw_units": draw_units,
        "draw_cost": draw_cost,
        "place_stages": place_stages,
        "lowest_share": find_lowest_percent,
        "HEIGHT": HEIGHT,
        "FINE": FINE,
        "SHADES": SHADES,
        "ROWS_SHOWN": ROWS_SHOWN,
        "CHANGES_SHOWN": MOST_PICTURES,
    }
    return environment

"""Drawing: SVG paths and positions for the templates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from critical_neurons.core.answers import ClassCount
from critical_neurons.core.search_history import RemovalCost, SearchStage
from critical_neurons.reports.content import Content, LayerWidth, Rail, Strip

SHADES = 8
"""Number of shades for scores from 0 to 1."""

HEIGHT, REMOVED_HEIGHT = 10, 4
"""Heights of kept and removed units in a strip."""

FINE = 300
"""With more units than this, each is narrower than a pixel of a small screen, and edges are smoothed."""

ROW, DENSE_ROW, MANY_LAYERS = 26, 19, 40
"""Height of a layer in pixels; the second for more than `MANY_LAYERS` layers."""

ON_A_SHEET = 24
"""Number of layers kept together in print."""

WIDEST_LANE, WIDEST_LANES = 12.0, 96.0
"""Largest distance between rails, and largest width of all rails, in pixels."""


@dataclass(frozen=True)
class RailLine:
    """A rail in pixels, with the vertical position of every layer that writes or reads it."""

    name: str
    x: float
    top: float
    bottom: float
    writers: tuple[float, ...]
    readers: tuple[float, ...]
    kept: bool


@dataclass(frozen=True)
class Stretch:
    """Consecutive layers and the rails that pass them: one sheet in print."""

    top: float
    height: float
    layers: tuple[LayerWidth, ...]
    lines: tuple[RailLine, ...]


@dataclass(frozen=True)
class Track:
    """The layers, each of height `row`, and the rails next to them."""

    width: float
    row: int
    stretches: tuple[Stretch, ...]


def draw_rails(content: Content) -> Track:
    lanes = 1 + max((rail.lane for rail in content.rails), default=-1)
    step = min(WIDEST_LANE, WIDEST_LANES / max(1, lanes))
    row = ROW if len(content.layers) <= MANY_LAYERS else DENSE_ROW
    lines = tuple(_draw_rail(rail, step, row) for rail in content.rails)
    stretches = []
    for first in range(0, len(content.layers), ON_A_SHEET):
        layers = content.layers[first : first + ON_A_SHEET]
        top, height = row * first, row * len(layers)
        passing = tuple(line for line in lines if line.top < top + height and line.bottom > top)
        stretches.append(Stretch(top, height, layers, passing))
    return Track(lanes * step, row, tuple(stretches))


def _draw_rail(rail: Rail, step: float, row: int) -> RailLine:
    writers, readers = ([row * (place + 0.5) for place in places] for places in (rail.writers, rail.readers))
    ends = writers + readers
    x = round(step * (rail.lane + 0.5), 1)
    return RailLine(rail.name, x, min(ends), max(ends), tuple(writers), tuple(readers), rail.kept)


def draw_units(strip: Strip, *, by_score: bool) -> dict[str, str]:
    """SVG paths by CSS class: `stays` or `goes`, and the shade. Equal neighbours are merged to one shape."""
    places: Sequence[int] = range(len(strip.scores or strip.stays or ()))
    scores, stays = strip.scores, strip.stays
    if by_score and scores is not None:
        places = sorted(places, key=lambda place: -scores[place])

    def look(place: int) -> tuple[bool, int]:
        shade = SHADES - 1 if scores is None else min(SHADES - 1, int(SHADES * scores[place]))
        return stays is None or stays[place], shade

    paths, x = defaultdict[str, str](str), 0
    for (kept, shade), run in groupby(map(look, places)):
        width = len(list(run))
        height = HEIGHT if kept else REMOVED_HEIGHT
        paths[f"{'stays' if kept else 'goes'} s{shade}"] += f"M{x} {HEIGHT - height}h{width}v{height}h-{width}z"
        x += width
    return dict(paths)


@dataclass(frozen=True)
class CostCurve:
    """The cost of removing units as a path in a box of 100 x 20, origin at the upper left, and the chosen point."""

    path: str
    x: float
    y: float


def draw_cost(cost: RemovalCost) -> CostCurve:
    count, most = len(cost.losses) - 1, max(cost.losses) or 1.0
    places = [(100 * place / max(count, 1), 20 * (1 - loss / most)) for place, loss in enumerate(cost.losses)]
    path = "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in places)
    share = cost.removed / max(cost.units, 1)
    before = min(int(share * count), max(count - 1, 0))
    along = share * count - before
    y = places[before][1] * (1 - along) + places[min(before + 1, count)][1] * along
    return CostCurve(path, round(100 * share, 2), round(y, 2))


def place_stages(stages: Sequence[SearchStage]) -> list[tuple[SearchStage, float, float]]:
    """Each stage with its start and duration, as percentages of the total."""
    total, began, placed = sum(each.seconds for each in stages) or 1.0, 0.0, []
    for each in stages:
        placed.append((each, round(100 * began / total, 2), round(100 * each.seconds / total, 2)))
        began += each.seconds
    return placed


def find_lowest_percent(classes: Sequence[ClassCount]) -> int:
    """The start of the percentage axis: a multiple of ten below all values."""
    lowest = min((min(each.before, each.after) / each.inputs for each in classes), default=0.0)
    return max(0, min(90, 10 * int(10 * lowest - 1e-9)))

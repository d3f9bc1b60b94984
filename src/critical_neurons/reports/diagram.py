"""Diagram: layers with their widths, rails of shared or skipping channels, and strips of units."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import Bools, Floats, Group, Structure
from critical_neurons.reports.content import LayerWidth, Rail, Strip

MOST_UNITS = 60_000
"""Units listed at most; of a larger network every n-th is, so that a page stays small."""

DIGITS = 4
"""Decimals of scores."""


def list_layers(structure: Structure, plan: Plan | None) -> tuple[LayerWidth, ...]:
    kept = {} if plan is None else plan.kept
    return tuple(
        LayerWidth(each.name, each.kind, each.size, len(kept.get(each.name, each.units)), each.reason)
        for each in structure.layers
    )


def find_rails(structure: Structure) -> tuple[Rail, ...]:
    """One for every group of units that several layers write, or that is read not only by the next layer."""
    places = {layer.name: place for place, layer in enumerate(structure.layers)}
    ends = np.cumsum(structure.group_sizes)
    readers = defaultdict[int, set[int]](set)
    for wiring in structure.wirings:
        if wiring.kernel and wiring.module in places:
            read = np.unique(wiring.inputs[wiring.inputs >= 0])
            for group in np.unique(np.searchsorted(ends, read, side="right")).tolist():
                readers[group].add(places[wiring.module])
    found = []
    for number, group in enumerate(structure.groups):
        writers = sorted(places[name] for name in group.layers)
        behind = sorted(readers[number] - set(writers))
        if len(writers) > 1 or any(place != writers[0] + 1 for place in behind):
            found.append((writers, behind, name_group(group)))
    return _deal(found)


def _deal(found: list[tuple[list[int], list[int], str]]) -> tuple[Rail, ...]:
    """Each on the first lane that is free from its first layer to its last."""
    free: list[int] = []  # where every lane is free again
    rails = []
    for writers, readers, name in sorted(found, key=lambda each: min(each[0] + each[1])):
        first, last = min(writers + readers), max(writers + readers)
        lane = next((at for at, end in enumerate(free) if end < first), len(free))
        free[lane : lane + 1] = [last]
        rails.append(Rail(name, lane, tuple(writers), tuple(readers)))
    return tuple(rails)


def name_group(group: Group) -> str:
    return ", ".join(group.layers)


def list_strips(structure: Structure, scores: Scores | None, plan: Plan | None) -> tuple[Strip, ...]:
    """Scores and plan go by channels of layers: their structures may number units differently."""
    values = None if scores is None else score_units(structure, scores)
    stays = None if plan is None else _find_staying(structure, plan)
    stride = max(1, -(-structure.unit_count // MOST_UNITS))
    return tuple(
        Strip(
            group.layers,
            len(group),
            None if stays is None else int(stays[group.units].sum()),
            None if values is None else tuple(values[group.units][::stride].round(DIGITS).tolist()),
            None if stays is None else tuple(stays[group.units][::stride].tolist()),
            stride,
        )
        for group in structure.groups
    )


def score_units(structure: Structure, scores: Scores) -> Floats:
    """One score per unit; 1 where a layer has none, as it then loses none."""
    values = np.ones(structure.unit_count + 1)
    for layer in structure.removable:
        if layer.name in scores:
            values[layer.units] = scores[layer.name]
    return values[:-1]


def _find_staying(structure: Structure, plan: Plan) -> Bools:
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    removed = plan.removed
    for layer in structure.removable:
        if layer.name in removed:
            stays[layer.units[removed[layer.name]]] = False
    return stays[:-1]

"""Diagram: layers with their widths, rails of shared or skipping channels, and strips of units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import Bools, Floats, Structure
from critical_neurons.reports.content import LayerWidth, Rail, Strip

MOST_UNITS = 60_000
"""Largest number of units listed; of larger networks every n-th unit is, to limit the size of a page."""

DIGITS = 4
"""Scores are rounded to this number of decimals."""


def list_layers(structure: Structure, plan: Plan | None) -> tuple[LayerWidth, ...]:
    kept = {} if plan is None else plan.kept
    return tuple(
        LayerWidth(each.name, each.kind, each.size, len(kept.get(each.name, each.units)), each.reason)
        for each in structure.layers
    )


def find_rails(structure: Structure) -> tuple[Rail, ...]:
    """A rail for every group of channels that several layers write, or that other layers than the next read."""
    places = {layer.name: place for place, layer in enumerate(structure.layers)}
    streams = [(group.layers, structure.find_readers(group.units), False) for group in structure.groups]
    streams += [(each.writers, each.readers, True) for each in structure.kept_streams]
    found: list[Rail] = []
    for writing, reading, kept in streams:
        writers = tuple(sorted(places[name] for name in writing if name in places))
        readers = tuple(sorted({places[name] for name in reading if name in places} - set(writers)))
        drawn = any(set(writers) <= set(rail.writers) and set(readers) <= set(rail.readers) for rail in found)
        if not drawn and (len(writers) > 1 or (writers and any(place != writers[0] + 1 for place in readers))):
            found.append(Rail(", ".join(writing), 0, writers, readers, kept))
    return _deal(found)


def _deal(rails: list[Rail]) -> tuple[Rail, ...]:
    """Assign each rail to the first lane that is free between its first and last layer."""
    free: list[int] = []  # the last layer of every lane so far
    dealt = []
    for rail in sorted(rails, key=lambda each: min(each.writers + each.readers)):
        ends = rail.writers + rail.readers
        lane = next((at for at, end in enumerate(free) if end < min(ends)), len(free))
        free[lane : lane + 1] = [max(ends)]
        dealt.append(replace(rail, lane=lane))
    return tuple(dealt)


def list_strips(structure: Structure, scores: Scores | None, plan: Plan | None) -> tuple[Strip, ...]:
    """Scores and plan are matched by layer and channel, as their structures may number units differently."""
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
    """One score per unit; 1 for layers without scores, which lose no units."""
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

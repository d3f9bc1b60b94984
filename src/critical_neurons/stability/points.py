"""Points: values of pre-activations at points of the boxes. A unit seen both on and off needs no proof."""

from __future__ import annotations

from contextlib import suppress
from typing import assert_never

import numpy as np

from critical_neurons.core.bounds import Interval
from critical_neurons.core.deadline import TimeIsUp, check_time, until
from critical_neurons.core.network import (
    Affine,
    Concat,
    Input,
    MaxPool,
    Network,
    Relu,
    Sum,
    pull_linear,
    spread_windows,
)
from critical_neurons.core.structure import Floats, Ints

DRAWN = 256
"""Points drawn at random, half of them corners."""

STEPS = 12
"""Steps of gradient ascent, each towards the corner that the gradient points to."""

SHARES = (1.0, 0.5, 0.2)
"""Step lengths to try, as shares of the way to the corner."""

CHUNK_NUMBERS = 2 * 10**7


class Points:
    """`highest` and `lowest` (units + 1): the extreme values seen of every unit's pre-activations, at any position in
    any box; the last entry is that of NO_UNIT."""

    def __init__(self, network: Network, boxes: Interval, seed: int = 0) -> None:
        self._network, self._boxes = network, boxes
        self._random = np.random.default_rng(seed)
        self._chunk = max(1, CHUNK_NUMBERS // sum(int(np.prod(op.shape)) for op in network.ops))
        self.highest = np.full(network.unit_count + 1, -np.inf)
        self.lowest = np.full(network.unit_count + 1, np.inf)

    def draw(self, end: float) -> None:
        """Evaluate at centres, random corners and other random points of the boxes."""
        lower, upper = self._boxes.lower, self._boxes.upper
        which = np.concatenate([np.arange(len(lower))[:DRAWN], self._random.integers(len(lower), size=DRAWN)])
        shares = self._random.random((len(which), *lower.shape[1:]))
        shares[: -DRAWN // 2] = 0.5
        shares[-DRAWN // 4 :] = shares[-DRAWN // 4 :].round()
        self.look(lower[which] + shares * (upper - lower)[which], end)

    def look(self, inputs: Floats, end: float = np.inf) -> None:
        """Evaluate at these inputs, as many as time permits until `end`."""
        with suppress(TimeIsUp), until(end):
            for first in range(0, len(inputs), self._chunk):
                self._note(self._network.evaluate(inputs[first : first + self._chunk]))

    def climb(self, index: int, samples: Ints, elements: Ints, signs: Floats, end: float) -> None:
        """Look for points at which sign · element of value `index` is large, one for each box, element and sign."""
        with suppress(TimeIsUp), until(end):
            for first in range(0, len(elements), self._chunk):
                part = slice(first, first + self._chunk)
                self._climb(index, samples[part], elements[part], signs[part])

    def _climb(self, index: int, samples: Ints, elements: Ints, signs: Floats) -> None:
        lower, upper = self._boxes.lower[samples], self._boxes.upper[samples]
        shape, rows = self._network.ops[index].shape, np.arange(len(elements))
        seeds = np.zeros((len(elements), int(np.prod(shape))))
        seeds[rows, elements] = signs
        points = (lower + upper) / 2
        values = self._network.evaluate(points)
        best = values[index].reshape(len(rows), -1)[rows, elements] * signs
        for _ in range(STEPS):
            check_time()
            slopes = differentiate(self._network, index, values, seeds.reshape(-1, *shape))
            corners = np.where(slopes > 0, upper, np.where(slopes < 0, lower, points))
            tried = [points + share * (corners - points) for share in SHARES]
            reached = []
            for each in tried:
                there = self._network.evaluate(each)
                self._note(there)
                reached.append(there[index].reshape(len(rows), -1)[rows, elements] * signs)
            choice = np.argmax(reached, axis=0)
            better = np.take_along_axis(np.array(reached), choice[None], axis=0)[0]
            rising = better > best
            if not rising.any():
                return
            points = np.where(rising.reshape(-1, *[1] * (points.ndim - 1)), np.array(tried)[choice, rows], points)
            best = np.maximum(best, better)
            values = self._network.evaluate(points)

    def _note(self, values: list[Floats]) -> None:
        for op in self._network.ops:
            if isinstance(op, Relu):
                before = values[op.source].reshape(-1, int(np.prod(op.shape)))
                self.note(np.broadcast_to(op.units, op.shape).reshape(-1), before.min(axis=0), before.max(axis=0))

    def note(self, units: Ints | int, lowest: Floats | float, highest: Floats | float) -> None:
        np.minimum.at(self.lowest, units, lowest)
        np.maximum.at(self.highest, units, highest)


def differentiate(network: Network, index: int, values: list[Floats], seeds: Floats) -> Floats:
    """The gradients of seeds[r] · value `index` with respect to input r, at the point behind `values`."""
    adjoints = {index: seeds}
    for at in range(index, 0, -1):
        adjoint = adjoints.pop(at, None)
        if adjoint is None:
            continue
        for source, part in _pull(network, at, adjoint, values):
            adjoints[source] = adjoints[source] + part if source in adjoints else part
    return adjoints.get(0, np.zeros((len(seeds), *network.input_shape)))


def _pull(network: Network, at: int, adjoint: Floats, values: list[Floats]) -> list[tuple[int, Floats]]:
    op = network.ops[at]
    match op:
        case Input():
            return []
        case Relu():
            return [(op.source, adjoint * (values[op.source] > 0))]
        case MaxPool():
            return [(op.source, _route(op, adjoint, values[op.source]))]
        case Affine() | Sum() | Concat():
            return pull_linear(network.ops, op, adjoint)
        case _:
            assert_never(op)


def _route(op: MaxPool, adjoint: Floats, before: Floats) -> Floats:
    """The gradient of a window goes to its largest element."""
    largest = spread_windows(op, before).argmax(axis=3)  # (batch, channels, positions out)
    windows = np.broadcast_to(op.windows, (*largest.shape, op.windows.shape[1]))
    positions = np.take_along_axis(windows, largest[..., None], axis=3)
    routed = np.zeros((*before.shape[:2], int(np.prod(before.shape[2:]))))
    rows, channels = np.ogrid[: before.shape[0], : before.shape[1]]
    np.add.at(routed, (rows[..., None], channels[..., None], positions[..., 0]), adjoint.reshape(largest.shape))
    return routed.reshape(before.shape)

"""Local search for good 0/1 scores: units are dropped, taken back or exchanged, with a forward pass per trial."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

import numpy as np

from critical_neurons.core.loss import Loss, as_loss
from critical_neurons.core.network import Network
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.formulations.coefficients import find_dependent
from critical_neurons.formulations.objective import BudgetRows, Goal, encode_sparsity

MOST_MOVES = 2000
"""Moves tried before the best one is taken; of more moves this many are drawn at random."""

KICKS = 30
"""Restarts from the best mask with some scores flipped at random."""

TURNED = (2, 6)
"""Smallest and largest number of scores flipped."""

CHUNK_ELEMENTS = 10**7
"""Numbers in forward passes evaluated together."""

EXCESS = 1e6
"""Penalty per relative excess over a budget: larger than any loss."""

TIE = 1e-9
"""Extra cost per unit, so that the smaller of two equally good masks is preferred."""


class MaskSearch:
    def __init__(self, network: Network, inputs: Floats, labels: Ints | Loss, goal: Goal) -> None:
        self._network, self._inputs, self._loss, self._goal = network, inputs, as_loss(labels), goal
        dependent = find_dependent(network.ops)
        read = {source for index, op in enumerate(network.ops) if dependent[index] for source in op.sources}
        values = network.evaluate(inputs)
        self._fixed = {
            index: values[index] if index in read else np.zeros((len(inputs), 0))
            for index in range(len(values))
            if not dependent[index]
        }
        self._size = len(inputs) * sum(int(np.prod(op.shape)) for op in network.ops)

    def improve(self, mask: Floats, seconds: float, seed: int) -> Floats:
        """The best mask found within the time by descent and restarts; with few units all masks are tried."""
        if 2 ** len(mask) <= MOST_MOVES:
            masks = np.array(list(product([0.0, 1.0], repeat=len(mask))))
            return np.asarray(self._choose(masks, np.inf)[0])
        end = time.monotonic() + seconds
        generator = np.random.default_rng(seed)
        best, value = self._descend(mask, end, generator)
        for _ in range(KICKS):
            if time.monotonic() >= end:
                break
            count = min(int(generator.integers(TURNED[0], TURNED[1] + 1)), len(mask))
            kicked = best.copy()
            turned = generator.choice(len(mask), count, replace=False)
            kicked[turned] = 1.0 - kicked[turned]
            found, found_value = self._descend(kicked, end, generator)
            if found_value < value:
                best, value = found, found_value
        return best

    def _descend(self, mask: Floats, end: float, generator: np.random.Generator) -> tuple[Floats, float]:
        """Repeat the best move until none improves or the time is up."""
        value = float(self.evaluate(mask[None])[0])
        while time.monotonic() < end:
            best, best_value = self._choose(_list_moves(mask, generator), end)
            if best_value >= value - TIE / 2:
                break
            mask, value = best, best_value
        return mask, value

    def _choose(self, masks: Floats, end: float) -> tuple[Floats, float]:
        """The best of the masks, or of those tried in time."""
        best, best_value = masks[0], np.inf
        step = max(1, CHUNK_ELEMENTS // self._size)
        for at in range(0, len(masks), step):
            values = self.evaluate(masks[at : at + step])
            if values.min() < best_value:
                best, best_value = masks[at + int(values.argmin())], float(values.min())
            if time.monotonic() >= end:
                break
        return best, best_value

    def evaluate(self, masks: Floats) -> Floats:
        """The objective of each mask; masks is (masks, units)."""
        batch = len(self._inputs)
        known = {
            index: np.tile(value, (len(masks), *(1 for _ in value.shape[1:]))) for index, value in self._fixed.items()
        }
        logits = self._network.evaluate(self._inputs, np.repeat(masks, batch, axis=0), known)[-1]
        losses = self._loss.choose(np.tile(np.arange(batch), len(masks))).values(logits)
        loss = losses.reshape(len(masks), batch).sum(axis=1)
        return np.asarray(self._add_goal(loss, masks) + TIE * masks.sum(axis=1))

    def _add_goal(self, loss: Floats, masks: Floats) -> Floats:
        if isinstance(self._goal, BudgetRows):
            excess = np.maximum(masks @ self._goal.weights.T / np.maximum(self._goal.limits, 1e-9) - 1.0, 0.0)
            return np.asarray(loss / len(self._inputs) + EXCESS * excess.max(axis=1))
        rows = encode_sparsity(self._goal, self._network, masks.shape[1], masks.shape[1] + 1)
        sparsity = (rows.lower[:, None] - rows.matrix[:, : masks.shape[1]] @ masks.T).max(axis=0)
        return np.asarray(sparsity + self._goal.softmax_weight(len(self._inputs)) * loss)


def _list_moves(mask: Floats, generator: np.random.Generator) -> Floats:
    """All masks with one score flipped, and those with one unit dropped and another dropped or taken back: a change
    in one layer alone may gain nothing, since the sparsity term is a maximum over layers."""
    kept, dropped = np.flatnonzero(mask == 1), np.flatnonzero(mask == 0)
    pairs = np.array(list(_pairs(kept.tolist(), dropped.tolist())), dtype=np.int64).reshape(-1, 2)
    most = max(MOST_MOVES - len(mask), 0)
    if len(pairs) > most:
        pairs = pairs[generator.choice(len(pairs), most, replace=False)]
    moves = np.tile(mask, (len(mask) + len(pairs), 1))
    singles = np.arange(len(mask))
    moves[singles, singles] = 1.0 - mask
    for column in (0, 1):
        rows = len(mask) + np.arange(len(pairs))
        moves[rows, pairs[:, column]] = 1.0 - mask[pairs[:, column]]
    return moves


def _pairs(kept: list[int], dropped: list[int]) -> Iterator[tuple[int, int]]:
    for at, first in enumerate(kept):
        yield from ((first, second) for second in kept[at + 1 :])
        yield from ((first, second) for second in dropped)

"""The set of all scores s and columns y of sums with f(s) <= y <= c(s), equation 9b, for first-order methods.

f is convex, piecewise linear and increasing, c is affine. A unit's score is tied to many sums, but given the score
every sum has an interval of its own. So projecting onto the set, or minimising a linear function over it, is one
convex problem in one variable per unit.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints
from critical_neurons.formulations.pooled_columns import Sums

PRECISION, MOST_STEPS = 1e-11, 80
"""A projection ends when its scores are known to this precision, and at the latest after this many steps."""


class ScoreSums:
    def __init__(self, all_sums: list[Sums], unit_count: int) -> None:
        """`all_sums` is not empty."""
        firsts = np.cumsum([0, *(len(sums.explicit) for sums in all_sums)])[:-1]
        self._unit_count = unit_count
        self.columns: Ints = np.concatenate([np.arange(sums.columns.start, sums.columns.stop) for sums in all_sums])
        self._units: Ints = np.concatenate([sums.units for sums in all_sums])
        self._scored: Bools = self._units != NO_UNIT
        self._ceiling = _join([sums.ceiling for sums in all_sums])
        self._pieces = _join([sums.pieces for sums in all_sums])
        self._owners: Ints = np.concatenate([first + s.owners for first, s in zip(firsts, all_sums, strict=True)])
        self._starts = np.searchsorted(self._owners, np.arange(len(self.columns)))
        begins = np.concatenate([[True], self._owners[1:] != self._owners[:-1]])
        self._elements = tuple(np.where(begins, side, np.diff(side, prepend=0.0)) for side in self._pieces)
        """Of every element of a sum: constant and slope of its own share max(0, constant + slope s) of f."""
        constant, slope = self._elements
        self._turns: Floats = np.where(constant > 0, -np.inf, np.inf)
        np.divide(-constant, slope, where=slope > 0, out=self._turns)
        self._keys = np.maximum.accumulate(2.0 * self._owners + np.clip(self._turns, -0.5, 1.5))
        """Increasing over all elements, so that one search finds the active piece of every sum."""

    def limit(self, scores: Floats) -> tuple[Floats, Floats]:
        """f and c of every sum, given the score of each."""
        constant, slope = self._find_piece(np.arange(len(self.columns)), scores, "left")
        return constant + slope * scores, self._ceiling[0] + self._ceiling[1] * scores

    def project(self, columns: Floats, strides: Floats, lower: Floats, upper: Floats) -> None:
        """Move the scores and sums to the nearest point x of the set, with lower <= s <= upper, in place.

        The squared distance of a column counts with 1 / stride. Its derivative in a score increases, with jumps at
        the kinks of f. The zero is enclosed by two steps of Newton's method, then by bisection over the kinks;
        between two kinks Newton's method ends soon.
        """
        given, units = columns.copy(), slice(0, self._unit_count)
        least, most = lower[units].copy(), upper[units].copy()
        scores = np.clip(columns[units], least, most)
        moving = np.zeros(self._unit_count, dtype=bool)
        moving[self._units[self._scored]] = True
        for step in range(MOST_STEPS):
            which = np.flatnonzero(self._scored & moving[self._units])
            if len(which) == 0:
                break
            left, right, curvature = self._differentiate(which, scores, given, strides)
            width = most - least
            np.minimum(most, scores, where=moving & (right >= 0), out=most)
            np.maximum(least, scores, where=moving & (left <= 0), out=least)
            newton = np.clip(scores - np.where(right < 0, right, left) / curvature, least, most)
            moving &= (most - least > PRECISION) & (np.abs(newton - scores) > PRECISION)
            if step > 1:
                slow = most - least > width / 2
                newton = np.where(slow, (least + most) / 2, newton)
                newton = self._choose_kink(least, most, newton)
            scores = np.where(moving, newton, np.clip(scores, least, most))
        columns[units] = scores
        floor, ceiling = self.limit(self._read(scores))
        columns[self.columns] = np.clip(given[self.columns], floor, np.maximum(floor, ceiling))

    def minimise(self, cost: Floats, lower: Floats, upper: Floats) -> float:
        """The minimum of cost · x over the scores and sums of the set with lower <= s <= upper."""
        by_score, own = cost[: self._unit_count].copy(), cost[self.columns]
        gain = np.minimum(own, 0.0)  # these sums are at c, the others at f
        by_score += self._add_up(slice(None), gain * self._ceiling[1])
        value = float(gain @ self._ceiling[0] + (gain * self._ceiling[1])[~self._scored].sum())
        floor, _ = self.limit(np.ones(len(own)))
        value += float((np.maximum(own, 0.0) * floor)[~self._scored].sum())
        best = np.where(by_score > 0, lower[: self._unit_count], upper[: self._unit_count])
        order, units, starts, owners = self._by_unit
        weights = np.maximum(own, 0.0)[self._owners[order]]
        constant, slope = (side[order] for side in self._elements)
        rises = np.cumsum(weights * slope)
        before = np.concatenate([[0.0], rises])[starts]
        increases = by_score[units][owners] + rises - before[owners] >= 0
        at, turned = upper[units], np.flatnonzero(increases)[::-1]
        at[owners[turned]] = self._turns[order][turned]  # the first one of each unit is written last
        at = np.where(by_score[units] >= 0, lower[units], at)
        best[units] = np.clip(at, lower[units], upper[units])
        shares = np.maximum(constant + slope * best[units][owners], 0.0)
        return value + float(by_score @ best + weights @ shares)

    @cached_property
    def _by_unit(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The elements with a score in the order of their units and of the scores at which they become positive; the
        units, the first element of each, and the place of each element's unit among them."""
        scored = np.flatnonzero(self._scored[self._owners])
        own = self._units[self._owners[scored]]
        order = np.lexsort((self._turns[scored], own))
        units, starts, owners = np.unique(own[order], return_index=True, return_inverse=True)
        return scored[order], units, starts, owners

    def _differentiate(
        self, which: Ints, scores: Floats, given: Floats, strides: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """By unit: the derivatives of half the squared distance from the left and from the right, and the second
        derivative."""
        own, at = given[self.columns[which]], self._read(scores)[which]
        weights, score_weights = 1.0 / strides[self.columns[which]], 1.0 / strides[: self._unit_count]
        (constant, rise), (_, next_rise) = (self._find_piece(which, at, side) for side in ("left", "right"))
        top = self._ceiling[1][which]
        below = np.maximum(constant + rise * at - own, 0.0)
        above = np.maximum(own - self._ceiling[0][which] - top * at, 0.0)
        common = score_weights * (scores - given[: self._unit_count]) - self._add_up(which, weights * above * top)
        curvature = np.where(below > 0, rise**2, 0.0) + np.where(above > 0, top**2, 0.0)
        return (
            common + self._add_up(which, weights * below * rise),
            common + self._add_up(which, weights * below * next_rise),
            score_weights + self._add_up(which, weights * curvature),
        )

    def _find_piece(self, which: Ints, scores: Floats, side: Literal["left", "right"]) -> tuple[Floats, Floats]:
        """Constant and slope of f of some sums at their scores; at a kink those on the given side."""
        ends = np.searchsorted(self._keys, 2.0 * which + scores, side=side)
        active = ends > self._starts[which]
        constant, slope = (np.where(active, piece[ends - 1], 0.0) for piece in self._pieces)
        return constant, slope

    def _choose_kink(self, least: Floats, most: Floats, otherwise: Floats) -> Floats:
        """By unit: the middle one of all kinks between the two scores; if there is none, the score given."""
        order, units, _, _ = self._by_unit
        first = np.searchsorted(self._unit_keys, 2.0 * np.arange(len(units)) + least[units], side="right")
        end = np.searchsorted(self._unit_keys, 2.0 * np.arange(len(units)) + most[units], side="left")
        chosen = otherwise.copy()
        middle = np.minimum((first + end) // 2, len(order) - 1)
        chosen[units] = np.where(end > first, self._turns[order[middle]], otherwise[units])
        return np.clip(chosen, least, most)

    @cached_property
    def _unit_keys(self) -> Floats:
        """As `_keys`, over the elements sorted by unit."""
        order, _, _, places = self._by_unit
        keys: Floats = np.maximum.accumulate(2.0 * places + np.clip(self._turns[order], -0.5, 1.5))
        return keys

    def _read(self, scores: Floats) -> Floats:
        """The score of every sum; 1 for those without."""
        return np.where(self._scored, scores[self._units], 1.0)

    def _add_up(self, which: Ints | slice, amounts: Floats) -> Floats:
        """Sums over the sums of each unit."""
        units, scored = self._units[which], self._scored[which]
        added = np.bincount(units[scored], amounts[scored], minlength=self._unit_count)
        return added.astype(np.float64)  # of no sums at all they would be integers


def _join(sides: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    constants, slopes = zip(*sides, strict=True)
    return np.concatenate(constants), np.concatenate(slopes)

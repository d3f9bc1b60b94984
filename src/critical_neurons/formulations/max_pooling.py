"""Max pools: windows with the same winner for all scores, and an explicit value for the others.

Comparing bounds does not decide a window, since the bounds are those of the unpruned network and pruning may reduce
an activation to zero. A window is decided if all rivals are dead, or if winner minus rival, an affine form, is
nonnegative over the whole box of columns. The value of a window lies between 0 and its highest bound M, and so must
that of its winner. This is not guaranteed for a *loose* element: a clipped activation is the difference of two ReLUs,
which may leave these bounds while their gates are relaxed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import sparse

from critical_neurons.core.network import MaxPool, spread_windows
from critical_neurons.core.structure import Bools, Floats, Ints

PAIR_LIMIT = 50_000
"""Most pairs of winner and rival compared; in larger pools only dead rivals decide a window."""

SAFE = -1e-12
"""Below this relative difference of winner and rival, the rival may win."""


@dataclass(frozen=True)
class Pool:
    """One max pool on the whole batch. Windows are numbered (batch, channels, output positions); elements are flat
    indices of the input.

    `winners` holds the candidate winner of every window, `explicit` the windows in which it does not always win;
    their values are the columns `first`, … times `tops`. `rivals` are the live elements of those windows, `rivalries`
    the index in `explicit` of each one's window.
    """

    winners: Ints
    explicit: Ints
    tops: Floats
    first: int
    rivals: Ints
    rivalries: Ints
    read_size: int

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + len(self.explicit))

    def at(self, samples: slice) -> Pool:
        """The part for some of the data points, of a pool without explicit windows."""
        first = samples.start * self.read_size
        return replace(self, winners=self.winners[samples] - first)

    @cached_property
    def decided(self) -> Bools:
        decided = np.ones(self.winners.shape, dtype=bool)
        decided.reshape(-1)[self.explicit] = False
        return decided

    @cached_property
    def rival_counts(self) -> Ints:
        """For each window in `explicit`."""
        return np.bincount(self.rivalries, minlength=len(self.explicit))

    def most(self, read: Floats) -> Floats:
        """The largest y of every undecided window under relaxed choices: k y <= k - 1 + the sum of h_i / M."""
        shares = read.reshape(-1)[self.rivals] / self.tops[self.rivalries]
        total = np.bincount(self.rivalries, shares, minlength=len(self.explicit))
        most: Floats = 1.0 + (total - 1.0) / self.rival_counts
        return most

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """All pairs of winner and rival; none if there are too many."""
        winners = self.winners.reshape(-1)[self.explicit][self.rivalries]
        others = np.flatnonzero(winners != self.rivals)
        chosen = others if len(others) <= PAIR_LIMIT else others[:0]
        return winners[chosen], self.rivals[chosen]

    def settle(self, safe: Bools) -> Pool:
        """The pool without the windows that turned out to be decided."""
        renumbered = np.cumsum(~safe) - 1
        stay = ~safe[self.rivalries]
        return replace(
            self,
            explicit=self.explicit[~safe],
            tops=self.tops[~safe],
            rivals=self.rivals[stay],
            rivalries=renumbered[self.rivalries[stay]],
        )

    def apply(self, values: Floats, columns: Floats) -> Floats:
        result = values.reshape(-1)[self.winners]
        result.reshape(-1)[self.explicit] = self.tops * columns[self.columns]
        return result

    def adjoint(self, adjoint: Floats, samples: Ints) -> Floats:
        """(rows, *shape out) to (rows, elements of one data point): every decided window to its winner."""
        rows = len(samples)
        through = np.where(self.decided[samples], adjoint.reshape(self.winners[samples].shape), 0.0)
        places = self.winners[samples] % self.read_size + (np.arange(rows) * self.read_size)[:, None, None]
        summed: Floats = np.bincount(places.reshape(-1), through.reshape(-1), minlength=rows * self.read_size).astype(
            np.float64
        )
        return summed.reshape(rows, self.read_size)


def resolve_windows(op: MaxPool, upper: Floats, ranks: Floats, loose: Bools, first: int) -> Pool:
    """Windows with at most one live element are decided, unless it is `loose`; others may be later, by `settle`.

    The candidate winner is the live element of the highest rank. With the values at the centre of the box of columns
    as `ranks` it is the only possible winner: of two affine functions, one that is nowhere below the other on the box
    and differs from it is above it at the centre.
    """
    batch, channels = upper.shape[:2]
    positions = upper[0, 0].size
    spread = spread_windows(op, upper)
    base = (np.arange(batch)[:, None, None] * channels + np.arange(channels)[None, :, None]) * positions
    elements = base[..., None] + op.windows
    live = spread > 0
    ranked = np.where(live, spread_windows(op, ranks), -np.inf)
    best = np.where(live.any(axis=3), ranked.argmax(axis=3), spread.argmax(axis=3))[..., None]
    winners = np.take_along_axis(elements, best, axis=3)[..., 0]
    explicit = np.flatnonzero((live.sum(axis=3) > 1) | loose.reshape(-1)[winners])
    size = op.windows.shape[1]
    live_there = live.reshape(-1, size)[explicit]
    return Pool(
        winners=winners,
        explicit=explicit,
        tops=spread.max(axis=3).reshape(-1)[explicit],
        first=first,
        rivals=elements.reshape(-1, size)[explicit][live_there],
        rivalries=np.repeat(np.arange(len(explicit)), live_there.sum(axis=1)),
        read_size=channels * positions,
    )


def winners_are_safe(pool: Pool, loose: Bools, at_zero: Floats, differences: sparse.csr_array) -> Bools:
    """For each window in `explicit`: whether the winner is not loose and beats every rival for all columns in [0, 1].

    `differences` are the coefficients of `pool.pairs`, `at_zero` the inputs with all columns at 0.
    """
    winners, rivals = pool.pairs
    if len(winners) == 0:
        return np.zeros(len(pool.explicit), dtype=bool)
    flat = at_zero.reshape(-1)
    least = flat[winners] - flat[rivals] + differences.minimum(0).sum(axis=1)
    tops = pool.tops[pool.rivalries]
    contested = pool.winners.reshape(-1)[pool.explicit][pool.rivalries] != pool.rivals
    beaten = np.bincount(pool.rivalries[contested], least < SAFE * tops[contested], minlength=len(pool.explicit))
    return np.equal(beaten, 0) & ~loose.reshape(-1)[pool.winners.reshape(-1)[pool.explicit]]

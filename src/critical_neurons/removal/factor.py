"""Factoring: of units that are always on, only as many stay as there are functions of them that are read.

Those that are linear combinations of others go by themselves (`choose_basis`).
What a layer behind reads of them, G h = G (A x + a), is affine in x. Its rank q may be far below the number of units:
with ten outputs it is at most ten. A singular value decomposition G A = U V gives q units h' = V x + s with a shift s
that keeps them at or above 0 for all x in reach, so that their ReLUs are open as well, and G h = U h' + G a - U s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from critical_neurons.core.bounds import Interval
from critical_neurons.core.structure import Floats, Ints

RANK = 1e-10
"""Of the largest pivot: what is smaller counts as zero."""

SINGULAR = 1e-13
"""Of the largest singular value: what is smaller is rounding."""

MARGIN = 1e-9
"""Added to a shift, relative to it: rounding must not close a ReLU."""


@dataclass(frozen=True)
class Factors:
    """`weight` and `shift` of the new units, how far they reach, and what the reader makes of them."""

    weight: Floats
    shift: Floats
    reach: Interval
    reading: Floats
    constant: Floats


def factor(read: Floats, weight: Floats, bias: Floats, inputs: Interval) -> Factors | None:
    """`read` (outputs, units) of units weight · x + bias, x in `inputs`; None where they are as many already."""
    left, values, right = np.linalg.svd(read @ weight, full_matrices=False)
    rank = int((values > SINGULAR * max(values.max(initial=0.0), np.finfo(float).tiny)).sum())
    if rank >= len(weight):
        return None
    made = values[:rank, None] * right[:rank]
    ends = made * inputs.lower, made * inputs.upper
    lowest, highest = np.minimum(*ends).sum(axis=1), np.maximum(*ends).sum(axis=1)
    shift = -lowest + MARGIN * (np.abs(lowest) + np.abs(highest))
    reading = left[:, :rank]
    reach = Interval(np.zeros(rank), highest + shift)
    return Factors(made, shift, reach, reading, read @ bias - reading @ shift)


def choose_basis(rows: Floats) -> tuple[Ints, Ints]:
    """Rows that all are combinations of, by pivoted QR, and the others."""
    if not rows.size:
        return np.zeros(0, dtype=np.int64), np.arange(len(rows))
    _, triangle, order = linalg.qr(rows.T, mode="economic", pivoting=True)
    pivots = np.abs(np.diag(triangle))
    rank = int((pivots > RANK * max(pivots[0], np.finfo(float).tiny)).sum())
    return np.sort(order[:rank]), np.sort(order[rank:])

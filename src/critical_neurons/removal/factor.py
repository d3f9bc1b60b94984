"""Factor: replace always-active units by as few as the rank of what the next layer computes from them.

The next layer computes G h = G (A x + a), which is affine in x. Its rank q may be far below the number of units: with
ten outputs it is at most ten. A singular value decomposition G A = U V gives q new units h' = V x + s, with a shift s
that keeps them at or above 0 for all reachable x, so that their ReLUs are always active too, and
G h = U h' + G a - U s. `choose_basis` finds units that are linear combinations of others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from critical_neurons.core.bounds import Interval
from critical_neurons.core.structure import Floats, Ints

RANK = 1e-10
"""Pivots below this share of the largest count as zero."""

SINGULAR = 1e-13
"""Singular values below this share of the largest are rounding errors."""

MARGIN = 1e-9
"""Relative margin of the shift, so that rounding cannot make a ReLU inactive."""


@dataclass(frozen=True)
class Factors:
    """`weight` and `shift` of the new units, their range, and the weights (`reading`) and bias of their reader."""

    weight: Floats
    shift: Floats
    reach: Interval
    reading: Floats
    constant: Floats


def factor(read: Floats, weight: Floats, bias: Floats, inputs: Interval) -> Factors | None:
    """For units weight · x + bias, x in `inputs`, read with weights `read` (outputs, units); None at full rank."""
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
    """A basis among the rows, by pivoted QR, and the other rows."""
    if not rows.size:
        return np.zeros(0, dtype=np.int64), np.arange(len(rows))
    _, triangle, order = linalg.qr(rows.T, mode="economic", pivoting=True)
    pivots = np.abs(np.diag(triangle))
    rank = int((pivots > RANK * max(pivots[0], np.finfo(float).tiny)).sum())
    return np.sort(order[:rank]), np.sort(order[rank:])

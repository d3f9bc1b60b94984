"""The saddle point form of the eliminated program with relaxed gates, for first-order methods (method.md, section 4).

All rows and logits are affine in the columns: one forward pass gives their values, one backward pass a combination of
their coefficients. No coefficient is stored. Rows, in order, for every ReLU

    q / U - y <= 0,    y + (L - q) / (U - L) <= 0    at undecided elements,    floor <= q <= ceiling at the others,

then for every sum its ceiling and one of its pieces, the steepest at the point last aimed at; then the fixed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from critical_neurons.core.network import Affine, Concat, MaxPool, Relu, Sum, pull_linear
from critical_neurons.core.program import Program
from critical_neurons.core.structure import NO_UNIT, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.coefficients import add_adjoint
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.pooled_columns import Sums
from critical_neurons.formulations.relaxed_points import Repair


def find_saddle(affine: AffineNetwork, program: Program) -> SaddleForm | None:
    """None if the network has max pools, or gates that follow scores."""
    if any(isinstance(op, MaxPool) for op in affine.ops) or any(g.follow_scores for g in affine.gates.values()):
        return None
    return SaddleForm(affine, program)


@dataclass(frozen=True)
class SumElements:
    """The undecided elements of all sums that have a score, by unit and then by the score where they turn positive.

    Their share of a column y is max(0, constant + slope s). `columns` are those of their sums, `starts` the first
    element of each of the `units`.
    """

    constant: Floats
    slope: Floats
    turns: Floats
    columns: Ints
    owners: Ints
    units: Ints
    starts: Ints


class SaddleForm:
    def __init__(self, affine: AffineNetwork, program: Program) -> None:
        self._affine, rows = affine, program.rows
        self._fixed = sparse.csr_array(rows.matrix[:, : program.term.columns.start])
        self._cost = program.cost[: program.term.columns.start]
        self._fixed_limits = rows.lower, rows.upper
        self._stable = {index: self._find_stable(index, gate) for index, gate in affine.gates.items()}
        self._repair = Repair(affine, program, lift=True)
        self._tangents: dict[int, tuple[Floats, Floats]] = {}
        self.aim(np.ones(affine.column_count))

    def _find_stable(self, index: int, gate: Gate) -> Ints:
        """Elements with a row of their own. Those of a first layer follow from the least scores."""
        stable = np.full(gate.floor.size, self._affine.depends[self._affine.ops[index].sources[0]])
        stable[gate.explicit] = False
        return np.flatnonzero(stable)

    def aim(self, columns: Floats) -> None:
        """Take the piece of every sum that is largest at these scores."""
        for index, sums in self._affine.sums.items():
            pieces, tilts = sums.pieces
            values = pieces + tilts * _read_scores(sums, columns)[sums.owners]
            largest = np.zeros(len(sums.explicit))
            np.maximum.at(largest, sums.owners, values)
            hit = np.flatnonzero((values == largest[sums.owners]) & (values > 0))
            constant, slope = np.zeros((2, len(sums.explicit)))
            constant[sums.owners[hit]], slope[sums.owners[hit]] = pieces[hit], tilts[hit]
            self._tangents[index] = constant, slope

    @property
    def limits(self) -> tuple[Floats, Floats]:
        lower: list[Floats] = []
        upper: list[Floats] = []
        for index, gate in self._affine.gates.items():
            count, stable = 2 * len(gate.explicit), self._stable[index]
            lower += [np.full(count, -np.inf), gate.floor.reshape(-1)[stable]]
            upper += [np.zeros(count), gate.ceiling.reshape(-1)[stable]]
        for index, sums in self._affine.sums.items():
            count = len(sums.explicit)
            lower += [np.full(count, -np.inf), self._tangents[index][0]]
            upper += [sums.ceiling[0], np.full(count, np.inf)]
        return np.concatenate([*lower, self._fixed_limits[0]]), np.concatenate([*upper, self._fixed_limits[1]])

    def apply(self, columns: Floats) -> tuple[Floats, Floats]:
        """The values of all rows, and the logits (batch, classes)."""
        at = self._affine.evaluate(columns)
        parts: list[Floats] = []
        for index, gate in self._affine.gates.items():
            q, y = at.shrunk[index].reshape(-1), columns[gate.columns]
            undecided, lower = q[gate.explicit], gate.floor.reshape(-1)[gate.explicit]
            parts += [undecided / gate.tops - y, y + (lower - undecided) / (gate.tops - lower)]
            parts.append(q[self._stable[index]])
        for index, sums in self._affine.sums.items():
            y, scores = columns[sums.columns], _read_scores(sums, columns)
            scored = np.where(sums.units == NO_UNIT, 0.0, scores)
            parts += [y - sums.ceiling[1] * scored, y - self._tangents[index][1] * scored]
        return np.concatenate([*parts, self._fixed @ columns]), at.logits.reshape(len(at.logits), -1)

    def adjoint(self, multipliers: Floats, seeds: Floats) -> Floats:
        """The coefficients of multipliers · rows + the sum of seeds · logits."""
        gates, sums, fixed = self._divide(multipliers)
        combined: Floats = self._fixed.T @ fixed

        def seed(index: int, gate: Gate) -> Floats:
            above, below, stable = gates[index]
            combined[gate.columns] += below - above
            return self._seed(index, gate, above, below, stable)

        for index, (ceiling, tangent) in sums.items():
            own = self._affine.sums[index]
            combined[own.columns] += ceiling + tangent
            self._add_scores(combined, own, -(ceiling * own.ceiling[1] + tangent * self._tangents[index][1]))
        self._pull(seeds, combined, seed)
        return combined

    def bound(self, multipliers: Floats, seeds: Floats, lower: Floats, upper: Floats) -> float:
        """A lower bound of cost · x + the sum of seeds · logits over all feasible x in the box.

        Multipliers are corrected, from the last layer to the first, until no undecided activation has a negative
        reduced cost: its minimum is then at 0. The columns of sums and the scores are minimised exactly, whatever the
        multipliers of sums.
        """
        gates, _, fixed = self._divide(multipliers)
        affine = self._affine
        least, most = self._fixed_limits
        fixed = np.clip(fixed, np.where(np.isfinite(least), -np.inf, 0.0), np.where(np.isfinite(most), np.inf, 0.0))
        carried = float((self._fixed.T @ fixed)[-1])
        if self._cost[-1] and carried:  # the sparsity term is left with no reduced cost
            fixed = fixed * (-self._cost[-1] / carried)
        reduced: Floats = self._cost + self._fixed.T @ fixed
        values = [float((seeds * affine.at_zero.logits.reshape(seeds.shape)).sum()), -_support(fixed, least, most)]

        def seed(index: int, gate: Gate) -> Floats:
            above, below, stable = (each.copy() for each in gates[index])
            above, below = np.maximum(above, 0.0), np.maximum(below, 0.0)
            left = reduced[gate.columns] - above + below
            cut = np.clip(-left, 0.0, above)
            above, left = above - cut, left + cut
            below, left = below + np.maximum(-left, 0.0), np.maximum(left, 0.0)
            reduced[gate.columns] = left
            floor, ceiling = (side.reshape(-1) for side in (gate.floor, gate.ceiling))
            low, own = floor[gate.explicit], self._stable[index]
            seeded = self._seed(index, gate, above, below, stable)
            values.append(float(below @ (low / (gate.tops - low))) - _support(stable, floor[own], ceiling[own]))
            values.append(float((seeded * affine.at_zero.shrunk[index]).sum()))
            return seeded

        self._pull(seeds, reduced, seed)
        return sum(values) + self._minimise(reduced, lower, upper)

    def repair(self, point: Floats) -> Floats:
        """A point near the given one, feasible unless a decided pre-activation leaves its bounds."""
        return self._repair(point)

    @cached_property
    def _elements(self) -> SumElements:
        """Sorted at the first bound, since most programs are solved by other methods."""
        return _sort_elements(list(self._affine.sums.values()))

    def _minimise(self, reduced: Floats, lower: Floats, upper: Floats) -> float:
        """The minimum over the box, in which the column of a sum lies between its limits at the scores."""
        value, count = 0.0, self._affine.unit_count
        for sums in self._affine.sums.values():
            gain = np.minimum(reduced[sums.columns], 0.0)  # at the ceiling
            value += float(gain @ sums.ceiling[0])
            value += float((gain * sums.ceiling[1])[sums.units == NO_UNIT].sum())
            self._add_scores(reduced, sums, gain * sums.ceiling[1])
            loss = np.where(sums.units == NO_UNIT, np.maximum(reduced[sums.columns], 0.0), 0.0)  # at the pieces
            value += float(loss @ sums.limit(np.ones(count))[0])
        best = np.where(reduced[:count] > 0, lower[:count], upper[:count])
        elements = self._elements
        if len(elements.units):
            weights = np.maximum(reduced[elements.columns], 0.0)
            rises = np.cumsum(weights * elements.slope)
            before = np.concatenate([[0.0], rises])[elements.starts]
            slopes = reduced[elements.units][elements.owners] + rises - before[elements.owners]
            turned = np.flatnonzero(slopes >= 0)[::-1]
            at = upper[elements.units]
            at[elements.owners[turned]] = elements.turns[turned]  # the first one of each unit is written last
            at = np.where(reduced[elements.units] >= 0, -np.inf, at)
            best[elements.units] = np.clip(at, lower[elements.units], upper[elements.units])
            shares = np.maximum(elements.constant + elements.slope * best[elements.units][elements.owners], 0.0)
            value += float(weights @ shares)
        others = reduced.copy()
        others[:count] = 0.0
        for sums in self._affine.sums.values():
            others[sums.columns] = 0.0
        used = np.flatnonzero(others)
        return value + float(reduced[:count] @ best + others[used] @ np.where(others > 0, lower, upper)[used])

    def _seed(self, index: int, gate: Gate, above: Floats, below: Floats, stable: Floats) -> Floats:
        """The coefficients of a ReLU's rows on q."""
        seeds = np.zeros(gate.floor.size)
        seeds[gate.explicit] = above / gate.tops - below / (gate.tops - gate.floor.reshape(-1)[gate.explicit])
        seeds[self._stable[index]] = stable
        return seeds.reshape(gate.floor.shape)

    def _pull(self, seeds: Floats, combined: Floats, seed: Callable[[int, Gate], Floats]) -> None:
        """One backward pass: adds the coefficients of seeds · logits, and of what `seed` puts on each ReLU's q. When
        `seed` is called, all later layers have been added to the ReLU's own columns."""
        affine = self._affine
        adjoints = {len(affine.ops) - 1: seeds.reshape(len(seeds), *affine.ops[-1].shape)}
        for index in range(len(affine.ops) - 1, -1, -1):
            op, adjoint = affine.ops[index], adjoints.pop(index, None)
            if not affine.depends[index]:
                continue
            if isinstance(op, Relu):
                gate = affine.gates[index]
                adjoint = np.zeros(gate.floor.shape) if adjoint is None else adjoint
                combined[gate.columns] += gate.tops * adjoint.reshape(-1)[gate.explicit]
                through = np.where(gate.live, adjoint, 0.0) + seed(index, gate)
                lost = (through * gate.shrink).reshape(len(through), gate.scatter.shape[0], -1).sum(axis=(0, 2))
                combined[: affine.unit_count] += lost @ gate.scatter
                if affine.depends[op.source]:
                    add_adjoint(adjoints, op.source, through)
            elif adjoint is not None:
                assert isinstance(op, Affine | Sum | Concat)
                if index in affine.sums:
                    sums = affine.sums[index]
                    combined[sums.columns] += sums.tops * adjoint.reshape(-1)[sums.explicit]
                for source, part in pull_linear(affine.ops, op, adjoint):
                    add_adjoint(adjoints, source, part)

    def _divide(
        self, multipliers: Floats
    ) -> tuple[dict[int, tuple[Floats, Floats, Floats]], dict[int, tuple[Floats, Floats]], Floats]:
        """By ReLU, by sum, and of the fixed rows."""
        first, gates, sums = 0, {}, {}
        for index, gate in self._affine.gates.items():
            count = len(gate.explicit)
            middle, end = first + count, first + 2 * count
            last = end + len(self._stable[index])
            gates[index] = multipliers[first:middle], multipliers[middle:end], multipliers[end:last]
            first = last
        for index, own in self._affine.sums.items():
            middle, end = first + len(own.explicit), first + 2 * len(own.explicit)
            sums[index] = multipliers[first:middle], multipliers[middle:end]
            first = end
        return gates, sums, multipliers[first:]

    def _add_scores(self, combined: Floats, sums: Sums, amounts: Floats) -> None:
        scored = sums.units != NO_UNIT
        count = self._affine.unit_count
        combined[:count] += np.bincount(sums.units[scored], amounts[scored], minlength=count)


def _read_scores(sums: Sums, columns: Floats) -> Floats:
    return np.where(sums.units == NO_UNIT, 1.0, columns[sums.units])


def _support(multipliers: Floats, lower: Floats, upper: Floats) -> float:
    """The largest multipliers · v over lower <= v <= upper."""
    used = np.flatnonzero(multipliers)
    return float(multipliers[used] @ np.where(multipliers > 0, upper, lower)[used])


def _sort_elements(all_sums: list[Sums]) -> SumElements:
    parts = []
    for sums in all_sums:
        begins = np.concatenate([[True], sums.owners[1:] != sums.owners[:-1]])
        constant, slope = (np.where(begins, side, np.diff(side, prepend=0.0)) for side in sums.pieces)
        scored = np.flatnonzero(sums.units[sums.owners] != NO_UNIT)
        owners = sums.owners[scored]
        parts.append((constant[scored], slope[scored], sums.first + owners, sums.units[owners]))
    if not parts:
        parts.append((np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)))
    constant, slope, columns, units = (np.concatenate(each) for each in zip(*parts, strict=True))
    turns = np.divide(-constant, slope, where=slope > 0, out=np.full(len(slope), np.inf))
    order = np.lexsort((turns, units))
    unique, starts, owners = np.unique(units[order], return_index=True, return_inverse=True)
    return SumElements(constant[order], slope[order], turns[order], columns[order], owners, unique, starts)

"""The saddle point form of the eliminated program with relaxed gates, for first-order methods (method.md, section 4).

All rows and logits are affine in the columns: one forward pass gives their values, one backward pass a combination of
their coefficients. No coefficient is stored. Rows, in order, for every ReLU

    q / U - y <= 0,    y + (L - q) / (U - L) <= 0    at undecided elements,    floor <= q <= ceiling at the others,

then the fixed rows. Sums (equation 9b) have no rows: the primal columns are projected onto what they allow.

The sparsity term t, with rows t >= a_l · s + b_l (equation 5), is the largest weighted mean of these forms. So t has
neither cost nor rows here: every form has a row of its own, whose multiplier is minus its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import numpy as np
from scipy import sparse

from critical_neurons.core.network import Affine, Concat, MaxPool, Relu, Sum, pull_linear
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.coefficients import add_adjoint
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.relaxed_points import Repair
from critical_neurons.formulations.score_sums import ScoreSums

GateMultipliers: TypeAlias = tuple[Floats, Floats, Floats]
"""Of the rows of a ReLU: q / U - y <= 0, y + (L - q) / (U - L) <= 0, and those of decided elements."""

Correction: TypeAlias = Callable[[Floats, Floats, Floats], tuple[Floats, Floats, Floats]]
"""New multipliers of undecided elements and the reduced costs they leave, from the reduced costs without them and the
multipliers."""


def find_saddle(affine: AffineNetwork, program: Program) -> SaddleForm | None:
    """None if the network has max pools, or gates that follow scores."""
    if any(isinstance(op, MaxPool) for op in affine.ops) or any(g.follow_scores for g in affine.gates.values()):
        return None
    return SaddleForm(affine, program)


class SaddleForm:
    def __init__(self, affine: AffineNetwork, program: Program) -> None:
        self._affine, rows = affine, program.rows
        self._cost = program.cost[: program.term.columns.start]
        self._with_sparsity = sparse.csr_array(rows.matrix[:, : len(self._cost)])
        sparsity = program.blocks["sparsity"].start
        self._total = float(self._cost[sparsity])
        others = (np.arange(len(self._cost)) != sparsity).astype(np.float64)
        self._fixed = sparse.csr_array(self._with_sparsity @ sparse.diags_array(others))
        self._forms = np.flatnonzero(self._with_sparsity[:, [sparsity]].toarray())
        self._fixed_limits = rows.lower, rows.upper
        self._repair = Repair(affine, program, lift=True)

    @cached_property
    def _stable(self) -> dict[int, Ints]:
        """By ReLU: the decided elements. In a first layer they have no rows, since the least scores imply these."""
        stable = {}
        for index, gate in self._affine.gates.items():
            decided = np.full(gate.floor.size, self._affine.depends[self._affine.ops[index].sources[0]])
            decided[gate.explicit] = False
            stable[index] = np.flatnonzero(decided)
        return stable

    @cached_property
    def _sums(self) -> ScoreSums | None:
        sums = list(self._affine.sums.values())
        return ScoreSums(sums, self._affine.unit_count) if sums else None

    @cached_property
    def limits(self) -> tuple[Floats, Floats]:
        lower: list[Floats] = []
        upper: list[Floats] = []
        for index, gate in self._affine.gates.items():
            count, stable = 2 * len(gate.explicit), self._stable[index]
            lower += [np.full(count, -np.inf), gate.floor.reshape(-1)[stable]]
            upper += [np.zeros(count), gate.ceiling.reshape(-1)[stable]]
        return np.concatenate([*lower, self._fixed_limits[0]]), np.concatenate([*upper, self._fixed_limits[1]])

    @cached_property
    def shares(self) -> Ints:
        return self._forms + len(self.limits[0]) - len(self._fixed_limits[0])

    def project_multipliers(self, multipliers: Floats, strides: Floats) -> Floats:
        lower, upper = self.limits
        moved = multipliers / strides
        projected = strides * (moved - np.clip(moved, lower, upper))  # exactly 0 within the limits
        if len(self.shares):
            at = self.shares
            projected[at] = -project_on_simplex(strides[at] * lower[at] - multipliers[at], self._total)
        return projected

    def project(self, columns: Floats, strides: Floats, lower: Floats, upper: Floats) -> Floats:
        """The nearest columns within the bounds that satisfy equation 9b."""
        projected = np.clip(columns, lower, upper)
        if self._sums is not None:
            scores = slice(0, self._affine.unit_count)
            projected[scores], projected[self._sums.columns] = columns[scores], columns[self._sums.columns]
            self._sums.project(projected, strides, lower, upper)
        return projected

    def apply(self, columns: Floats) -> tuple[Floats, Floats]:
        """The values of all rows, and the logits (batch, classes)."""
        at = self._affine.evaluate(columns)
        parts: list[Floats] = []
        for index, gate in self._affine.gates.items():
            q, y = at.shrunk[index].reshape(-1), columns[gate.columns]
            undecided, lower = q[gate.explicit], gate.floor.reshape(-1)[gate.explicit]
            parts += [undecided / gate.tops - y, y + (lower - undecided) / (gate.tops - lower)]
            parts.append(q[self._stable[index]])
        return np.concatenate([*parts, self._fixed @ columns]), at.logits.reshape(len(at.logits), -1)

    def adjoint(self, multipliers: Floats, gradients: Floats) -> Floats:
        """The coefficients of multipliers · rows + the sum of gradients · logits."""
        by_gate, fixed = self._split(multipliers)
        combined: Floats = self._fixed.T @ fixed

        def combine(index: int, gate: Gate) -> Floats:
            above, below, stable = by_gate[index]
            combined[gate.columns] += below - above
            return self._combine(index, gate, above, below, stable)

        self._pull(gradients, combined, combine)
        return combined

    def bound(self, multipliers: Floats, gradients: Floats, lower: Floats, upper: Floats) -> float:
        """A lower bound of cost · x + the sum of gradients · logits over all feasible x within the bounds.

        It is the Lagrangian, minimised exactly over the bounds and equation 9b; multipliers of the wrong sign count
        as 0. Far from the optimum it is better with corrected multipliers of undecided elements, near the optimum
        with the given ones, since an activation at its upper bound has a negative reduced cost.
        """
        return max(
            self._bound(multipliers, gradients, lower, upper, correct=correct) for correct in (_keep_signs, _correct)
        )

    def _bound(
        self, multipliers: Floats, gradients: Floats, lower: Floats, upper: Floats, *, correct: Correction
    ) -> float:
        by_gate, fixed = self._split(multipliers)
        fixed = self._fit_sparsity(fixed)
        reduced: Floats = self._cost + self._with_sparsity.T @ fixed
        constants = [
            float((gradients * self._affine.at_zero.logits.reshape(gradients.shape)).sum()),
            -_support(fixed, *self._fixed_limits),
        ]

        def combine(index: int, gate: Gate) -> Floats:
            above, below, reduced[gate.columns] = correct(reduced[gate.columns], *by_gate[index][:2])
            stable, own = by_gate[index][2], self._stable[index]
            floor, ceiling = gate.floor.reshape(-1), gate.ceiling.reshape(-1)
            low = floor[gate.explicit]
            on_q = self._combine(index, gate, above, below, stable)
            constants.append(float(below @ (low / (gate.tops - low))) - _support(stable, floor[own], ceiling[own]))
            constants.append(float((on_q * self._affine.at_zero.shrunk[index]).sum()))
            return on_q

        self._pull(gradients, reduced, combine)
        return sum(constants) + self._minimise(reduced, lower, upper)

    def repair(self, point: Floats) -> Floats:
        """A point near the given one, feasible unless a decided pre-activation leaves its bounds."""
        return self._repair(point)

    def _fit_sparsity(self, fixed: Floats) -> Floats:
        """Multipliers of the fixed rows with the right signs, which leave the sparsity term, the last column, without
        a reduced cost."""
        least, most = self._fixed_limits
        fixed = np.clip(fixed, np.where(np.isfinite(least), -np.inf, 0.0), np.where(np.isfinite(most), np.inf, 0.0))
        carried = float((self._with_sparsity.T @ fixed)[-1])
        return fixed * (-self._total / carried) if self._total and carried else fixed

    def _minimise(self, reduced: Floats, lower: Floats, upper: Floats) -> float:
        """The minimum of reduced · x over the bounds and equation 9b."""
        value, others = 0.0, reduced.copy()
        if self._sums is not None:
            value = self._sums.minimise(reduced, lower, upper)
            others[: self._affine.unit_count] = others[self._sums.columns] = 0.0
        return value - _support(-others, lower, upper)

    def _combine(self, index: int, gate: Gate, above: Floats, below: Floats, stable: Floats) -> Floats:
        """The coefficients of multipliers · rows on the q of a ReLU."""
        on_q = np.zeros(gate.floor.size)
        on_q[gate.explicit] = above / gate.tops - below / (gate.tops - gate.floor.reshape(-1)[gate.explicit])
        on_q[self._stable[index]] = stable
        return on_q.reshape(gate.floor.shape)

    def _pull(self, gradients: Floats, combined: Floats, combine: Callable[[int, Gate], Floats]) -> None:
        """One backward pass: adds the coefficients of gradients · logits, and of what `combine` puts on each ReLU's
        q. When `combine` is called, all later layers have been added to the ReLU's own columns."""
        affine = self._affine
        adjoints = {len(affine.ops) - 1: gradients.reshape(len(gradients), *affine.ops[-1].shape)}
        for index in range(len(affine.ops) - 1, -1, -1):
            op, adjoint = affine.ops[index], adjoints.pop(index, None)
            if not affine.depends[index]:
                continue
            if isinstance(op, Relu):
                gate = affine.gates[index]
                adjoint = np.zeros(gate.floor.shape) if adjoint is None else adjoint
                combined[gate.columns] += gate.tops * adjoint.reshape(-1)[gate.explicit]
                through = np.where(gate.live, adjoint, 0.0) + combine(index, gate)
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

    def _split(self, multipliers: Floats) -> tuple[dict[int, GateMultipliers], Floats]:
        """By ReLU, and of the fixed rows."""
        first, by_gate = 0, {}
        for index, gate in self._affine.gates.items():
            count = len(gate.explicit)
            middle, end = first + count, first + 2 * count
            last = end + len(self._stable[index])
            by_gate[index] = multipliers[first:middle], multipliers[middle:end], multipliers[end:last]
            first = last
        return by_gate, multipliers[first:]


def project_on_simplex(values: Floats, total: float) -> Floats:
    """The nearest values that are not negative and add up to the total; NaN if one of them is."""
    below = values - values.max()  # or large values would lose their digits in sums
    ordered = np.sort(below)[::-1]
    levels: Floats = (np.cumsum(ordered) - total) / np.arange(1, len(values) + 1)
    projected: Floats = below - np.minimum(below, levels[np.count_nonzero(ordered > levels) - 1])
    return projected


def _keep_signs(reduced: Floats, above: Floats, below: Floats) -> tuple[Floats, Floats, Floats]:
    """The multipliers as they are, where they are not negative."""
    above, below = np.maximum(above, 0.0), np.maximum(below, 0.0)
    return above, below, reduced - above + below


def _correct(reduced: Floats, above: Floats, below: Floats) -> tuple[Floats, Floats, Floats]:
    """Lower the multiplier of q / U - y <= 0, then raise that of y + (L - q) / (U - L) <= 0, until the reduced cost
    of y is not negative: its minimum is then at y = 0."""
    above, below, left = _keep_signs(reduced, above, below)
    cut = np.clip(-left, 0.0, above)
    left = left + cut
    return above - cut, below + np.maximum(-left, 0.0), np.maximum(left, 0.0)


def _support(multipliers: Floats, lower: Floats, upper: Floats) -> float:
    """The largest multipliers · v over lower <= v <= upper."""
    used = np.flatnonzero(multipliers)
    return float(multipliers[used] @ np.where(multipliers > 0, upper, lower)[used])

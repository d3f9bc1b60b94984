"""Newton steps: on the optimality conditions of a convex program, with Mehrotra's predictor and corrector.

Gondzio's centrality correctors make the steps longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from scipy import sparse

from critical_neurons.core.program import SHARED, Origins
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.dense_rows import FEW_COLUMNS, DenseElimination, DenseRows
from critical_neurons.solvers.fronts import FrontElimination, Root, Tree
from critical_neurons.solvers.low_rank import LowRank
from critical_neurons.solvers.wide_rows import WideElimination, WideRows

RELAXATION = 1e-8
"""Rows are relaxed by this much, well within the tolerance, so that the feasible set has an interior."""

SMALLEST_SLACK = 1e-6
"""Least initial slack of a row."""

FIRST_BARRIER = 0.1
"""Initial barrier parameter, relative to the steepest slope of the objective."""

TO_THE_BOUNDARY = 0.95
"""Step length as a share of the distance to the nearest bound."""

SMALLEST_GAP = 1e-15
"""Smallest distance between a point and its bounds, which rounding may reduce to zero."""

CORRECTORS, LONGER, WORTHWHILE = 4, 0.3, 0.1
"""Gondzio's centrality correctors: at most so many per step, each for a step longer by so much, kept if it becomes
longer by at least this share of that. They cost a solve each, and save a quarter of the factorisations."""

NARROWEST = 0.1
"""Products of gaps and duals below this share of their target, or above its inverse, are corrected."""

FEW_ROWS = 4
"""With more than this many columns per row, those of the loss included, the Woodbury formula is used."""

REFINEMENTS, REFINED = 2, 1e-10
"""Iterative refinement: at most so many times, and only while the residual is above this share of the right side."""


AnyRows: TypeAlias = Tree | DenseRows | WideRows


class NewtonState:
    """Point, slacks of the rows and of both bounds, and multipliers of all: all slacks and multipliers positive."""

    def __init__(
        self, start: Floats, bounds: tuple[Floats, Floats], slope: float, origins: Origins, pattern: sparse.csr_array
    ) -> None:
        """`slope`: the steepest of the objective at the start. `pattern`: see `Tree`, which is needed only if some
        columns belong to data points."""
        self._lower, self._upper = lower, upper = bounds
        self.point = start
        self.barrier = FIRST_BARRIER * max(1.0, slope)
        self.rows = _choose_rows(origins, pattern)
        self.limits = np.zeros(0)
        self.slacks, self.multipliers = np.zeros(0), np.zeros(0)
        self._below = self.barrier / (self.point - lower)
        self._above = self.barrier / (upper - self.point)

    def add(self, rows: sparse.csr_array | Floats, limits: Floats) -> None:
        """A violated row begins with slack and multiplier equal, at the present barrier parameter: with a smaller
        slack its multiplier would be far too large, and steps become short."""
        slacks = np.maximum(limits - rows @ self.point, max(SMALLEST_SLACK, np.sqrt(self.barrier)))
        if isinstance(self.rows, DenseRows):
            self.rows.add(rows if isinstance(rows, np.ndarray) else rows.toarray())
        else:
            self.rows.add(sparse.csr_array(rows))
        self.limits = np.concatenate([self.limits, limits])
        self.slacks = np.concatenate([self.slacks, slacks])
        self.multipliers = np.concatenate([self.multipliers, self.barrier / slacks])

    def step(self, slope: Floats, roots: Sequence[Root], check: Callable[[], object]) -> float:
        """Predictor, corrector and centrality correctors. Returns the step length along the corrected direction.
        `check` is called every now and then."""
        gaps = np.concatenate([self.slacks, self.point - self._lower, self._upper - self.point])
        gaps = np.maximum(gaps, SMALLEST_GAP)
        duals = np.concatenate([self.multipliers, self._below, self._above])
        self.barrier = float(gaps @ duals / len(gaps))
        system = _NewtonSystem(self.rows, roots, gaps, duals, check)
        primal = self.rows.multiply(self.point) + self.slacks - (self.limits + RELAXATION)
        dual = slope + self.rows.gather(self.multipliers) - self._below + self._above
        moved, turned = system.solve(primal, dual, -gaps * duals)
        length = min(_reach(gaps, moved), _reach(duals, turned))
        ahead = (gaps + length * moved) @ (duals + length * turned) / len(gaps)
        target = (ahead / self.barrier) ** 3 * self.barrier
        moved, turned = system.solve(primal, dual, target - gaps * duals - moved * turned)
        moved, turned, length = self._correct(system, (gaps, duals), (moved, turned), target)
        length *= TO_THE_BOUNDARY
        count, columns = len(self.slacks), len(self.point)
        self.point = self.point + length * moved[count : count + columns]
        self.slacks = self.slacks + length * moved[:count]
        duals = duals + length * turned
        self.multipliers, self._below, self._above = np.split(duals, [count, count + columns])
        return length

    def _correct(
        self, system: _NewtonSystem, at: tuple[Floats, Floats], direction: tuple[Floats, Floats], target: float
    ) -> tuple[Floats, Floats, float]:
        """The direction with centrality correctors, and its step length."""
        (gaps, duals), (moved, turned) = at, direction
        length = min(_reach(gaps, moved), _reach(duals, turned))
        nothing = np.zeros(len(self.slacks)), np.zeros(len(self.point))
        for _ in range(CORRECTORS):
            if length + WORTHWHILE * LONGER > 1:
                break
            wanted = min(1.0, length + LONGER)
            products = (gaps + wanted * moved) * (duals + wanted * turned)
            change = np.clip(products, NARROWEST * target, target / NARROWEST) - products
            more_moved, more_turned = system.solve(*nothing, np.maximum(change, -target / NARROWEST))
            more_moved, more_turned = moved + more_moved, turned + more_turned
            reach = min(_reach(gaps, more_moved), _reach(duals, more_turned))
            if reach < length + WORTHWHILE * LONGER:
                break
            moved, turned, length = more_moved, more_turned, reach
        return moved, turned, length


class _NewtonSystem:
    """Newton's equations, reduced to the columns. `gaps` and `duals` belong to the rows, then the lower, then the
    upper bounds."""

    def __init__(
        self, rows: AnyRows, roots: Sequence[Root], gaps: Floats, duals: Floats, check: Callable[[], object]
    ) -> None:
        self._rows, self._gaps, self._duals = rows, gaps, duals
        self._count, columns = rows.row_count, rows.column_count
        weights = duals / gaps
        own = weights[self._count :].reshape(2, columns).sum(axis=0)
        weights = weights[: self._count]
        trace = own.sum() + weights @ rows.squares + sum(root.trace for root in roots)
        own += np.finfo(float).eps * trace / columns
        height = self._count + sum(len(root.matrix) for root in roots)
        self._matrix: FrontElimination | DenseElimination | WideElimination | LowRank
        if isinstance(rows, Tree):
            self._matrix = FrontElimination(rows, own, weights, roots, check)
        elif FEW_ROWS * height < columns:
            scaled = np.sqrt(weights)[:, None] * rows.write_out()
            self._matrix = LowRank(own, np.concatenate([scaled, *(root.spread(columns) for root in roots)]))
        elif isinstance(rows, WideRows):
            check()
            self._matrix = WideElimination(rows, own, weights, roots)
        else:
            check()
            self._matrix = DenseElimination(rows, own, weights, roots)

    def solve(self, primal: Floats, dual: Floats, wanted: Floats) -> tuple[Floats, Floats]:
        """Changes of the gaps and of the duals, so that the residuals vanish and gap times dual changes as wanted."""
        count = self._count
        pull = wanted / self._gaps
        lower, upper = pull[count:].reshape(2, -1)
        weighted = pull[:count] + (self._duals / self._gaps)[:count] * primal
        right = lower - upper - dual - self._rows.gather(weighted)
        step = self._matrix.solve(right)
        for _ in range(REFINEMENTS):
            residual = right - self._matrix.multiply(step)
            if np.abs(residual).max(initial=0.0) <= REFINED * np.abs(right).max(initial=0.0):
                break
            step += self._matrix.solve(residual)
        moved = np.concatenate([-primal - self._rows.multiply(step), step, -step])
        return moved, pull - self._duals / self._gaps * moved


def keeps_sparse(origins: Origins) -> bool:
    """Whether rows over these columns are kept as sparse matrices."""
    return bool(np.any(origins.points != SHARED)) or len(origins.points) > FEW_COLUMNS


def _choose_rows(origins: Origins, pattern: sparse.csr_array) -> AnyRows:
    if not keeps_sparse(origins):
        return DenseRows(len(origins.points))
    return Tree(origins, pattern) if np.any(origins.points != SHARED) else WideRows(len(origins.points))


def _reach(values: Floats, change: Floats) -> float:
    """How far along the change the values stay positive, at most 1."""
    falling = change < 0
    return float(min(1.0, (-values[falling] / change[falling]).min(initial=1.0)))

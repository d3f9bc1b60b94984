"""An interior point method for continuous programs of many data points, rows added when violated.

Newton's steps on the conditions of optimality take the convex term with its own curvature, where tangents would need
one for every data point and round. Whatever the multipliers λ >= 0 of the rows a · x <= b written so far, and
whatever the point y,

    F(y) + min over the box of (g + A'λ) · x  -  g · y  -  λ · b,     g the gradient of F at y,

is a lower bound of the program: F is convex, and rows that are missing would only raise it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg, sparse
from scipy.special import logsumexp, softmax

from critical_neurons.core.network import Floats, Ints
from critical_neurons.core.program import Program, Rows, stack_rows
from critical_neurons.core.solution import Solution, Status, Step, relative_gap
from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.base import Capability, Limits, Report
from critical_neurons.solvers.cutting_planes import FEASIBILITY_TOLERANCE, TIE_BREAK_SHARE

MOST_STEPS = 200

ROWS_PER_STEP = 50
"""Rows that a step may add, the most violated first: what many would cost in every later step few make up for."""

RELAXATION = 1e-8
"""By which rows may be violated: well within what counts as satisfied, and there is room inside."""

SMALLEST_SLACK = 1e-3
"""Of a row that joins while it is violated."""

FIRST_PLACE = 0.9
"""Where in its bounds every column starts."""

FIRST_BARRIER = 0.1

TIE_PRECISION = 0.01
"""What the barrier may be beside the cost that breaks ties."""

TO_THE_BOUNDARY = 0.99
"""Share of the way to the nearest bound that a step goes."""

SHORTEST_STEP, MOST_SHORT_STEPS = 1e-4, 10
"""Steps that hardly move end the search after so many in a row: the program may have no point at all."""

SMALLEST_GAP = 1e-15
"""Between a point and its bounds: rounding makes it nothing."""

ROOM = 1.0
"""Left above a column that the rows push up, so that its bound never decides."""

FEW_ROWS = 2
"""Times as many columns as rows, the loss's own among them, from which on Newton's equations are solved by rows."""

REFINEMENTS = 2

NO_COEFFICIENT = 1e-9
"""Rows whose coefficients are all smaller say nothing."""


class BarrierSolver:
    name = "barrier"
    capabilities = frozenset({Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        if options:
            raise InvalidSettingError(f"solver_options: barrier has none. Found: {', '.join(options)}.")

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        reason = find_obstacle(program)
        if reason is not None:
            raise InvalidSettingError(f"solver: barrier takes no program with {reason}. Use solver='highs'.")
        return _Search(program, limits, report).run()


def find_obstacle(program: Program) -> str | None:
    """Why the program cannot be solved by this method, if it cannot."""
    if program.integer.any():
        return "integer columns"
    if np.any(program.rows.lower == program.rows.upper):
        return "equations"
    return None if np.isfinite(np.stack(_imply_bounds(program))).all() else "columns that nothing bounds"


class _Search:
    """Over the columns that are neither fixed nor the convex term's own."""

    def __init__(self, program: Program, limits: Limits, report: Report) -> None:
        self._program, self._limits, self._report = program, limits, report
        self._started = time.monotonic()
        self._history: list[Step] = []
        self._incumbent, self._objective = program.start, None
        if program.start is not None:
            self._objective = program.value(program.start)
        self._bound: float | None = None
        lower, upper = _imply_bounds(program)
        self._base = np.where(upper > lower, 0.0, lower)
        self._columns = np.flatnonzero(upper > lower)
        self._lower, self._upper = lower[self._columns], upper[self._columns]
        self._cost = program.cost[self._columns]
        self._known = [np.zeros(source.count, dtype=bool) for source in program.sources]
        self._learnt: list[Rows] = []
        self._steps = 0

    def run(self) -> Solution:
        interrupted = False
        try:
            self._search()
        except KeyboardInterrupt:
            interrupted = True
        solved = self._gap <= self._limits.gap
        status = Status.OPTIMAL if solved else Status.TIMED_OUT if self._incumbent is None else Status.FEASIBLE
        return Solution(
            status=status,
            point=self._incumbent,
            objective=self._objective,
            bound=self._bound,
            seconds=time.monotonic() - self._started,
            history=tuple(self._history),
            sizes={
                "columns": self._program.column_count,
                "rows": self._program.row_count,
                "rows_used": len(self._program.rows) + sum(map(len, self._learnt)),
                "gates": self._program.gate_count,
                "cuts": 0,
                "steps": self._steps,
            },
            interrupted=interrupted,
            learnt=stack_rows([*self._learnt, *self._find_tangents()], self._program.column_count),
        )

    def _search(self) -> None:
        loss = _Loss(self._program, self._base, self._columns)
        state = _State(self._lower, self._upper, self._split(self._program.rows))
        tilt = self._tilt()
        precise = TIE_PRECISION * tilt.max() if tilt.any() else np.inf
        short = 0
        while self._steps < MOST_STEPS and short < MOST_SHORT_STEPS and self._seconds_left() > 0:
            here = loss.differentiate(state.point)
            slope = self._cost + here.slope
            self._raise_bound(float(self._cost @ state.point) + here.value, slope, state)
            violated = self._add_violated_rows(state)
            self._tell()
            if not violated and self._gap <= (1.0 - TIE_BREAK_SHARE) * self._limits.gap and state.barrier <= precise:
                return
            try:
                length = state.step(slope + tilt, here.root)
            except linalg.LinAlgError:  # nothing more to be had in double precision
                return
            short = short + 1 if length < SHORTEST_STEP else 0
            self._steps += 1

    def _tilt(self) -> Floats:
        """A cost on top that breaks ties, and in all makes less of a difference than is left to them."""
        if self._program.tie_break is None:
            return np.zeros(len(self._columns))
        wanted = self._program.tie_break[self._columns]
        spread = float(np.abs(wanted) @ (self._upper - self._lower))
        return TIE_BREAK_SHARE * self._limits.gap / max(spread, 1.0) * wanted

    def _raise_bound(self, value: float, slope: Floats, state: _State) -> None:
        reduced = slope + state.rows.T @ state.multipliers
        lowest = np.minimum(reduced * self._lower, reduced * self._upper).sum()
        bound = float(value - slope @ state.point + lowest - state.multipliers @ state.limits)
        if np.isfinite(bound) and (self._bound is None or bound > self._bound):
            self._bound = bound

    def _add_violated_rows(self, state: _State) -> bool:
        """Whether the point violates any row; the worst that are new now have a say."""
        found, all_violations = self._judge(state.point)
        if found and self._incumbent is None:
            self._judge(self._shrink(state))
        for source, known, violations in zip(self._program.sources, self._known, all_violations, strict=True):
            violations[known] = 0.0
            new = np.flatnonzero(violations > FEASIBILITY_TOLERANCE / 2)
            if len(new) > ROWS_PER_STEP:
                new = np.sort(new[np.argsort(-violations[new], kind="stable")[:ROWS_PER_STEP]])
            if len(new):
                known[new] = True
                self._learnt.append(source.build(new))
                state.add(*self._split(self._learnt[-1]))
        return found

    def _shrink(self, state: _State) -> Floats:
        """The point moved towards the lower bounds, as far as it takes to keep within a budget."""
        move = state.point - self._lower
        over, used = state.rows @ state.point - state.limits, state.rows @ move
        violated = (over > 0) & (used > 0)
        share = float((over[violated] / used[violated]).clip(max=1.0).max(initial=0.0))
        return self._lower + (1.0 - share) * move

    def _judge(self, searched: Floats) -> tuple[bool, list[Floats]]:
        """Whether any row is violated, and by how much those of the sources are. If none is, the point is offered as
        the incumbent."""
        point = np.zeros(self._program.column_count)
        point[: len(self._base)] = self._base
        point[self._columns] = searched
        rows = self._program.rows
        values = rows.matrix @ point
        violations = [source.violations(point) for source in self._program.sources]
        worst = max(each.max(initial=0.0) for each in (values - rows.upper, rows.lower - values, *violations))
        if worst <= FEASIBILITY_TOLERANCE:
            raised = self._program.raise_term(point)
            value = self._program.value(raised)
            if self._objective is None or value < self._objective:
                self._incumbent, self._objective = raised, value
        return worst > FEASIBILITY_TOLERANCE, violations

    def _split(self, rows: Rows) -> tuple[Floats, Floats]:
        """Rows as a · x <= b over the columns that are searched."""
        matrix = rows.matrix[:, : len(self._base)].toarray()
        given = matrix @ self._base
        matrix = matrix[:, self._columns]
        above, below = np.isfinite(rows.upper), np.isfinite(rows.lower)
        sides = np.concatenate([matrix[above], -matrix[below]])
        limits = np.concatenate([(rows.upper - given)[above], (given - rows.lower)[below]])
        used = np.abs(sides).max(axis=1, initial=0.0) > NO_COEFFICIENT
        return sides[used], limits[used]

    def _find_tangents(self) -> list[Rows]:
        if self._incumbent is None:
            return []
        return [self._program.term.cuts(self._incumbent, np.arange(len(self._program.term.values(self._incumbent))))]

    @property
    def _gap(self) -> float:
        gap = relative_gap(self._objective, self._bound)
        return np.inf if gap is None else gap

    def _seconds_left(self) -> float:
        return self._limits.time_limit - (time.monotonic() - self._started)

    def _tell(self) -> None:
        rows = sum(map(len, self._learnt))
        step = Step(time.monotonic() - self._started, self._objective, self._bound, rows, 0)
        self._history.append(step)
        self._report(step)


@dataclass(frozen=True)
class _Derivatives:
    """Second derivatives are root' root."""

    value: float
    slope: Floats
    root: Floats


class _Loss:
    """The weighted sum of the convex term's functions, log-sum-exp of affine logits minus the label's."""

    def __init__(self, program: Program, base: Floats, columns: Ints) -> None:
        matrix, offset, labels = program.term.affine_forms()
        self._weights = program.cost[program.term.columns]
        count, classes = len(labels), len(offset) // len(labels)
        forms = matrix[:, : len(base)].toarray()
        self._offset = (offset + forms @ base).reshape(count, classes)
        self._forms = forms[:, columns].reshape(count, classes, -1)
        self._labels = (np.arange(count), labels)

    def differentiate(self, point: Floats) -> _Derivatives:
        weights = self._weights[:, None]
        logits = self._offset + self._forms @ point
        shares = softmax(logits, axis=1)
        value = self._weights @ (logsumexp(logits, axis=1) - logits[self._labels])
        means = np.matmul(shares[:, None, :], self._forms)[:, 0]
        slope = self._weights @ (means - self._forms[self._labels])
        spread = np.sqrt(weights * shares)[:, :, None] * (self._forms - means[:, None, :])
        return _Derivatives(float(value), slope, spread.reshape(shares.size, -1))


class _State:
    """Point, slacks of the rows and of both bounds, and multipliers of all: all slacks and multipliers positive."""

    def __init__(self, lower: Floats, upper: Floats, rows: tuple[Floats, Floats]) -> None:
        self._lower, self._upper = lower, upper
        self.point = lower + FIRST_PLACE * (upper - lower)
        self.barrier = FIRST_BARRIER
        self.rows, self.limits = np.zeros((0, len(lower))), np.zeros(0)
        self.slacks, self.multipliers = np.zeros(0), np.zeros(0)
        self._below = self.barrier / (self.point - lower)
        self._above = self.barrier / (upper - self.point)
        self.add(*rows)

    def add(self, rows: Floats, limits: Floats) -> None:
        slacks = np.maximum(limits - rows @ self.point, SMALLEST_SLACK)
        self.rows, self.limits = np.concatenate([self.rows, rows]), np.concatenate([self.limits, limits])
        self.slacks = np.concatenate([self.slacks, slacks])
        self.multipliers = np.concatenate([self.multipliers, self.barrier / slacks])

    def step(self, slope: Floats, root: Floats) -> float:
        """Mehrotra's predictor and corrector; how far along the corrected direction it went."""
        gaps = np.concatenate([self.slacks, self.point - self._lower, self._upper - self.point])
        gaps = np.maximum(gaps, SMALLEST_GAP)
        duals = np.concatenate([self.multipliers, self._below, self._above])
        self.barrier = float(gaps @ duals / len(gaps))
        system = _System(self.rows, root, gaps, duals)
        primal = self.rows @ self.point + self.slacks - (self.limits + RELAXATION)
        dual = slope + self.rows.T @ self.multipliers - self._below + self._above
        moved, turned = system.solve(primal, dual, -gaps * duals)
        length = min(_reach(gaps, moved), _reach(duals, turned))
        ahead = (gaps + length * moved) @ (duals + length * turned) / len(gaps)
        target = (ahead / self.barrier) ** 3 * self.barrier
        moved, turned = system.solve(primal, dual, target - gaps * duals - moved * turned)
        length = TO_THE_BOUNDARY * min(_reach(gaps, moved), _reach(duals, turned))
        count, columns = len(self.slacks), len(self.point)
        self.point = self.point + length * moved[count : count + columns]
        self.slacks = self.slacks + length * moved[:count]
        duals = duals + length * turned
        self.multipliers, self._below, self._above = np.split(duals, [count, count + columns])
        return length


class _System:
    """Newton's equations, reduced to the columns. `gaps` and `duals` are those of the rows, of the lower and of the
    upper bounds, one after the other."""

    def __init__(self, rows: Floats, root: Floats, gaps: Floats, duals: Floats) -> None:
        self._rows, self._gaps, self._duals = rows, gaps, duals
        self._count, columns = rows.shape
        weights = duals / gaps
        whole = np.concatenate([np.sqrt(weights[: self._count])[:, None] * rows, root])
        own = weights[self._count :].reshape(2, columns).sum(axis=0)
        own += np.finfo(float).eps * (own.sum() + (whole**2).sum()) / columns
        self._matrix = _LowRank(own, whole) if FEW_ROWS * len(whole) < columns else _Dense(own, whole)

    def solve(self, primal: Floats, dual: Floats, wanted: Floats) -> tuple[Floats, Floats]:
        """Changes of the gaps and of the duals, so that the residuals vanish and gap times dual changes as wanted."""
        count = self._count
        pull = wanted / self._gaps
        lower, upper = pull[count:].reshape(2, -1)
        weighted = pull[:count] + (self._duals / self._gaps)[:count] * primal
        step = self._matrix.solve(lower - upper - dual - self._rows.T @ weighted)
        moved = np.concatenate([-primal - self._rows @ step, step, -step])
        return moved, pull - self._duals / self._gaps * moved


class _Dense:
    """D + R'R, written out; D is a diagonal."""

    def __init__(self, diagonal: Floats, root: Floats) -> None:
        matrix = root.T @ root
        matrix[np.diag_indices(len(diagonal))] += diagonal
        self._factor = linalg.cho_factor(matrix, overwrite_a=True, check_finite=False)

    def solve(self, right: Floats) -> Floats:
        solved: Floats = linalg.cho_solve(self._factor, right, check_finite=False)
        return solved


class _LowRank:
    """The same where R has few rows (Woodbury): D^-1 - D^-1 R' (1 + R D^-1 R')^-1 R D^-1.

    Small and large entries of D cancel; what that costs is mended by solving for the residual.
    """

    def __init__(self, diagonal: Floats, root: Floats) -> None:
        self._diagonal, self._root = diagonal, root
        matrix = (root / diagonal) @ root.T
        matrix[np.diag_indices(len(root))] += 1.0
        self._factor = linalg.cho_factor(matrix, overwrite_a=True, check_finite=False)

    def solve(self, right: Floats) -> Floats:
        solved = self._solve_once(right)
        for _ in range(REFINEMENTS):
            solved += self._solve_once(right - self._diagonal * solved - self._root.T @ (self._root @ solved))
        return solved

    def _solve_once(self, right: Floats) -> Floats:
        scaled = right / self._diagonal
        inner = linalg.cho_solve(self._factor, self._root @ scaled, check_finite=False)
        solved: Floats = scaled - (self._root.T @ inner) / self._diagonal
        return solved


def _reach(values: Floats, change: Floats) -> float:
    """How far along the change the values stay positive, at most 1."""
    falling = change < 0
    return float(min(1.0, (-values[falling] / change[falling]).min(initial=1.0)))


def _imply_bounds(program: Program) -> tuple[Floats, Floats]:
    """Bounds of the columns in front of the convex term's; where there are none, what the rows make of the others'.

    A column that costs something goes no higher than the rows push it.
    """
    count = program.term.columns.start
    lower, upper = program.lower[:count].copy(), program.upper[:count].copy()
    by_column = sparse.csc_array(program.rows.matrix)
    for column in np.flatnonzero(~np.isfinite(lower) | ~np.isfinite(upper)):
        rows = by_column.indices[by_column.indptr[column] : by_column.indptr[column + 1]]
        matrix = program.rows.matrix[rows, :count].toarray()
        own = matrix[:, column].copy()
        matrix[:, column] = 0.0
        least, most = _span(matrix, lower, upper), -_span(-matrix, lower, upper)
        sides = np.stack([(program.rows.lower[rows] - most) / own, (program.rows.upper[rows] - least) / own])
        rising = own > 0
        lower[column] = max(lower[column], np.where(rising, sides[0], sides[1]).max(initial=-np.inf))
        upper[column] = min(upper[column], np.where(rising, sides[1], sides[0]).min(initial=np.inf))
        if upper[column] == np.inf and program.cost[column] > 0 and rising.all():
            upper[column] = ((program.rows.lower[rows] - least) / own).max() + ROOM
    return lower, upper


def _span(matrix: Floats, lower: Floats, upper: Floats) -> Floats:
    """The least that every row can be within the bounds. Columns that a row does not have may be unbounded."""
    ends = np.where(matrix > 0, lower, upper)
    least: Floats = (matrix * np.where(matrix == 0, 0.0, ends)).sum(axis=1)
    return least

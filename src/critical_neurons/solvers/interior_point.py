"""An interior point method for continuous programs of many data points, with lazy constraints.

Newton's method uses the curvature of the convex term, where cutting planes would need a tangent for every data point
and round. For any multipliers λ >= 0 of the rows a · x <= b added so far and any point y,

    F(y) + min over the box of (g + A'λ) · x  -  g · y  -  λ · b,     g the gradient of F at y,

is a lower bound of the program: F is convex, and missing rows could only raise its optimum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy import linalg, sparse

from critical_neurons.core.deadline import TimeIsUp, until
from critical_neurons.core.program import SHARED, Origins, Program, Rows, stack_rows
from critical_neurons.core.solution import Solution, Status
from critical_neurons.core.structure import Floats
from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.base import Capability, Limits, Report
from critical_neurons.solvers.implied_bounds import find_least, find_least_cost, imply_bounds
from critical_neurons.solvers.loss_derivatives import Loss
from critical_neurons.solvers.newton_steps import NewtonState
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE, TIE_BREAK_SHARE, SearchRecord, StopSearch

MOST_STEPS = 200

ROWS_PER_STEP = 50
"""Rows added per step, the most violated first: each makes later steps more expensive."""

TIE_PRECISION = 0.01
"""The search ends only at a barrier parameter below this share of the cost that breaks ties."""

SHORTEST_STEP, MOST_SHORT_STEPS = 1e-4, 10
"""Below this length a step counts as short; this many in a row end the search: the program may be infeasible."""

INSIDE = 0.1
"""Distance of the start from the upper bounds, as a share of each column's range."""

STEEP = 100.0
"""A start is replaced if its loss is more than this many times that of another."""

NO_COEFFICIENT = 1e-9
"""Rows whose coefficients are all smaller than this are left out."""


class BarrierSolver:
    name = "barrier"
    capabilities = frozenset({Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        if options:
            raise InvalidSettingError(f"options: barrier has none. Found: {', '.join(options)}.")

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
    return None if np.isfinite(np.stack(imply_bounds(program))).all() else "columns that nothing bounds"


class _Search(SearchRecord):
    """Searches over the columns that are neither fixed nor those of the convex term."""

    def __init__(self, program: Program, limits: Limits, report: Report) -> None:
        super().__init__(program, limits, report)
        if program.start is not None:
            self.offer(program.start)
        lower, upper = imply_bounds(program)
        self._base = np.where(upper > lower, 0.0, lower)
        self._columns = np.flatnonzero(upper > lower)
        self._lower, self._upper = lower[self._columns], upper[self._columns]
        self._cost = program.cost[self._columns]
        self._steps = 0
        self.raise_bound(find_least_cost(program))

    def run(self) -> Solution:
        interrupted = False
        try:
            self._search()
        except (StopSearch, TimeIsUp):
            pass
        except KeyboardInterrupt:
            interrupted = True
        self.learnt += self._find_tangents()
        return self.finish(Status.TIMED_OUT, interrupted=interrupted, steps=self._steps)

    def _search(self) -> None:
        self._try(self.program.lower)
        self.tell()
        if self.gap <= self.target:
            return
        origins = self._find_origins()
        loss = Loss(self.program, self._base, self._columns, origins.points)
        first = [self.program.rows, *(self._build_defining() if np.any(origins.points != SHARED) else ())]
        self.remaining()
        rows, limits = self._split(stack_rows(first, self.program.column_count))
        self.remaining()
        start = self._choose_start(loss)
        steepest = float(np.abs(self._cost + loss.differentiate(start).slope).max())
        pattern = sparse.csr_array(sparse.vstack([rows, loss.pattern], format="csr"))
        with until(time.monotonic() + self.remaining()):
            state = NewtonState(start, (self._lower, self._upper), steepest, origins, pattern)
            state.add(rows, limits)
        tilt = self._tilt()
        precise = TIE_PRECISION * tilt.max() if tilt.any() else np.inf
        short = 0
        while self._steps < MOST_STEPS and short < MOST_SHORT_STEPS and self.elapsed < self.limits.time_limit:
            here = loss.differentiate(state.point)
            slope = self._cost + here.slope
            self._bound_below(float(self._cost @ state.point) + here.value, slope, state)
            violated = self._add_violated_rows(state)
            self.tell()
            if not violated and self.gap <= self.target and state.barrier <= precise:
                return
            try:
                length = state.step(slope + tilt, here.roots, self.remaining)
            except linalg.LinAlgError:  # double precision is exhausted
                return
            if length < SHORTEST_STEP and self.gap <= self.limits.gap:
                return
            short = short + 1 if length < SHORTEST_STEP else 0
            self._steps += 1

    def _choose_start(self, loss: Loss) -> Floats:
        """A point well inside the bounds. If its loss is very large, as with wide bounds, a point proposed by the
        formulation is a better start."""
        margin = INSIDE * (self._upper - self._lower)
        start = self._upper - margin
        for proposed in self._propose(self._complete(start)):
            other = np.clip(proposed[self._columns], self._lower + margin, self._upper - margin)
            if loss.differentiate(start).value > STEEP * max(1.0, loss.differentiate(other).value):
                start = other
        return start

    def _find_origins(self) -> Origins:
        if self.program.origins is not None:
            return self.program.origins.at(self._columns)
        nowhere = np.full(len(self._columns), SHARED)
        return Origins(nowhere, nowhere)

    def _build_defining(self) -> Iterator[Rows]:
        """Rows without which the columns of a data point would be unconstrained."""
        for place, source in enumerate(self.program.sources):
            numbers = source.defining
            for at in range(0, len(numbers), source.piece):
                self.remaining()
                yield self.learn_from(place, numbers[at : at + source.piece])

    def _tilt(self) -> Floats:
        """A small extra cost that breaks ties, within the share of the gap tolerance left for that."""
        if self.program.tie_break is None:
            return np.zeros(len(self._columns))
        wanted = self.program.tie_break[self._columns]
        spread = float(np.abs(wanted) @ (self._upper - self._lower))
        return TIE_BREAK_SHARE * self.limits.gap / max(spread, 1.0) * wanted

    def _bound_below(self, value: float, slope: Floats, state: NewtonState) -> None:
        reduced = slope + state.rows.gather(state.multipliers)
        lowest = find_least(reduced, self._lower, self._upper)
        self.raise_bound(float(value - slope @ state.point + lowest - state.multipliers @ state.limits))

    def _add_violated_rows(self, state: NewtonState) -> bool:
        """Add the most violated rows that are not in the program yet. Returns whether any row is violated."""
        found, all_violations = self._judge(state.point)
        if found and self.incumbent is None:
            self._judge(self._shrink(state))
        if found:
            self._try(self._complete(state.point))
        for place, violations in enumerate(all_violations):
            violations[self.known[place]] = 0.0
            new = np.flatnonzero(violations > FEASIBILITY_TOLERANCE / 2)
            if len(new) > ROWS_PER_STEP:
                new = np.sort(new[np.argsort(-violations[new], kind="stable")[:ROWS_PER_STEP]])
            if len(new):
                state.add(*self._split(self.learn_from(place, new)))
        return found

    def _try(self, point: Floats) -> None:
        """Offer the points that the formulation proposes for the scores of a point."""
        for proposed in self._propose(point):
            if self._judge(proposed[self._columns])[0]:  # none with these scores is feasible
                return

    def _propose(self, point: Floats) -> Iterator[Floats]:
        if self.program.propose is not None:
            for proposed in self.program.propose(point):
                yield proposed
                self.remaining()

    def _shrink(self, state: NewtonState) -> Floats:
        """The point moved towards the lower bounds until it meets a budget."""
        move = state.point - self._lower
        over, used = state.rows.multiply(state.point) - state.limits, state.rows.multiply(move)
        violated = (over > 0) & (used > 0)
        share = float((over[violated] / used[violated]).clip(max=1.0).max(initial=0.0))
        return self._lower + (1.0 - share) * move

    def _judge(self, searched: Floats) -> tuple[bool, list[Floats]]:
        """Whether any row is violated, and the violations of the sources. A feasible point is offered as
        incumbent."""
        point, rows = self._complete(searched), self.program.rows
        values = rows.matrix @ point
        violations = [source.violations(point) for source in self.program.sources]
        worst = max(each.max(initial=0.0) for each in (values - rows.upper, rows.lower - values, *violations))
        if worst <= FEASIBILITY_TOLERANCE:
            self.offer(self.program.raise_term(point))
        return worst > FEASIBILITY_TOLERANCE, violations

    def _complete(self, searched: Floats) -> Floats:
        point = np.zeros(self.program.column_count)
        point[: len(self._base)] = self._base
        point[self._columns] = searched
        return point

    def _split(self, rows: Rows) -> tuple[sparse.csr_array, Floats]:
        """Rows as a · x <= b over the searched columns."""
        matrix = sparse.csr_array(rows.matrix[:, : len(self._base)])
        given = matrix @ self._base
        matrix = sparse.csr_array(matrix[:, self._columns])
        above, below = np.isfinite(rows.upper), np.isfinite(rows.lower)
        parts = [matrix[np.flatnonzero(above)], -matrix[np.flatnonzero(below)]]
        sides = sparse.csr_array(sparse.vstack(parts, format="csr"))
        limits = np.concatenate([(rows.upper - given)[above], (given - rows.lower)[below]])
        used = np.flatnonzero(abs(sides).max(axis=1).toarray().reshape(-1) > NO_COEFFICIENT)
        return sides[used], limits[used]

    def _find_tangents(self) -> list[Rows]:
        if self.incumbent is None:
            return []
        return [self.program.term.cuts(self.incumbent, np.arange(len(self.program.term.values(self.incumbent))))]

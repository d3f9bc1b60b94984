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

from critical_neurons.core.deadline import until
from critical_neurons.core.program import SHARED, Origins, Program, Rows, stack_rows
from critical_neurons.core.solution import Solution, Status, relative_gap
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.base import Capability, Limits, Report, refuse_options
from critical_neurons.solvers.implied_bounds import find_least, find_least_cost, imply_bounds
from critical_neurons.solvers.loss_derivatives import Loss
from critical_neurons.solvers.newton_steps import NewtonState, keeps_sparse
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE, TIE_BREAK_SHARE, SearchRecord
from critical_neurons.solvers.working_set import IdleSides, choose_rows

MOST_STEPS = 200

TIE_PRECISION = 0.01
"""The search ends only at a barrier parameter below this share of the cost that breaks ties."""

SHORTEST_STEP, MOST_SHORT_STEPS = 1e-4, 10
"""Below this length a step counts as short; this many in a row end the search: the program may be infeasible."""

SWEEP_SHARE = 0.5
"""Part of the data points that is searched for violated rows in a step. All of them are searched if none is found, so
that a point counts as feasible only after a complete search."""

INSIDE = 0.1
"""Distance of the start from the upper bounds, as a share of each column's range."""

STEEP = 100.0
"""A start is replaced if its loss is more than this many times that of another."""

AT_A_BOUND = (1e-3, 1e-4, 1e-5)
"""How close to a bound a score counts as being at it, as a share of its range; the first that costs nothing is used.
Steps end some way from every bound."""

NO_COEFFICIENT = 1e-9
"""Rows whose coefficients are all smaller than this are left out."""


class BarrierSolver:
    name = "barrier"
    capabilities = frozenset({Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        refuse_options(self.name, options)

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        reason = find_obstacle(program)
        if reason is not None:
            raise InvalidSettingError(f"solver: barrier takes no program with {reason}. Use solver='highs'.")
        return _BarrierSearch(program, limits, report).run()


def find_obstacle(program: Program) -> str | None:
    """Why the program cannot be solved by this method, if it cannot."""
    if program.integer.any():
        return "integer columns"
    if np.any(program.rows.lower == program.rows.upper):
        return "equations"
    return None if np.isfinite(np.stack(imply_bounds(program))).all() else "columns that nothing bounds"


class _BarrierSearch(SearchRecord):
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
        self._idle = IdleSides()
        self._block = 0
        self._has_values = False
        """Whether any column searched belongs to a data point."""
        self._is_sparse = False
        """Whether rows are kept sparse."""
        self.raise_bound(find_least_cost(program))

    def run(self) -> Solution:
        interrupted = self.run_stoppable(self._search)
        interrupted = self.run_stoppable(self._move_to_bounds) or interrupted
        self.learnt += self._find_tangents()
        return self.finish(Status.TIMED_OUT, interrupted=interrupted, steps=self._steps)

    def _search(self) -> None:
        self._try(self.program.lower)
        self.record_step()
        if self.gap <= self.target:
            return
        origins = self._find_origins()
        self._has_values = bool(np.any(origins.points != SHARED))
        self._is_sparse = keeps_sparse(origins)
        loss = Loss(self.program, self._base, self._columns, origins.points)
        first = [self.program.rows, *(self._build_defining() if self._has_values else ())]
        self.remaining()
        rows, limits = self._split(stack_rows(first, self.program.column_count))
        self.remaining()
        start = self._choose_start(loss)
        steepest = float(np.abs(self._cost + loss.differentiate(start).slope).max())
        pattern = sparse.csr_array(sparse.vstack([sparse.csr_array(rows), loss.pattern], format="csr"))
        with until(time.monotonic() + self.remaining()):
            state = NewtonState(start, (self._lower, self._upper), steepest, origins, pattern)
            state.add(rows, limits)
        tilt = self.tilt(self._columns, self._lower, self._upper)
        precise = TIE_PRECISION * tilt.max() if tilt.any() else np.inf
        short = 0
        while self._steps < MOST_STEPS and short < MOST_SHORT_STEPS and self.elapsed < self.limits.time_limit:
            here = loss.differentiate(state.point)
            slope = self._cost + here.slope
            self._bound_below(float(self._cost @ state.point) + here.value, slope, state)
            violated = self._add_violated_rows(state)
            self.record_step()
            if not violated and self.gap <= self.target and state.barrier <= precise:
                return
            try:
                length = state.step(slope + tilt, loss.find_roots(here.logits), self.remaining)
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
            for at in range(0, len(numbers), source.rows_at_once):
                self.remaining()
                yield self.learn_from(place, numbers[at : at + source.rows_at_once])

    def _bound_below(self, value: float, slope: Floats, state: NewtonState) -> None:
        reduced = slope + state.rows.gather(state.multipliers)
        lowest = find_least(reduced, self._lower, self._upper)
        self.raise_bound(float(value - slope @ state.point + lowest - state.multipliers @ state.limits))

    def _add_violated_rows(self, state: NewtonState) -> bool:
        """Add the most violated rows that are not in the program yet. Returns whether any row is violated."""
        self._add_sides(state)
        point, rows = self._complete(state.point), self.program.rows
        values = rows.matrix @ point
        over = [state.rows.multiply(state.point) - state.limits, values - rows.upper, rows.lower - values]
        outside = max(each.max(initial=0.0) for each in over) > FEASIBILITY_TOLERANCE
        found = self._sweep(point, complete=not outside)
        if not outside and not any(len(numbers) for numbers, _ in found):
            self.offer(self.program.raise_term(point))
            return False
        if self.incumbent is None:
            self.offer_if_feasible(self._complete(self._shrink(state)))
        if self._has_values:
            self._try(point)
        for place, (numbers, violations) in enumerate(found):
            new = np.flatnonzero(~self.known[place][numbers])
            chosen = choose_rows(numbers[new], violations[new], self.program.sources[place].label(numbers[new]))
            if len(chosen):
                self._idle.add(*self._split(self.learn_from(place, chosen)))
        self._add_sides(state)
        return True

    def _add_sides(self, state: NewtonState) -> None:
        for sides, limits in self._idle.take_violated(state.point):
            state.add(sides, limits)

    def _sweep(self, point: Floats, *, complete: bool) -> list[tuple[Ints, Floats]]:
        """By source: violated rows and their violations, found block by block of the data points. The sweep ends
        after a share of the blocks, a `complete` one only if there are any new rows."""
        sources = self.program.sources
        found: list[list[tuple[Ints, Floats]]] = [[] for _ in sources]
        count = max((source.block_count for source in sources), default=0)
        needed = not complete
        for turn in range(count):
            if needed and turn >= SWEEP_SHARE * count:
                break
            block, self._block = self._block % count, self._block + 1
            for place, source in enumerate(sources):
                if block < source.block_count:
                    found[place].append(source.find_violated(point, block, FEASIBILITY_TOLERANCE / 2))
                    needed = needed or not self.known[place][found[place][-1][0]].all()
        return [
            (np.concatenate(numbers), np.concatenate(by))
            for numbers, by in (zip(*each, strict=True) for each in found)
        ]

    def _try(self, point: Floats) -> None:
        """Offer the points that the formulation proposes for the scores of a point."""
        for proposed in self._propose(point):
            if not self.offer_if_feasible(proposed):  # none with these scores is feasible
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

    def _complete(self, searched: Floats) -> Floats:
        point = np.zeros(self.program.column_count)
        point[: len(self._base)] = self._base
        point[self._columns] = searched
        return point

    def _split(self, rows: Rows) -> tuple[sparse.csr_array | Floats, Floats]:
        """Rows as a · x <= b over the searched columns: dense if these are few and none belongs to a data point."""
        above, below = np.isfinite(rows.upper), np.isfinite(rows.lower)
        sides: sparse.csr_array | Floats
        if self._is_sparse:
            matrix = sparse.csr_array(rows.matrix[:, : len(self._base)])
            given = matrix @ self._base
            matrix = sparse.csr_array(matrix[:, self._columns])
            parts = [matrix[np.flatnonzero(above)], -matrix[np.flatnonzero(below)]]
            sides = sparse.csr_array(sparse.vstack(parts, format="csr"))
            largest = abs(sparse.csr_array(sides)).max(axis=1).toarray().reshape(-1)
        else:
            written = rows.matrix.toarray()
            given = written[:, : len(self._base)] @ self._base
            written = written[:, self._columns]
            sides = np.concatenate([written[above], -written[below]])
            largest = np.abs(sides).max(axis=1, initial=0.0)
        limits = np.concatenate([(rows.upper - given)[above], (given - rows.lower)[below]])
        used = np.flatnonzero(largest > NO_COEFFICIENT)
        return sides[used], limits[used]

    def _move_to_bounds(self) -> None:
        """Move scores next to a bound onto it, if the incumbent stays feasible and no worse than the share of the gap
        tolerance left to ties."""
        program, best, objective = self.program, self.incumbent, self.objective
        if program.tie_break is None or best is None or objective is None:
            return
        scores = np.flatnonzero(program.tie_break)
        lower, upper = program.lower[scores], program.upper[scores]
        limit = objective + TIE_BREAK_SHARE * self.limits.gap * max(1.0, abs(objective))
        solved = self.gap <= self.limits.gap
        for share in AT_A_BOUND:
            near = share * (upper - lower)
            low, high = best[scores] - lower <= near, upper - best[scores] <= near
            for ends in (low | high, low):
                point = best.copy()
                point[scores] = np.where(ends, np.where(low, lower, upper), best[scores])
                point = program.raise_term(point)
                value = program.value(point)
                stays_solved = not solved or (relative_gap(value, self.bound) or 0.0) <= self.limits.gap
                if value <= limit and stays_solved and self.is_feasible(point):
                    self.incumbent, self.objective = point, value
                    return

    def _find_tangents(self) -> list[Rows]:
        if self.incumbent is None:
            return []
        return [self.program.term.cuts(self.incumbent, np.arange(len(self.program.term.values(self.incumbent))))]

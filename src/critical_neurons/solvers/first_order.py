"""A primal-dual first-order method for relaxed programs of large networks: no row is built, nothing is factorised.

The program as a saddle point, with multipliers y of the rows A x in [l, u] and gradients g of the loss of each data
point with respect to its logits B x + b, is

    min over x in X, max over y, g   cost · x + y · A x - h(y) + g · (B x + b) - loss*(g),

X the bounds of the columns and the constraints that are handled by projection, h(y) the largest y · v with l <= v <=
u, and loss* the convex conjugate of the loss. The sparsity term is the largest weighted mean of some rows, and minus
the multipliers of these rows are the weights; so cost is only what breaks ties. Each iteration takes one forward and
one backward pass: a step of the primal-dual hybrid gradient method with diagonal scaling, reflected and averaged with
the last restart (Halpern), restarted when the steps have become short, as in PDLP. Any y and g give a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from critical_neurons.core.program import Program, Saddle
from critical_neurons.core.solution import Solution, Status
from critical_neurons.core.structure import Floats
from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.base import Capability, Limits, Report, refuse_options
from critical_neurons.solvers.implied_bounds import find_least_cost, imply_bounds
from critical_neurons.solvers.saddle_scaling import Scaling, scale_saddle
from critical_neurons.solvers.saddle_steps import Iterate, SaddleProblem, StepTaker
from critical_neurons.solvers.search_record import SearchRecord, StopSearch

STEP_SHARE = 0.95
"""Step size as a share of the largest that converges for the estimated norm."""

SUFFICIENT, NECESSARY, LONGEST, LEAST = 0.2, 0.8, 0.36, 30
"""After the least number of steps, a restart follows when a step is at most the first share of the first step since
the last restart, or at most the second and longer than the step before; and at the latest after this share of all
iterations, plus the least number."""

STANDSTILL = 1e-28
"""Below this squared length, relative to that of the iterate, the first step after a restart is a rounding error."""

MOST_FAILURES = 20
"""If numbers overflow the step size is halved, at most this often."""

BLENDS = 10
"""Points tried between the iterate and the start, by halving."""


class FirstOrderSolver:
    name = "first-order"
    capabilities = frozenset({Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        refuse_options(self.name, options)

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        if program.integer.any():
            raise _refuse(f"{int(program.integer.sum())} integer columns", "integer=False, or solver='highs'")
        if program.saddle is None:
            raise _refuse(
                "a program of another formulation, with max pools, or of a span of a model",
                "solver='highs' or 'barrier'",
            )
        if program.start is None:
            raise _refuse("a program whose budget excludes the unpruned network", "solver='highs' or 'barrier'")
        return _FirstOrderSearch(program, program.saddle, program.start, limits, report).run()


def _refuse(found: str, advice: str) -> InvalidSettingError:
    return InvalidSettingError(
        f"solver: first-order found {found}. Accepted: relaxed programs of the paper's formulation, without max "
        f"pools, for which a feasible point is known. Use {advice}."
    )


class _FirstOrderSearch(SearchRecord):
    """Searches over all columns before those of the convex term."""

    def __init__(self, program: Program, saddle: Saddle, start: Floats, limits: Limits, report: Report) -> None:
        super().__init__(program, limits, report)
        self._saddle, self._start = saddle, start
        lower, upper = imply_bounds(program)
        searched = slice(len(lower))
        weights, tilt = program.cost[program.term.columns], self.tilt(searched, lower, upper)
        self._problem = SaddleProblem(saddle, tilt, lower, upper, weights, program.term.loss)
        self._steps = 0
        self.offer(start)
        self.raise_bound(find_least_cost(program))

    def run(self) -> Solution:
        interrupted = self.run_stoppable(self._search)
        return self.finish(Status.TIMED_OUT, interrupted=interrupted, steps=self._steps)

    def _search(self) -> None:
        self._offer_near(self.program.lower[: len(self._problem.cost)])
        self.record_step()
        if self.gap <= self.target:
            return
        assert self.incumbent is not None
        columns = self.incumbent[: len(self._problem.cost)].copy()
        rows, logits = self._saddle.apply(columns)
        no_strides = np.full(len(rows), np.finfo(np.float64).tiny)
        multipliers = self._saddle.project_multipliers(np.zeros(len(rows)), no_strides)  # 0, and equal shares
        at = Iterate(columns, multipliers, self._problem.differentiate_loss(logits))
        scaling = scale_saddle(self._saddle, len(columns), self.limits.seed, self.remaining)
        taker = StepTaker(self._problem, scaling, STEP_SHARE / scaling.norm, logits)
        taker.weight = first_weight = self._compare_sides(at, scaling)
        failures = 0
        while self.gap > self.target:
            reached = self._iterate(taker, at)
            if reached is None:
                failures += 1
                if failures > MOST_FAILURES:
                    raise StopSearch(Status.TIMED_OUT)
                taker.step_size, taker.weight, taker.logits = taker.step_size / 2, first_weight, logits
                continue
            taker.balance(reached - at)
            at = reached
            self._bound_below(at, taker.logits)
            self._offer_near(at.columns)
            self.record_step()

    def _compare_sides(self, at: Iterate, scaling: Scaling) -> float:
        """The first weight of the steps: the reduced costs at the iterate, relative to how far rows are outside their
        limits with all columns at 0, both scaled. It is about the ratio of multipliers to columns, as in PDLP."""
        reduced = self._problem.cost + self._saddle.adjoint(at.multipliers, at.gradients)
        rows, _ = self._saddle.apply(np.zeros(len(reduced)))
        outside = np.linalg.norm(scaling.rows * (np.clip(rows, *self._saddle.limits) - rows))
        costs = np.linalg.norm(scaling.columns * reduced)
        return float(costs / outside) if 0 < costs < np.inf and 0 < outside < np.inf else 1.0

    def _iterate(self, taker: StepTaker, start: Iterate) -> Iterate | None:
        """Iterate until a restart is due; None if numbers overflow."""
        at, first, last = start, 0.0, 0.0
        for number in count():
            self.remaining()
            with np.errstate(over="ignore", invalid="ignore"):
                reached = taker.advance(at)
                move = reached - at
                length = taker.measure(move)
            self._steps += 1
            if not np.isfinite(length):
                return None
            if number == 0:
                first = length
                if length <= STANDSTILL * taker.measure(at):
                    raise StopSearch(Status.TIMED_OUT)
            short = length <= SUFFICIENT**2 * first or (length <= NECESSARY**2 * first and length > last)
            if number >= LEAST and (short or number >= LONGEST * self._steps + LEAST):
                return reached
            last = length
            share = (number + 1) / (number + 2)
            at = at.mix(1.0, move, 2.0).mix(share, start, 1.0 - share)
        raise AssertionError("a restart follows at some time")

    def _bound_below(self, at: Iterate, logits: Floats) -> None:
        """The loss is at least its tangent at these logits, where it has the iterate's gradients."""
        problem = self._problem
        tangent = problem.weights @ problem.loss.values(logits) - (at.gradients * logits).sum()
        lagrangian = self._saddle.bound(at.multipliers, at.gradients, problem.lower, problem.upper)
        self.raise_bound(float(tangent + lagrangian))

    def _offer_near(self, columns: Floats) -> None:
        """Offer feasible points near the columns, and between them and the start, the nearest that are feasible."""
        point = np.zeros(self.program.column_count)
        point[: len(columns)] = columns
        near = repaired = self._saddle.repair(point)
        least, most, share = 0.0, 1.0, 0.0
        for _ in range(BLENDS):
            if self._offer_at(repaired):
                most = share
            else:
                least = share
            if least == most:
                return
            share = (least + most) / 2
            repaired = self._saddle.repair(near + share * (self._start - near))

    def _offer_at(self, repaired: Floats) -> bool:
        """Offer points with these scores. Returns whether the last of them, the one of the least loss, is feasible,
        or none can be better than the incumbent."""
        if self.objective is not None and self._find_sparsity(repaired) >= self.objective:
            return True
        assert self.program.propose is not None  # as for all programs with a saddle
        feasible = False
        for proposed in self.program.propose(repaired):
            self.remaining()
            feasible = self.offer_if_feasible(proposed)
        return feasible

    def _find_sparsity(self, point: Floats) -> float:
        """The value of the point without its loss, which is never negative."""
        count = len(self._problem.cost)
        return float(self.program.cost[:count] @ point[:count])

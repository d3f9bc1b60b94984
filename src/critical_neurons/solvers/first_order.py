"""A primal-dual first-order method for relaxed programs of large networks: no row is built, nothing is factorised.

The program as a saddle point, with multipliers y of the rows A x in [l, u] and gradients g of the loss of each data
point with respect to its logits B x + b, is

    min over the box, max over y, g   cost · x + y · A x - h(y) + g · (B x + b) - loss*(g),

h(y) the largest y · v with l <= v <= u, and loss* the convex conjugate of the loss. Each iteration takes one forward
and one backward pass: primal-dual hybrid gradient steps with diagonal scaling, reflected and averaged with the last
restart (Halpern), restarted when the steps have become short, as in PDLP. Any y and g give a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from critical_neurons.core.deadline import TimeIsUp
from critical_neurons.core.loss import Loss
from critical_neurons.core.program import Program, Saddle
from critical_neurons.core.solution import Solution, Status
from critical_neurons.core.structure import Floats
from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.base import Capability, Limits, Report, refuse_options
from critical_neurons.solvers.implied_bounds import find_least_cost, imply_bounds
from critical_neurons.solvers.search_record import FEASIBILITY_TOLERANCE, TIE_BREAK_SHARE, SearchRecord, StopSearch

SCALING_ROUNDS, PROBES, POWER_STEPS = 6, 8, 40
"""Rows and columns are scaled to about the same norm, estimated by products with random signs; power steps then
estimate the norm of the whole."""

STEP_SHARE = 0.95
"""Step size as a share of the largest that converges for the estimated norm."""

FIRST_WEIGHT = 1.0
"""Ratio of dual to primal movement at the start."""

SHORT, SHORTER, SHARE_OF_ALL, LEAST_ROUND = 0.8, 0.2, 0.36, 30
"""A round ends when its steps are this much shorter than the first one, at once or, below the first share, when they
grow again; and after this share of all iterations so far, plus a few."""

BLENDS = 12
"""Halvings in the search for a feasible point between the iterate and the start."""

NEWTON_STEPS, NEWTON_HALVINGS, NEWTON_TOLERANCE = 30, 20, 1e-12


class FirstOrderSolver:
    name = "first-order"
    capabilities = frozenset({Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        refuse_options(self.name, options)

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        if program.saddle is None or program.start is None or program.integer.any():
            raise InvalidSettingError(
                "solver: first-order takes relaxed programs of the paper's formulation, without max pools, for which "
                "a feasible point is known. Use solver='highs'."
            )
        return _Search(program, program.saddle, program.start, limits, report).run()


class _Search(SearchRecord):
    """Searches over all columns before those of the convex term."""

    def __init__(self, program: Program, saddle: Saddle, start: Floats, limits: Limits, report: Report) -> None:
        super().__init__(program, limits, report)
        self._saddle, self._start = saddle, start
        self._lower, self._upper = imply_bounds(program)
        self._weights, self._loss = program.cost[program.term.columns], program.term.loss
        self._steps = 0
        self.offer(start)
        self.raise_bound(find_least_cost(program))

    def run(self) -> Solution:
        interrupted = False
        try:
            self._search()
        except (StopSearch, TimeIsUp):
            pass
        except KeyboardInterrupt:
            interrupted = True
        return self.finish(Status.TIMED_OUT, interrupted=interrupted, steps=self._steps)

    def _search(self) -> None:
        self._offer_near(self.program.lower[: len(self._lower)])
        self.tell()
        if self.gap <= self.target:
            return
        cost = self.program.cost[: len(self._lower)] + self._tilt()
        x = self._start[: len(self._lower)].copy()
        self._saddle.aim(x)
        rows, logits = self._saddle.apply(x)
        multipliers, seeds = np.zeros(len(rows)), self._differentiate(logits)
        row_scale, seed_scale, column_scale, step = self._scale(len(rows), logits.shape)
        weight = FIRST_WEIGHT
        while self.gap > self.target:
            lower, upper = self._saddle.limits
            stride, dual = step / weight * column_scale**2, step * weight * row_scale**2
            seed_dual = step * weight * seed_scale**2
            x0, multipliers0, seeds0 = x, multipliers, seeds
            count, first, last = 0, 0.0, 0.0
            while True:
                self.remaining()
                slope = cost + self._saddle.adjoint(multipliers, seeds)
                new_x = np.clip(x - stride * slope, self._lower, self._upper)
                rows, outputs = self._saddle.apply(2 * new_x - x)
                moved = multipliers + dual * rows
                new_multipliers = moved - dual * np.clip(moved / dual, lower, upper)
                logits = minimise_near(self._loss, self._weights, seeds / seed_dual + outputs, seed_dual, logits)
                new_seeds = self._differentiate(logits)
                shift = [new_x - x, new_multipliers - multipliers, new_seeds - seeds]
                length = weight * _norm(shift[0] / column_scale) ** 2
                length += (_norm(shift[1] / row_scale) ** 2 + _norm(shift[2] / seed_scale) ** 2) / weight
                self._steps += 1
                first = first or length
                done = length <= SHORTER**2 * first or (length <= SHORT**2 * first and length > last)
                if count and (done or count >= SHARE_OF_ALL * self._steps + LEAST_ROUND):
                    break
                last = length
                count += 1
                share = count / (count + 1)
                x = share * (x + 2 * shift[0]) + (1 - share) * x0
                multipliers = share * (multipliers + 2 * shift[1]) + (1 - share) * multipliers0
                seeds = share * (seeds + 2 * shift[2]) + (1 - share) * seeds0
            x, multipliers, seeds = new_x, new_multipliers, new_seeds
            moved_x = _norm((x - x0) / column_scale)
            moved_y = np.hypot(_norm((multipliers - multipliers0) / row_scale), _norm((seeds - seeds0) / seed_scale))
            if moved_x > 0 and moved_y > 0:
                weight = float(np.sqrt(weight * moved_y / moved_x))
            self._bound_below(multipliers, seeds, logits)
            self._offer_near(x)
            self.tell()
            self._saddle.aim(x)

    def _differentiate(self, logits: Floats) -> Floats:
        return np.asarray(self._weights[:, None] * self._loss.gradients(logits))

    def _bound_below(self, multipliers: Floats, seeds: Floats, logits: Floats) -> None:
        """The loss is at least its tangent at the logits, whose gradient the seeds are."""
        offset = self._weights @ self._loss.values(logits) - (seeds * logits).sum()
        self.raise_bound(float(offset + self._saddle.bound(multipliers, seeds, self._lower, self._upper)))

    def _tilt(self) -> Floats:
        """A small extra cost that breaks ties, within the share of the gap tolerance left for that."""
        if self.program.tie_break is None:
            return np.zeros(len(self._lower))
        wanted = self.program.tie_break[: len(self._lower)]
        spread = float(np.abs(wanted) @ (self._upper - self._lower))
        return TIE_BREAK_SHARE * self.limits.gap / max(spread, 1.0) * wanted

    def _offer_near(self, columns: Floats) -> None:
        """Offer feasible points near the columns; if there are none, between them and the start."""
        point = np.zeros(self.program.column_count)
        point[: len(columns)] = columns
        near = self._saddle.repair(point)
        if self.violation(near) > FEASIBILITY_TOLERANCE:
            least, most = 0.0, 1.0
            for _ in range(BLENDS):
                share = (least + most) / 2
                feasible = self.violation(near + share * (self._start - near)) <= FEASIBILITY_TOLERANCE
                least, most = (least, share) if feasible else (share, most)
            near = near + most * (self._start - near)
        self.offer_if_feasible(near)
        for proposed in self.program.propose(near) if self.program.propose is not None else ():
            self.offer_if_feasible(proposed)
            self.remaining()

    def _scale(self, row_count: int, logit_shape: tuple[int, ...]) -> tuple[Floats, Floats, Floats, float]:
        """Scales of rows, logits (one for each data point) and columns, and the step size."""
        random = np.random.default_rng(self.limits.seed)
        rows, seeds, columns = np.ones(row_count), np.ones(logit_shape), np.ones(len(self._lower))
        zero = self._saddle.apply(np.zeros(len(columns)))

        def multiply(x: Floats) -> tuple[Floats, Floats]:
            values, logits = self._saddle.apply(columns * x)
            return rows * (values - zero[0]), seeds * (logits - zero[1])

        for _ in range(SCALING_ROUNDS):
            sizes = [np.zeros_like(rows), np.zeros_like(seeds), np.zeros_like(columns)]
            for _ in range(PROBES):
                self.remaining()
                signs = [random.choice([-1.0, 1.0], size.shape) for size in sizes]
                values, logits = multiply(signs[2])
                back = columns * self._saddle.adjoint(rows * signs[0], seeds * signs[1])
                for size, value in zip(sizes, (values, logits, back), strict=True):
                    size += value**2 / PROBES
            for scale, size in zip((rows, seeds, columns), sizes, strict=True):
                scale /= np.maximum(size, 1e-12) ** 0.25
        seeds[:] = np.exp(np.log(seeds).mean(axis=1, keepdims=True))
        vector, norm = random.standard_normal(len(columns)), 1.0
        for _ in range(POWER_STEPS):
            self.remaining()
            values, logits = multiply(vector / _norm(vector))
            norm = float(np.hypot(_norm(values), _norm(logits)))
            vector = columns * self._saddle.adjoint(rows * values, seeds * logits)
        return rows, seeds, columns, STEP_SHARE / norm


def minimise_near(loss: Loss, weights: Floats, near: Floats, strength: Floats, logits: Floats) -> Floats:
    """The minimum of weights · loss(z) + the sum of strength (z - near)² / 2, by Newton's method from the given
    logits; arrays are (batch, classes), weights (batch,). A data point's strength is the same for all classes."""
    count, classes = near.shape
    unit_forms = np.broadcast_to(np.eye(classes), (count, classes, classes))

    def judge(z: Floats) -> Floats:
        return np.asarray(weights * loss.values(z) + 0.5 * (strength * (z - near) ** 2).sum(axis=1))

    for _ in range(NEWTON_STEPS):
        slope = weights[:, None] * loss.gradients(logits) + strength * (logits - near)
        if np.abs(slope).max(initial=0.0) <= NEWTON_TOLERANCE * max(1.0, weights.max(initial=0.0)):
            break
        roots = loss.apply_root(logits, unit_forms)
        curvature = weights[:, None, None] * np.matmul(roots.transpose(0, 2, 1), roots)
        move = np.linalg.solve(curvature + strength[:, :, None] * unit_forms, slope[:, :, None])[:, :, 0]
        value, length = judge(logits), np.ones((count, 1))
        for _ in range(NEWTON_HALVINGS):
            worse = judge(logits - length * move) > value + NEWTON_TOLERANCE
            if not worse.any():
                break
            length[worse] /= 2
        logits = logits - length * move
    return logits


def _norm(values: Floats) -> float:
    return float(np.linalg.norm(values))

"""Steps of the primal-dual hybrid gradient method on the saddle point of a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from critical_neurons.core.loss import Loss
from critical_neurons.core.program import Saddle
from critical_neurons.core.structure import Floats
from critical_neurons.solvers.saddle_scaling import Scaling

NEWTON_STEPS, NEWTON_HALVINGS, NEWTON_TOLERANCE = 30, 20, 1e-12


@dataclass(frozen=True)
class Iterate:
    """Primal columns, multipliers of the rows, and gradients of the loss with respect to the logits."""

    columns: Floats
    multipliers: Floats
    gradients: Floats

    def __sub__(self, other: Iterate) -> Iterate:
        return self.mix(1.0, other, -1.0)

    def mix(self, share: float, other: Iterate, other_share: float) -> Iterate:
        """share · this + other_share · the other."""
        return Iterate(
            share * self.columns + other_share * other.columns,
            share * self.multipliers + other_share * other.multipliers,
            share * self.gradients + other_share * other.gradients,
        )


@dataclass(frozen=True)
class SaddleProblem:
    """cost · x + weights · loss over lower <= x <= upper, the rows, and what the saddle's projection ensures."""

    saddle: Saddle
    cost: Floats
    lower: Floats
    upper: Floats
    weights: Floats
    loss: Loss

    def differentiate_loss(self, logits: Floats) -> Floats:
        return np.asarray(self.weights[:, None] * self.loss.gradients(logits))


class StepTaker:
    """Steps of a fixed size.

    `weight` is the root of the ratio of dual to primal step size, both relative to the scaling.
    `logits` are those at which the loss has the gradients of the last iterate returned.
    """

    def __init__(self, problem: SaddleProblem, scaling: Scaling, step_size: float, logits: Floats) -> None:
        self._problem, self._scaling, self.step_size = problem, scaling, step_size
        self.logits = logits
        self.weight = 1.0

    def advance(self, at: Iterate) -> Iterate:
        """One step: the primal columns against the reduced costs, then the multipliers and gradients along the rows
        and logits at the extrapolated columns."""
        problem, saddle, scaling = self._problem, self._problem.saddle, self._scaling
        primal, dual = self.step_size / self.weight, self.step_size * self.weight
        strides = primal * scaling.columns**2
        reduced = problem.cost + saddle.adjoint(at.multipliers, at.gradients)
        columns = saddle.project(at.columns - strides * reduced, strides, problem.lower, problem.upper)
        rows, logits = saddle.apply(2.0 * columns - at.columns)
        strides = dual * scaling.rows**2
        multipliers = saddle.project_multipliers(at.multipliers + strides * rows, strides)
        strides = dual * scaling.logits**2
        near = at.gradients / strides + logits
        self.logits = minimise_near(problem.loss, problem.weights, near, strides, self.logits)
        return Iterate(columns, multipliers, problem.differentiate_loss(self.logits))

    def measure(self, move: Iterate) -> float:
        """The squared length of a move, its primal and its dual part weighted by their step sizes."""
        primal, dual = self.measure_sides(move)
        return self.weight * primal**2 + dual**2 / self.weight

    def measure_sides(self, move: Iterate) -> tuple[float, float]:
        """The scaled lengths of its primal and its dual part."""
        scaling = self._scaling
        dual = np.hypot(_norm(move.multipliers / scaling.rows), _norm(move.gradients / scaling.logits))
        return _norm(move.columns / scaling.columns), float(dual)

    def balance(self, move: Iterate) -> None:
        """Fit the weight to the primal and dual distances since the last restart, half way on a logarithmic scale."""
        primal, dual = self.measure_sides(move)
        if primal > 0 and dual > 0:
            self.weight = float(np.sqrt(self.weight * dual / primal))


def minimise_near(loss: Loss, weights: Floats, near: Floats, strength: Floats, logits: Floats) -> Floats:
    """The minimum of weights · loss(z) + the sum of strength (z - near)² / 2, by Newton's method from the given
    logits; arrays are (batch, classes), weights (batch,)."""
    count, classes = near.shape
    unit_forms = np.broadcast_to(np.eye(classes), (count, classes, classes))

    def judge(z: Floats) -> Floats:
        return np.asarray(weights * loss.values(z) + 0.5 * (strength * (z - near) ** 2).sum(axis=1))

    for _ in range(NEWTON_STEPS):
        slope = weights[:, None] * loss.gradients(logits) + strength * (logits - near)
        # a row that is done stays: its curvature may be so small that rounding errors alone would move it far away
        slope[np.abs(slope).max(axis=1) <= NEWTON_TOLERANCE * np.maximum(1.0, weights)] = 0.0
        if not slope.any():
            break
        roots = loss.apply_root(logits, unit_forms)
        curvature = weights[:, None, None] * np.matmul(roots.transpose(0, 2, 1), roots)
        # where the coefficients of logits are huge, the strength alone would leave a singular matrix
        least = (
            4 * classes * np.finfo(np.float64).eps * np.abs(curvature).max(axis=(1, 2)) + np.finfo(np.float64).tiny
        )
        matrix = curvature + np.maximum(strength, least[:, None])[:, :, None] * unit_forms
        move = np.linalg.solve(matrix, slope[:, :, None])[:, :, 0]
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

"""Diagonal scaling of a saddle point, from products with random vectors: no coefficient is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from critical_neurons.core.program import Saddle
from critical_neurons.core.structure import Floats

ROUNDS, PROBES, POWER_STEPS = 6, 8, 40
"""In every round rows and columns are divided by the root of their norm, estimated by so many products with random
signs. Power steps then estimate the norm of the whole."""

NOTHING = 1e-24
"""A squared norm below this is that of a row or column without coefficients, which is not scaled: its multiplier
must not be multiplied by a huge number."""


@dataclass(frozen=True)
class Scaling:
    """Factors of rows, logits (the same for all logits of a data point) and columns, and the norm of what they make
    of the coefficients."""

    rows: Floats
    logits: Floats
    columns: Floats
    norm: float


def scale_saddle(saddle: Saddle, column_count: int, seed: int, check_time: Callable[[], object]) -> Scaling:
    random = np.random.default_rng(seed)
    constant = saddle.apply(np.zeros(column_count))
    rows, logits, columns = (np.ones(shape) for shape in (constant[0].shape, constant[1].shape, column_count))

    def multiply(x: Floats) -> tuple[Floats, Floats]:
        check_time()
        row_values, logit_values = saddle.apply(columns * x)
        return rows * (row_values - constant[0]), logits * (logit_values - constant[1])

    def multiply_back(row_values: Floats, logit_values: Floats) -> Floats:
        check_time()
        return np.asarray(columns * saddle.adjoint(rows * row_values, logits * logit_values))

    factors = rows, logits, columns
    for _ in range(ROUNDS):
        squares = [np.zeros_like(factor) for factor in factors]
        for _ in range(PROBES):
            signs = [random.choice([-1.0, 1.0], factor.shape) for factor in factors]
            products = *multiply(signs[2]), multiply_back(signs[0], signs[1])
            for square, product in zip(squares, products, strict=True):
                square += product**2 / PROBES
        for factor, square in zip(factors, squares, strict=True):
            factor /= np.where(square > NOTHING, square, 1.0) ** 0.25
    logits[:] = np.exp(np.log(logits).mean(axis=1, keepdims=True))
    if len(saddle.shares):
        rows[saddle.shares] = np.exp(np.log(rows[saddle.shares]).mean())
    vector, norm = random.standard_normal(column_count), 0.0
    for _ in range(POWER_STEPS):
        row_values, logit_values = multiply(vector / max(float(np.linalg.norm(vector)), NOTHING))
        norm = float(np.hypot(np.linalg.norm(row_values), np.linalg.norm(logit_values)))
        vector = multiply_back(row_values, logit_values)
    return Scaling(rows, logits, columns, norm or 1.0)

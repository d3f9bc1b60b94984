"""Newton's equations of many columns, sorted by the columns of the rows, compared with numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import sparse

from critical_neurons.solvers.fronts import Root
from critical_neurons.solvers.wide_rows import WideElimination, WideRows

LAYER, POINTS, ROWS = 40, 3, 150
"""Units per layer, data points, and rows of each layer and data point."""

CLOSE = 1e-9

REFINABLE = 1e-7
"""Relative residual that one step of iterative refinement makes as small as rounding."""


def draw_rows(layer_count, *, live=0.5):
    """Rows of every layer but the first, in any order: of units before that are live on a data point, and one of
    their own."""
    generator = np.random.default_rng(0)
    width = layer_count * LAYER
    rows = []
    for is_live in generator.random((POINTS, width)) < live:
        for layer in range(1, layer_count):
            coefficients = generator.normal(size=(ROWS, width)) * is_live
            coefficients[:, layer * LAYER :] = 0.0
            coefficients[np.arange(ROWS), layer * LAYER + generator.integers(LAYER, size=ROWS)] = 1.0
            rows.append(coefficients)
    return generator.permutation(np.concatenate(rows))


def add_in_parts(matrix, ends):
    rows = WideRows(matrix.shape[1])
    for start, end in pairwise([0, *ends, len(matrix)]):
        rows.add(sparse.csr_array(matrix[start:end]))
    return rows


def couple_all(matrix):
    """Two rows that have all columns, and one that has none, after the first of the others."""
    return np.concatenate([matrix[:1], np.ones((2, matrix.shape[1])), 0 * matrix[:1], matrix[1:]])


@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param(draw_rows(2), id="two layers"),
        pytest.param(couple_all(draw_rows(2)), id="coupled rows"),
        pytest.param(couple_all(draw_rows(4)), id="four layers"),
        pytest.param(draw_rows(3, live=1.0), id="all live"),
        pytest.param(np.random.default_rng(0).normal(size=(50, 30)), id="no thin columns"),
        pytest.param(np.eye(30), id="nothing else"),
    ],
)
@pytest.mark.parametrize("ends", [[], [3, 40], [2, 28, 29]], ids=str)
def test_equations_are_those_written_out(matrix, ends):
    generator = np.random.default_rng(1)
    count = matrix.shape[1]
    rows = add_in_parts(matrix, ends)
    weights, diagonal = 10.0 ** generator.uniform(-3, 3, len(matrix)), 10.0 ** generator.uniform(-3, 3, count)
    root = Root(generator.normal(size=(5, count // 2)), np.arange(0, count - 1, 2)[: count // 2])
    spread = root.spread(count)
    expected = np.diag(diagonal) + matrix.T @ (weights[:, None] * matrix) + spread.T @ spread
    system, point = WideElimination(rows, diagonal, weights, [root]), generator.normal(size=count)
    assert np.array_equal(rows.write_out(), matrix)
    assert np.allclose(rows.squares, (matrix**2).sum(axis=1))
    assert np.allclose(rows.multiply(point), matrix @ point)
    assert np.allclose(rows.gather(weights), weights @ matrix)
    assert np.allclose(system.multiply(point), expected @ point)
    assert np.allclose(system.solve(expected @ point), point, atol=CLOSE)


def test_own_scores_of_the_last_layer_are_eliminated_first():
    rows = add_in_parts(couple_all(draw_rows(3)), [])
    assert set(np.arange(2 * LAYER, 3 * LAYER)) <= set(rows.sorted.thin)
    assert rows.sorted.coupled.tolist() == [1, 2]
    assert len(rows.sorted.groups) >= POINTS


def test_thin_columns_with_little_of_their_own_keep_their_digits():
    """An epigraph column: only rows that couple many columns have it, with large weights in the end."""
    matrix = couple_all(draw_rows(2))
    rows, count = add_in_parts(matrix, []), matrix.shape[1]
    weights, diagonal = np.ones(len(matrix)), np.ones(count)
    weights[rows.sorted.coupled], diagonal[rows.sorted.thin[:3]] = 1e6, 1e-8
    expected = np.diag(diagonal) + matrix.T @ (weights[:, None] * matrix)
    right = expected @ np.random.default_rng(2).normal(size=count)
    residual = right - expected @ WideElimination(rows, diagonal, weights, []).solve(right)
    assert np.abs(residual).max() <= REFINABLE * np.abs(right).max()

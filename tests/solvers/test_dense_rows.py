"""Newton's equations of few columns, compared with numpy."""

from __future__ import annotations

import numpy as np

from critical_neurons.solvers.dense_rows import DenseElimination, DenseRows
from critical_neurons.solvers.fronts import Root


def test_equations_are_those_written_out():
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(80, 30))
    rows = DenseRows(30)
    for part in np.split(matrix, [1, 30]):
        rows.add(part)
    weights, diagonal = generator.uniform(0.1, 10.0, 80), generator.uniform(1.0, 2.0, 30)
    root = Root(generator.normal(size=(5, 15)), np.arange(0, 30, 2))
    expected = np.diag(diagonal) + matrix.T @ (weights[:, None] * matrix) + root.spread(30).T @ root.spread(30)
    system, point = DenseElimination(rows, diagonal, weights, [root]), generator.normal(size=30)
    assert np.array_equal(rows.write_out(), matrix)
    assert np.allclose(rows.squares, (matrix**2).sum(axis=1))
    assert np.allclose(rows.multiply(point), matrix @ point)
    assert np.allclose(rows.gather(weights), weights @ matrix)
    assert np.allclose(system.multiply(point), expected @ point)
    assert np.allclose(system.solve(expected @ point), point)

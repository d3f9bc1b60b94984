"""Newton's equations of rows over shared columns, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest

from critical_neurons.solvers.dense_rows import FEW_COLUMNS, DenseElimination, DenseRows
from critical_neurons.solvers.fronts import Root

LAYER = FEW_COLUMNS // 3 + 10


def draw_rows(generator, layer_count):
    """Rows of every layer but the first: coefficients of all layers before, and one of their own."""
    rows = []
    for layer in range(1, layer_count):
        for _ in range(40):
            row = np.zeros(layer_count * LAYER)
            row[: layer * LAYER] = generator.normal(size=layer * LAYER) * (generator.random(layer * LAYER) < 0.7)
            row[layer * LAYER + generator.integers(LAYER)] = 1.0
            rows.append(row)
    return generator.permutation(np.array(rows))


@pytest.mark.parametrize("layer_count", [2, 4])  # few columns, and enough for groups
def test_equations_are_those_written_out(layer_count):
    generator = np.random.default_rng(0)
    matrix = draw_rows(generator, layer_count)
    count = matrix.shape[1]
    rows = DenseRows(count)
    for part in np.split(matrix, [1, 30]):
        rows.add(part)
        rows.weigh(np.ones(rows.row_count))  # forms groups that the next rows change
    weights, diagonal = generator.uniform(0.1, 10.0, len(matrix)), generator.uniform(1.0, 2.0, count)
    root = Root(generator.normal(size=(5, count // 2)), np.arange(0, count - 1, 2)[: count // 2])
    spread = np.zeros((5, count))
    spread[:, root.columns] = root.matrix
    expected = np.diag(diagonal) + matrix.T @ (weights[:, None] * matrix) + spread.T @ spread
    system, point = DenseElimination(rows, diagonal, weights, [root]), generator.normal(size=count)
    assert np.allclose(rows.squares, (matrix**2).sum(axis=1))
    assert np.allclose(rows.multiply(point), matrix @ point)
    assert np.allclose(rows.gather(weights), weights @ matrix)
    assert np.allclose(rows.weigh(weights), matrix.T @ (weights[:, None] * matrix))
    assert np.allclose(system.multiply(point), expected @ point)
    assert np.allclose(system.solve(expected @ point), point)

"""Newton's equations: eliminated part by part, or by rows, they have the solution of those written out."""

import numpy as np
import pytest
from scipy import sparse

from critical_neurons.core.program import SHARED, Origins
from critical_neurons.solvers.fronts import MOST_CHUNKS, FrontElimination, Root, Tree
from critical_neurons.solvers.low_rank import LowRank
from critical_neurons.solvers.newton_steps import REFINEMENTS

SAME = 1e-9
POINTS = np.repeat([SHARED, 0, 1, 2], [5, 8, 6, 2])
DEPTHS = np.array([SHARED] * 5 + [1] * 6 + [2] * 2 + [1] * 4 + [2] * 2 + [2] * 2)


def link(*columns):
    row = np.zeros(len(POINTS))
    row[list(columns)] = np.random.default_rng(sum(columns)).uniform(1.0, 2.0, len(columns))
    return row


def meet_in_groups():
    """Columns 5 to 7 and 8 to 10 of data point 0, 13 and 14 of data point 1 meet their like in the layer behind."""
    rows = [link(0, 5, 6, 11), link(1, 6, 7, 12), link(8, 9, 10, 11), link(2, 13, 14, 17), link(15, 16, 18)]
    rows += [link(0, 1, 2, 3, 4), link(3, 19, 20), link(0, 1, 2, 3, 4, 5, 6, 7, 11, 12)]
    return sparse.csr_array(np.array(rows))


def solve_both(tree, rows, roots=()):
    generator = np.random.default_rng(1)
    diagonal, weights = generator.uniform(1, 2, len(POINTS)), generator.uniform(0.1, 10, rows.shape[0])
    right = generator.normal(size=len(POINTS))
    system = FrontElimination(tree, diagonal, weights, roots, lambda: None)
    whole = np.diag(diagonal) + (rows.T * weights[None]) @ rows
    for root in roots:
        whole[np.ix_(root.columns, root.columns)] += root.matrix.T @ root.matrix
    assert np.allclose(system.multiply(right), whole @ right, rtol=SAME)
    return system.solve(right), np.linalg.solve(whole, right)


def test_every_data_point_and_every_group_is_a_front():
    tree = Tree(Origins(POINTS, DEPTHS), meet_in_groups())
    owns = sorted(sorted(front.own.tolist()) for front in tree.fronts)
    assert owns == sorted([[5, 6, 7], [8, 9, 10], [11, 12], [13, 14], [15, 16], [17, 18], [19, 20], [0, 1, 2, 3, 4]])


def test_the_solution_is_that_of_the_equations_written_out():
    rows = meet_in_groups()
    tree = Tree(Origins(POINTS, DEPTHS), rows)
    tree.add(rows)
    root = np.random.default_rng(0).normal(size=(3, 4))
    found, expected = solve_both(tree, rows.toarray(), [Root(root, np.array([0, 4, 17, 18]))])
    assert np.allclose(found, expected, rtol=SAME)


def test_groups_that_meet_later_become_one():
    first, late = meet_in_groups(), sparse.csr_array(np.array([link(5, 9), link(10, 7, 0)]))
    tree = Tree(Origins(POINTS, DEPTHS), first)
    tree.add(first)
    tree.add(late)
    assert sum(len(front.own) == 8 for front in tree.fronts) == 1
    found, expected = solve_both(tree, np.concatenate([first.toarray(), late.toarray()]))
    assert np.allclose(found, expected, rtol=SAME)


def test_rows_may_come_one_by_one():
    rows = np.random.default_rng(2).normal(size=(2 * MOST_CHUNKS, len(POINTS))) * (POINTS <= 0)
    tree = Tree(Origins(POINTS, DEPTHS), sparse.csr_array(rows[:1]))
    for row in rows:
        tree.add(sparse.csr_array(row[None]))
    assert max(len(front.dense) for front in tree.fronts) <= MOST_CHUNKS
    point = np.arange(float(len(POINTS)))
    assert np.allclose(tree.multiply(point), rows @ point)
    assert np.allclose(tree.gather(np.ones(len(rows))), rows.sum(axis=0))
    found, expected = solve_both(tree, rows)
    assert np.allclose(found, expected, rtol=SAME)


def test_the_clock_is_looked_at_between_fronts():
    tree = Tree(Origins(POINTS, DEPTHS), meet_in_groups())
    looks = []
    FrontElimination(tree, np.ones(len(POINTS)), np.zeros(0), [], lambda: looks.append(1))
    assert len(looks) == len(tree.fronts)


@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_equations_by_rows_are_those_written_out(spread):
    """Entries of the diagonal lie far apart, as near an optimum."""
    generator = np.random.default_rng(0)
    diagonal = spread ** generator.uniform(-1.0, 1.0, 60)
    root, right = generator.normal(size=(7, 60)), generator.normal(size=60)
    system = LowRank(diagonal, root)
    found = system.solve(right)
    for _ in range(REFINEMENTS):
        found += system.solve(right - system.multiply(found))
    expected = np.linalg.solve(np.diag(diagonal) + root.T @ root, right)
    assert np.allclose(found, expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max())

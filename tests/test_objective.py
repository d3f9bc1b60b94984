from __future__ import annotations

import numpy as np
import pytest

from critical_neurons.encoding.objective import Budget, Objective, encode_sparsity

ROUNDING = 1e-12


def sparsity(objective, sizes, scores):
    """The smallest t that the rows allow at these scores."""
    rows = encode_sparsity(objective, sizes, sum(sizes), sum(sizes) + 1)
    return (rows.lower - rows.matrix @ np.append(scores, 0.0)).max()


@pytest.mark.parametrize("rescale", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("sizes", [(3, 5), (4, 1, 6)])
def test_sparsity_leaves_the_smallest_layer_sum_out(sizes, rescale):
    """paper: (sum_l I_l - min_l I_l) / sum_l N_l; published: the same sums, each divided by its own N_l first."""
    scores = np.random.default_rng(0).uniform(size=sum(sizes))
    counts = np.array(sizes)
    sums = np.add.reduceat(scores - rescale, np.cumsum([0, *sizes[:-1]]))
    paper = (sums.sum() - sums.min()) / counts.sum()
    published = (sums / counts).sum() - (sums / counts).min()
    assert sparsity(Objective("paper", rescale=rescale), sizes, scores) == pytest.approx(paper, abs=ROUNDING)
    assert sparsity(Objective("published", rescale=rescale), sizes, scores) == pytest.approx(published, abs=ROUNDING)


@pytest.mark.parametrize("name", ["paper", "published"])
def test_a_single_layer_stays_in(name):
    scores = np.array([0.5, 1.0])
    assert sparsity(Objective(name), (2,), scores) == pytest.approx((0.5 + 1.0 - 4.0) / 2, abs=ROUNDING)


def test_rescale_only_shifts_the_published_sparsity():
    sizes, generator = (3, 5, 2), np.random.default_rng(0)
    shifts = [
        sparsity(Objective(rescale=0.0), sizes, scores) - sparsity(Objective(rescale=2.0), sizes, scores)
        for scores in generator.uniform(size=(5, sum(sizes)))
    ]
    assert shifts == pytest.approx([4.0] * 5, abs=ROUNDING)


def test_softmax_is_averaged_or_summed():
    assert Objective("published", loss_weight=5.0).softmax_weight(10) == 0.5
    assert Objective("paper", loss_weight=5.0).softmax_weight(10) == 5.0


@pytest.mark.parametrize("sizes", [(6,), (3, 5), (4, 1, 6)])
@pytest.mark.parametrize("name", ["paper", "published"])
def test_by_definition_it_is_what_the_rows_allow(name, sizes):
    generator = np.random.default_rng(0)
    scores, losses = generator.uniform(size=sum(sizes)), generator.uniform(size=4)
    objective = Objective(name, loss_weight=3.0, rescale=1.5)
    expected = sparsity(objective, sizes, scores) + objective.softmax_weight(4) * losses.sum()
    assert objective.compute(sizes, scores, losses) == pytest.approx(expected, abs=ROUNDING)


def test_under_a_budget_only_the_losses_count():
    assert Budget(np.ones((1, 2)), np.ones(1)).compute((2,), np.ones(2), np.array([1.0, 2.0])) == 1.5

"""The best loss weight by the Lagrangian dual: against enumeration, a fine grid, and what every point says of it."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.lagrangian_dual import MOST_TRIALS
from tests.api.test_score import (
    MODEL,
    Interruption,
    Recursion,
    compute_objective,
    draw,
    make_mlp,
    same_bits,
    softmax_losses,
)
from tests.settings import settle
from tests.zoo import first_or_slow, share_case

ROUNDING = 1e-9
SOLVED = 1e-4
"""The gap tolerance."""

FOUND = 3e-4
"""How close the dual comes to its maximum: the gap, relative to a sparsity of at most 2."""

ROUNDED = 1e-5
"""What rounding the scores may change the objective by."""

QUICK = {"threads": 1, "time_limit": 60.0}


def search(model, inputs, labels=None, *, increase=0.001, **settings):
    return cn.score(model, inputs, labels, **settle(loss_weight=cn.Lagrangian(increase), **QUICK, **settings))


def find_sparsity(layers):
    """Of the balanced objective."""
    means = [layer.mean() - 2.0 for layer in layers]
    return sum(means) - min(means) if len(means) > 1 else means[0]


def predict(case):
    return case.network.forward(case.inputs).argmax(axis=1)


class Masks:
    """Sparsity and mean loss of every mask of a tiny network: the exact program with binary scores, written out."""

    def __init__(self, case, labels):
        masks = [np.array(mask) for mask in product([0.0, 1.0], repeat=case.network.unit_count)]
        logits = [case.network.evaluate(case.inputs, mask)[-1] for mask in masks]
        self.loss = np.array([softmax_losses(each, labels).mean() for each in logits])
        self.sparsity = np.array(
            [find_sparsity(np.split(mask, np.cumsum(case.network.group_sizes)[:-1])) for mask in masks]
        )
        self.unpruned_loss = self.loss[-1]

    def dual(self, loss_weight, level):
        return (self.sparsity + loss_weight * (self.loss - level)).min()

    def maximum(self, level):
        """Of the dual: at one of the weights where two lines cross, or at 0."""
        rises = self.loss[:, None] - self.loss[None]
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = (self.sparsity[None] - self.sparsity[:, None]) / rises
        crossings = np.unique(weights[np.isfinite(weights) & (weights > 0)].round(12))
        return max((self.dual(weight, level), weight) for weight in [0.0, *crossings])


@pytest.mark.parametrize("increase", first_or_slow(0.1, 0.0, 0.01, 0.3))
@pytest.mark.parametrize("name", first_or_slow("mlp", "mlp without biases", "mlp of one hidden layer"))
def test_with_binary_scores_it_is_that_of_enumeration(name, increase):
    case = share_case(name)
    labels = predict(case)
    masks = Masks(case, labels)
    level = masks.unpruned_loss + increase
    highest, weight = masks.maximum(level)
    scores = search(case.model, case.inputs, labels, increase=increase, formulation="exact", binary=True)
    dual = scores.dual
    assert dual.level == pytest.approx(level, abs=ROUNDING)
    assert dual.bound == pytest.approx(highest, abs=FOUND)
    assert dual.bound <= highest + ROUNDING
    assert masks.dual(dual.loss_weight, level) >= highest - FOUND
    if dual.loss_weight:
        assert dual.loss_weight == pytest.approx(weight, rel=0.01)
    feasible = masks.sparsity[masks.loss <= level + ROUNDING]
    assert dual.bound <= feasible.min() + ROUNDING
    assert dual.softmax <= level + ROUNDING
    assert dual.sparsity >= feasible.min() - ROUNDING
    assert scores.status is cn.Status.OPTIMAL


NETWORKS = {
    "points": (make_mlp(4, 8, 6, 3, seed=1), draw(5, 4, 1)[0], {}),
    "three hidden layers": (make_mlp(3, 5, 4, 4, 3, seed=2), draw(4, 3, 2)[0], {}),
    "relaxed gates": (MODEL, draw(5, 4)[0], {"input_radius": 0.05, "integer": False}),
    "whole gates": (make_mlp(4, 8, 6, 3, seed=3), draw(4, 4, 3)[0], {"input_radius": 0.02}),
}


@pytest.mark.parametrize("name", first_or_slow(*NETWORKS))
def test_against_a_fine_grid(name):
    model, inputs, settings = NETWORKS[name]
    scores = search(model, inputs, **settings)
    dual = scores.dual
    assert dual.loss_weight > 0
    weights = dual.loss_weight * np.array([0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0])
    found = [
        cn.score(model, inputs, **settle(loss_weight=weight, gap=1e-6, **QUICK, **settings)) for weight in weights
    ]
    duals = np.array([scores.bound for scores in found]) - weights * dual.level
    assert dual.bound >= duals.max() - FOUND
    assert weights[duals.argmax()] == pytest.approx(dual.loss_weight, rel=0.11)
    slopes = np.diff(duals) / np.diff(weights)
    assert all(later <= earlier + SOLVED for earlier, later in pairwise(slopes))  # concave
    sparsities = np.array([find_sparsity(scores.values()) for scores in found])
    losses = (np.array([scores.objective for scores in found]) - sparsities) / weights
    for trial in dual.trials:  # the line of every point lies above the dual everywhere
        assert np.all(trial.value <= sparsities + trial.loss_weight * (losses - dual.level) + ROUNDED)
    within = losses <= dual.level
    assert within.any()
    assert dual.bound <= sparsities[within].min() + ROUNDED


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        *(("points", "paper"), ("relaxed gates", "balanced")),
        *(pytest.param(name, "paper", marks=pytest.mark.slow) for name in ("three hidden layers", "relaxed gates")),
        *(pytest.param(name, "balanced", marks=pytest.mark.slow) for name in ("points", "three hidden layers")),
    ],
)
def test_without_whole_columns_there_is_no_duality_gap(name, objective):
    model, inputs, settings = NETWORKS[name]
    scores = search(model, inputs, objective=objective, **settings)
    assert scores.status is cn.Status.OPTIMAL
    assert scores.dual.gap <= SOLVED
    assert scores.dual.bound <= scores.dual.sparsity


@pytest.mark.parametrize("objective", ["balanced", "paper"])
def test_the_scores_keep_to_the_loss(objective):
    model, inputs, _ = NETWORKS["points"]
    with torch.no_grad():
        labels = model(inputs).argmax(dim=1).numpy()
    scores = search(model, inputs, objective=objective, increase=0.01)
    recursion = Recursion(model, inputs)

    def loss(values):
        """The softmax term alone."""
        logits = recursion.run(values)[1]
        one, two = (
            compute_objective(values, logits, labels, objective=objective, loss_weight=weight) for weight in (1, 2)
        )
        return two - one

    values = list(scores.values())
    ones = [np.ones(size) for size in recursion.sizes]
    allowed = loss(ones) + 0.01 * (len(labels) if objective == "paper" else 1)
    assert scores.dual.level == pytest.approx(allowed, rel=ROUNDING)
    assert loss(values) <= allowed + ROUNDED
    assert loss(values) == pytest.approx(scores.dual.softmax, abs=ROUNDED)
    logits = recursion.run(values)[1]
    weight = scores.dual.loss_weight
    expected = compute_objective(values, logits, labels, objective=objective, loss_weight=weight)
    assert scores.objective == pytest.approx(expected, rel=ROUNDING)


def test_more_loss_takes_less_weight_and_less_sparsity():
    found = [search(*NETWORKS["points"][:2], increase=increase).dual for increase in (0.0, 0.02, 0.1)]
    for less, more in pairwise(found):
        assert more.loss_weight < less.loss_weight
        assert more.bound < less.bound
        assert more.sparsity < less.sparsity


def test_a_level_that_costs_nothing():
    scores = search(*NETWORKS["points"][:2], increase=100.0)
    free = cn.score(*NETWORKS["points"][:2], **settle(loss_weight=0.0, **QUICK))
    assert scores.dual.loss_weight == 0
    assert len(scores.dual.trials) == 1
    assert scores.objective == pytest.approx(free.objective, abs=SOLVED)


def test_what_is_recorded(tmp_path):
    seen = []
    scores = search(*NETWORKS["points"][:2], progress=seen.append)
    dual = scores.dual
    assert scores.settings["formulation"].loss_weight == cn.Lagrangian(0.001)
    assert 2 < len(dual.trials) <= MOST_TRIALS
    assert dual.trials[0].loss_weight == 0
    assert dual.bound == max(trial.value for trial in dual.trials)
    assert dual.loss_weight in [trial.loss_weight for trial in dual.trials]
    assert [step.number for step in seen] == sorted(step.number for step in seen)
    assert {step.loss_weight for step in seen} == {trial.loss_weight for trial in dual.trials}
    assert str(seen[0]).startswith("program 1, loss weight 0: ")
    scores.save(tmp_path / "scores.json")
    assert cn.Scores.load(tmp_path / "scores.json").dual == dual
    assert same_bits(search(*NETWORKS["points"][:2]), scores)


def test_every_class_has_a_weight_of_its_own():
    model, inputs, _ = NETWORKS["points"]
    labels = [0, 1, 0, 1, 0]
    seen = []
    scores = search(model, inputs, labels, by_class=True, progress=seen.append)
    alone = search(model, inputs[1::2], labels[1::2])
    assert scores.dual is None
    assert same_bits(scores.parts[1], alone)
    assert scores.parts[1].dual == alone.dual
    assert scores.parts[0].dual != alone.dual
    assert all("class" in str(step) for step in seen)
    again = search(model, inputs, labels, by_class=True, earlier=scores)
    assert [part.seconds for part in again.parts] == [part.seconds for part in scores.parts]


@pytest.mark.parametrize("solver", first_or_slow("highs", "barrier"))
def test_solvers_agree(solver):
    model, inputs, settings = NETWORKS["relaxed gates"]
    expected, found = (search(model, inputs, solver=name, **settings).dual for name in ("auto", solver))
    assert found.bound == pytest.approx(expected.bound, abs=FOUND)
    assert found.sparsity == pytest.approx(expected.sparsity, abs=FOUND)


@pytest.mark.parametrize("at", first_or_slow(5, 1, 20))
def test_an_interrupt_returns_the_best_so_far(at):
    model, inputs, _ = NETWORKS["points"]
    whole = search(model, inputs)
    scores = search(model, inputs, progress=Interruption(at))
    assert "interrupted" in scores.notes
    assert 1 <= len(scores.dual.trials) < len(whole.dual.trials)
    assert scores.dual.softmax <= scores.dual.level + ROUNDING
    assert scores.dual.bound <= whole.dual.sparsity + ROUNDING
    assert scores.bound <= scores.objective


def test_a_time_limit_returns_the_best_so_far():
    scores = cn.score(
        make_mlp(6, 24, 24, 3),
        draw(8, 6)[0],
        formulation=cn.Paper(loss_weight=cn.Lagrangian(0.01), input_radius=0.1),
        solver=cn.Solver(gap=1e-6, threads=1, time_limit=1.0),
    )
    assert scores.status is cn.Status.FEASIBLE
    assert scores.dual.softmax <= scores.dual.level + ROUNDING
    assert scores.dual.bound < scores.dual.sparsity


def test_the_linearised_program_certifies_nothing():
    scores = search(*NETWORKS["points"][:2], formulation="linearised")
    assert scores.bound is None
    assert scores.dual.gap <= SOLVED


def test_a_plan_cannot_be_judged_at_a_weight_that_is_searched_for():
    plan = cn.plan(cn.score(MODEL, draw(5, 4)[0], **settle(**QUICK)), units=0.5)
    with pytest.raises(InvalidSettingError, match="incumbent: judged at one loss weight"):
        search(MODEL, draw(5, 4)[0], formulation="exact", binary=True, incumbent=plan)

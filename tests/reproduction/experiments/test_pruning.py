"""Removing: counts and accuracies of finished cells, done again by hand."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.core.batch import digest_rows
from critical_neurons.removal.metrics import predict
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.experiments.cells import (
    RANDOM_DRAWS,
    STEPS,
    find_recipe,
    list_cells,
    select_cells,
)
from critical_neurons_reproduction.experiments.pruning import (
    choose_thresholds,
    draw,
    run_comparison,
    score_reference,
)
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.score_settings import read_score_settings
from critical_neurons_reproduction.training import train
from tests.blocks import CLASSES
from tests.zoo import first_or_slow

ROUNDING = 1e-12
"""Shares, from whole numbers in another order."""

SCORE_TOLERANCE = 2e-6
"""Scores are rounded to six decimals."""

LENET5 = {"0": (6, 75), "3": (16, 150), "6": (120, 400), "9": (84, 120)}
"""Units and incoming weights of each, by layer."""

LENET5_PARAMETERS = 62_006


def accuracy_of(model, part):
    with torch.no_grad():
        return share_correct(model.eval()(part.inputs), part)


def share_correct(logits, part):
    return (logits.argmax(1) == part.labels).double().mean().item()


def keep_by_hand(scores, threshold):
    """What scores below the threshold, or that of its layer, goes, but one unit of every layer stays."""
    by_layer = threshold if isinstance(threshold, dict) else dict.fromkeys(scores, threshold)
    return {
        name: np.flatnonzero(values >= by_layer[name])
        if values.max() >= by_layer[name]
        else np.array([values.argmax()])
        for name, values in scores.items()
    }


def mask_fc3(model, kept, part):
    """The accuracy of FC-3 with all but some units of its hidden layers switched off, written out."""
    values = part.inputs.flatten(1)
    with torch.no_grad():
        for name in ("1", "3"):
            layer = model.get_submodule(name)
            stays = torch.zeros(layer.out_features)
            stays[kept[name]] = 1
            values = functional.relu(layer(values)) * stays
        return share_correct(model[5](values), part)


class TestRemoval:
    def test_networks_have_learned_something_but_not_all(self, removal):
        """Else accuracies could not tell one network from another."""
        record, *_ = removal
        assert 1.5 / CLASSES < record.result["reference"] < 1

    def test_counts_by_hand(self, removal):
        record, _, _, scores = removal
        (found,) = record.result["removals"]
        assert {name: len(values) for name, values in scores.items()} == {k: n for k, (n, _) in LENET5.items()}
        kept = {name: len(units) for name, units in keep_by_hand(scores, found["threshold"]).items()}
        removed = sum((n - kept[name]) * incoming for name, (n, incoming) in LENET5.items())
        first, second, third, fourth = kept.values()
        left = first * 76 + second * (25 * first + 1) + third * (25 * second + 1)
        left += fourth * (third + 1) + 10 * (fourth + 1)
        assert removed > 0
        assert found["units"] == pytest.approx(1 - sum(kept.values()) / (6 + 16 + 120 + 84), abs=ROUNDING)
        assert found["as_published"] == pytest.approx(removed / LENET5_PARAMETERS, abs=ROUNDING)
        assert found["parameters"] == pytest.approx(1 - left / LENET5_PARAMETERS, abs=ROUNDING)

    def test_accuracies_by_hand(self, removal):
        record, model, data, scores = removal
        (found,) = record.result["removals"]
        assert record.result["reference"] == accuracy_of(model, data.test)
        plan = cn.plan(scores, threshold=found["threshold"])
        assert found["accuracy"] == accuracy_of(cn.mask(model, plan), data.test)
        zeroed = {name: values.clone() for name, values in model.state_dict().items()}
        for name, kept in keep_by_hand(scores, found["threshold"]).items():
            weight = zeroed[f"{name}.weight"]
            weight[np.setdiff1d(np.arange(len(weight)), kept)] = 0
        logits = torch.func.functional_call(model, zeroed, (data.test.inputs,))
        assert found["biases_left"] == share_correct(logits, data.test)

    def test_only_validation_images_are_scored_on(self, removal):
        _, _, data, scores = removal
        validation, training, test = (
            set(digest_rows(part.inputs.numpy())) for part in (data.validation, data.training, data.test)
        )
        seen = set(scores.inputs)
        assert seen <= validation
        assert not seen & (training | test)

    def test_solver_and_scores_are_reported(self, removal):
        record, _, _, scores = removal
        solver = record.result["solver"]
        assert solver["status"] == "optimal"
        assert solver["gap"] <= 1e-4
        assert solver["scores"].keys() == LENET5.keys()
        for name, (least, mean, most) in solver["scores"].items():
            assert (least, most) == (scores[name].min(), scores[name].max())
            assert mean == pytest.approx(scores[name].mean(), abs=ROUNDING)

    @pytest.mark.slow
    def test_every_threshold_is_measured(self, finish):
        removals = finish("table-1-appendix", "fashion/idp").result["removals"]
        assert [each["threshold"] for each in removals] == [0.1, 0.01]
        assert removals[0]["units"] >= removals[1]["units"]


@pytest.fixture(scope="module", params=first_or_slow("fashion/sim", "mnist/imidp"))
def removal(finish, runs, request):
    """A finished cell, and its network, data and scores once more."""
    record = finish("table-1", request.param)
    return record, *score_reference(record.cell.settings, runs)


class TestImages:
    @pytest.mark.slow
    def test_class_by_class_is_a_program_for_each_averaged(self, finish, runs):
        sim, idp = (
            finish("table-1", "fashion/sim").cell.settings,
            finish("table-1-appendix", "fashion/idp").cell.settings,
        )
        model, data, together = score_reference(sim, runs)
        batch = draw(idp, data, model)
        assert batch.labels.tolist() == list(range(CLASSES))
        assert torch.equal(draw(sim, data, model).inputs, batch.inputs)
        _, _, apart = score_reference(idp, runs)
        score = partial(cn.score, model, **read_score_settings({**idp["score"], "by_class": False}))
        singles = [score(batch.inputs[[label]], batch.labels[[label]]) for label in range(CLASSES)]
        for name, values in apart.items():
            mean = np.mean([single[name] for single in singles], axis=0)
            np.testing.assert_allclose(values, mean, rtol=0, atol=SCORE_TOLERANCE)
        assert any(np.abs(apart[name] - together[name]).max() > 0.1 for name in together)

    def test_imbalanced_batches_have_several_images_of_some_classes(self, find, runs):
        (cell,) = find("table-1", "mnist/imidp")
        model, data = runs.train_reference("lenet5", "mnist", 0), runs.load("mnist")
        drawn = [draw({**cell.settings, "seed": seed}, data, model).labels.bincount() for seed in range(5)]
        counts = torch.cat(drawn)
        assert 1 <= counts.min() < counts.max() <= cell.settings["batch"]["per_class"]

    def test_batches_of_the_figure_have_their_own_seeds(self, find, runs):
        """25 batches for one network, the same ones for the next; elsewhere a network's seed is its batch's."""
        model, data = runs.train_reference("lenet5", "fashion", 0), runs.load("fashion")
        first, second = (
            draw(cell.settings, data, model)
            for cell in find("batches", "fashion/lenet5/batch-00", "fashion/lenet5/batch-01")
        )
        (other,) = find("batches", "fashion/lenet5/batch-01", seed=1)
        assert first.digest != second.digest == draw(other.settings, data, model).digest
        mine, others = (draw(find("lambda", "lambda-1", seed=seed)[0].settings, data, model) for seed in (0, 1))
        assert mine.digest != others.digest

    def test_correct_ones_only(self, runs):
        (cell,) = select_cells(list_cells("table-2", seeds=[0], schedule=runs.schedule), ["mnist/fc3"])
        model, data = runs.train_reference("fc3", "mnist", 0), runs.load("mnist")
        assert accuracy_of(model, data.validation) < 1
        assert all(accuracy_of(model, draw({**cell.settings, "seed": seed}, data, model)) == 1 for seed in range(10))


class Flattered(Runs):
    """FC-3 is right about all test images: their labels are what it says. All else stays."""

    def load(self, data):
        whole, model = super().load(data), Runs(**vars(self)).train_reference("fc3", data, 0)
        return Dataset(
            whole.training, whole.validation, LabelledImages(whole.test.inputs, predict(model, whole.test.inputs))
        )


class TestComparison:
    def test_the_papers_threshold_and_those_chosen_on_validation(self, comparison):
        record, model, data, scores = comparison
        assert [each["rule"] for each in record.result["removals"]] == ["paper", "validation"]
        expected = [0.1, choose_by_hand(model, scores, data.validation, **record.cell.settings["goal"])]
        assert [each["threshold"] for each in record.result["removals"]] == expected

    @pytest.mark.parametrize("rule", [0, 1])
    def test_as_many_other_units(self, comparison, rule):
        record, model, data, scores = comparison
        found = record.result["removals"][rule]
        kept = keep_by_hand(scores, found["threshold"])

        def keep_most(preference):
            """The first of those that are preferred alike."""
            ranked = {name: np.argsort(-np.asarray(values), kind="stable") for name, values in preference.items()}
            return mask_fc3(model, {name: units[: len(kept[name])] for name, units in ranked.items()}, data.test)

        weights = {name: model.get_submodule(name).weight.detach().double() for name in kept}
        assert found["accuracy"] == mask_fc3(model, kept, data.test)
        assert found["critical"] == keep_most({name: -values for name, values in scores.items()})
        assert found["L1"] == keep_most({name: weight.abs().sum(1) for name, weight in weights.items()})
        assert found["L2"] == keep_most({name: weight.square().sum(1) for name, weight in weights.items()})
        plan = cn.plan(scores, threshold=found["threshold"])
        draws = [plan.random(seed=seed).kept for seed in range(RANDOM_DRAWS)]
        assert found["random"] == [mask_fc3(model, each, data.test) for each in draws]

    @pytest.mark.slow
    def test_an_epoch_of_fine_tuning(self, comparison, tmp_path):
        record, model, data, scores = comparison
        for found in record.result["removals"]:
            smaller = cn.prune(model, cn.plan(scores, threshold=found["threshold"]), data.test.inputs[:1])
            recipe = find_recipe("fc3", "mnist").shortened(1)
            tuned = train(smaller, data, recipe, seed=0, folder=tmp_path / found["rule"]).model
            assert found["fine_tuned"] == accuracy_of(tuned, data.test)

    @pytest.mark.slow
    def test_test_images_decide_nothing(self, comparison, runs):
        """Others change what is measured, but neither scores nor thresholds."""
        record, model, data, scores = comparison
        flattered = Flattered(**vars(runs))
        other = run_comparison(record.cell, flattered)
        assert other["reference"] == 1
        assert other["solver"]["scores"] == record.result["solver"]["scores"]
        for mine, theirs in zip(record.result["removals"], other["removals"], strict=True):
            for name in ("threshold", "units", "as_published", "parameters"):
                assert mine[name] == theirs[name]
        goals = [{**record.cell.settings["goal"], "accuracy": least} for least in (0.9, 0.85, 0.82)]
        by_validation, by_test = (
            [choose_thresholds(model, scores, part, **goal) for goal in goals]
            for part in (data.validation, flattered.load("mnist").test)
        )
        assert by_validation != by_test


@pytest.fixture(scope="module")
def comparison(finish, runs):
    record = finish("table-2", "mnist/fc3")
    return record, *score_reference(record.cell.settings, runs)


def measure_by_hand(model, scores, thresholds, part):
    """The share of the parameters removed, as published, and accuracy."""
    kept = keep_by_hand(scores, thresholds)
    incoming = {name: model.get_submodule(name).in_features for name in scores}
    removed = sum((len(scores[name]) - len(units)) * incoming[name] for name, units in kept.items())
    return removed / sum(parameter.numel() for parameter in model.parameters()), mask_fc3(model, kept, part)


def choose_by_hand(model, scores, validation, *, share, accuracy, steps):
    """From the scores at the steps one by one, with no regard to what they remove: one that removes nothing costs
    nothing."""
    thresholds, removed, before = dict.fromkeys(scores, 0.0), 0.0, accuracy_of(model, validation)
    while True:
        ways = {}
        for name, values in scores.items():
            for place in range(1, steps):
                level = sorted(values)[place * len(values) // steps]
                reached, left = measure_by_hand(model, scores, {**thresholds, name: level}, validation)
                if level > thresholds[name] and reached > removed:
                    ways[name] = level, reached, left
                    break
        if removed >= share:
            ways = {name: way for name, way in ways.items() if way[2] >= accuracy}
        if not ways:
            return thresholds
        name = min(ways, key=lambda each: (before - ways[each][2]) / (ways[each][1] - removed))
        thresholds[name], removed, before = ways[name]


@pytest.mark.parametrize(
    ("share", "left"),
    [
        *((0, 0.8), (0.6, 1)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 0), (0.3, 0.9), (1, 0))),
    ],
)
def test_thresholds_are_chosen_layer_by_layer(comparison, share, left):
    """By scores in steps of a tenth that know a little of what counts: accuracy falls, but not steadily."""
    _, model, data, scores = comparison
    generator = np.random.default_rng(3)
    values = {name: np.round(0.4 * each + 0.6 * generator.random(len(each)), 1) for name, each in scores.items()}
    drawn = replace(scores, values_by_layer=values)
    goal = {"share": share, "accuracy": left * accuracy_of(model, data.validation), "steps": STEPS}
    found = choose_thresholds(model, drawn, data.validation, **goal)
    assert found == choose_by_hand(model, drawn, data.validation, **goal)
    removed, accuracy = measure_by_hand(model, drawn, found, data.validation)
    assert removed >= min(share, 0.85)
    assert share > 0.5 or accuracy >= goal["accuracy"]
    assert removed > 0

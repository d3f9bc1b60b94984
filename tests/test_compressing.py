"""The whole way in one call: shares met, drops kept to, what accuracies are called."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.batch import digest_rows
from critical_neurons.compressing import HELD_OUT_SHARE
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.experiments.demo import split_digits, train_small_network
from critical_neurons.measuring import count_macs, count_parameters, measure_accuracy


@pytest.fixture(scope="module")
def digits():
    """Inputs and labels to work with, and others for the test."""
    (inputs, labels), test = split_digits(seed=0)
    return (inputs[:600], labels[:600]), test


@pytest.fixture(scope="module")
def model(digits):
    return train_small_network(*digits[0], seed=0)


@pytest.fixture(scope="module")
def halved(model, digits):
    told, details = [], []
    found = cn.compress(
        model, *digits[0], macs=0.5, test=digits[1], onnx=False, progress=told.append, detail=details.append
    )
    return found, (told, details)


def test_the_share_is_met_and_little_is_lost(halved, model, digits):
    found, (told, details) = halved
    assert count_macs(found.model, digits[0][0]) <= 0.5 * count_macs(model, digits[0][0])
    comparison = found.comparison
    assert comparison.data == "test"
    assert comparison.images == len(digits[1][1])
    assert comparison.after.accuracy == measure_accuracy(found.model, *digits[1])
    assert comparison.after.accuracy > comparison.before.accuracy - 0.05
    assert told == ["Scoring", "Planning", "Removing and refitting", "Comparing"]
    assert "incumbent" in details[0]
    assert "4 of 4 modules refitted" in details
    assert details[-1] == "Measuring latency in torch, batch of 64"


def test_refitting_is_the_default_and_pays(halved, model, digits):
    found, _ = halved
    plain = cn.compress(model, *digits[0], macs=0.5, compensate="none", test=digits[1], onnx=False)
    assert all(np.array_equal(kept, plain.plan.kept[name]) for name, kept in found.plan.kept.items())
    assert found.comparison.after.accuracy > plain.comparison.after.accuracy


def test_the_result_can_be_saved(halved, model, tmp_path, digits):
    found, _ = halved
    cn.save(found.model, tmp_path / "smaller", plan=found.plan)
    again = cn.load(tmp_path / "smaller", lambda: model)
    with torch.no_grad():
        assert torch.equal(again(digits[1][0]), found.model(digits[1][0]))


def test_accuracy_on_what_was_used_is_called_calibration(model, digits):
    inputs, labels = digits[0]
    alone = cn.compress(model, inputs, labels, units=0.7, onnx=False)
    assert alone.comparison.data == "calibration"
    mixed = cn.compress(model, inputs, labels, params=0.7, test=(inputs[:50], labels[:50]), onnx=False)
    assert mixed.comparison.data == "calibration"
    assert count_parameters(mixed.model) <= 0.7 * count_parameters(model)


def test_max_drop_is_judged_on_what_was_held_out(model, digits):
    inputs, labels = digits[0]
    found = cn.compress(model, inputs, labels, max_drop=0.02, test=digits[1], onnx=False)
    drop = found.plan.provenance["drop"]
    assert drop["before"] - drop["after"] <= 0.02 + 1e-9
    assert len(found.scores.settings["labels"]) <= len(labels) * (1 - HELD_OUT_SHARE)
    assert count_macs(found.model, inputs) < 0.8 * count_macs(model, inputs)


def test_a_judge_of_ones_own(model, digits):
    judged = []

    def count(candidate):
        judged.append(candidate)
        return count_parameters(candidate) / 1000

    found = cn.compress(model, *digits[0], max_drop=0.99, evaluate=count, compensate="none", onnx=False)
    assert count_parameters(judged[0]) == count_parameters(model)
    assert len(judged) == 1 + found.plan.provenance["drop"]["evaluations"]
    assert count_parameters(model) - count_parameters(found.model) <= 990


def test_ctrl_c_while_the_solver_works_leaves_the_best_so_far(model, digits):
    told = []

    def interrupt(text):
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    found = cn.compress(model, *digits[0], macs=0.5, detail=interrupt, onnx=False)
    assert found.scores.status is cn.Status.FEASIBLE
    assert len(found.scores.history) == 2
    assert count_macs(found.model, digits[0][0]) <= 0.5 * count_macs(model, digits[0][0])


def test_what_a_drop_was_judged_on_is_no_test_data(model, digits):
    inputs, labels = digits[0]
    found = cn.compress(model, inputs, labels, max_drop=0.05, onnx=False)
    seen = found.model.calibrated_on
    assert len(seen) == len(set(digest_rows(inputs.numpy())))
    assert cn.compare(model, found.model, inputs[:40], labels[:40], onnx=False, repeats=1).data == "calibration"


def test_layers_that_must_stay_leave_a_drop_to_the_others(model, digits):
    found = cn.compress(model, *digits[0], max_drop=0.05, scoring={"ignore": ["0", "3"]}, onnx=False)
    assert set(found.plan.removed) == {"8"}


def test_parameters_that_refitting_adds_are_counted(digits):
    torch.manual_seed(0)
    free = torch.nn.Sequential(
        torch.nn.Flatten(),
        *(torch.nn.Linear(64, 48, bias=False), torch.nn.ReLU(), torch.nn.Linear(48, 48, bias=False), torch.nn.ReLU()),
        torch.nn.Linear(48, 10, bias=False),
    )
    found = cn.compress(free, *digits[0], params=0.5, onnx=False)
    assert found.model[3].bias is not None
    assert count_parameters(found.model) <= 0.5 * count_parameters(free)


def test_test_data_in_batches(model, digits):
    pairs = list(zip(digits[1][0].split(200), digits[1][1].split(200), strict=True))
    found = cn.compress(model, *digits[0], macs=0.6, test=pairs, onnx=False)
    assert (found.comparison.images, found.comparison.data) == (len(digits[1][1]), "test")


def test_settings_of_the_scoring(model, digits):
    found = cn.compress(
        model, *digits[0], units=0.8, scoring={"formulation": "paper", "budget": None, "loss_weight": 1.0}, onnx=False
    )
    assert found.scores.settings["formulation"] == "paper"
    assert found.scores.settings["loss_weight"] == 1.0
    assert found.plan.rule.startswith("at most 0.8 of the units kept")


def test_what_a_user_may_get_wrong(model, digits):
    inputs, labels = digits[0]
    with pytest.raises(InvalidSettingError, match="give one of units=, params=, macs= and max_drop="):
        cn.compress(model, inputs, labels)
    with pytest.raises(InvalidSettingError, match="give one of"):
        cn.compress(model, inputs, labels, macs=0.5, units=0.5)
    with pytest.raises(InvalidInputError, match="labels: none"):
        cn.compress(model, inputs, macs=0.5)
    told = []
    for settings, message in (
        ({"max_drop": 1.5}, "max_drop=1.5. Accepted: a share of accuracy"),
        ({"macs": 0.5, "compensate": "all"}, "compensate: found 'all'"),
    ):
        with pytest.raises(InvalidSettingError, match=message):
            cn.compress(model, inputs, labels, **settings, progress=told.append)
    with pytest.raises(InvalidInputError, match="calibration: found 9 inputs"):
        cn.compress(model, inputs[:9], labels[:9], macs=0.5, progress=told.append)
    assert told == []  # nothing was begun
    with pytest.raises(InvalidSettingError, match="scoring: colour is no setting of score"):
        cn.compress(model, inputs, labels, macs=0.5, scoring={"colour": 1})
    with pytest.raises(InvalidInputError, match="test: found inputs of shape"):
        cn.compress(model, inputs, labels, macs=0.5, test=(inputs[:, :, :4], labels))
    with pytest.raises(InvalidInputError, match="without labels"):
        cn.compress(model, inputs, labels, macs=0.5, test=inputs)
    with pytest.raises(InvalidInputError, match="held out to judge by"):
        cn.compress(model, inputs[:20], labels[:20], max_drop=0.1)
    with pytest.raises(InvalidSettingError, match="macs cannot fall to"):
        cn.compress(model, inputs, labels, macs=1e-6)

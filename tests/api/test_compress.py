"""The whole way in one call: shares met, drops kept to, what accuracies are called."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.api import prune as prune_module
from critical_neurons.api.calibration import HELD_OUT_SHARE
from critical_neurons.api.compress_task import PAPER
from critical_neurons.api.plan import FINE_STEPS, ROUGH_STEPS
from critical_neurons.cli.digits import split_digits, train_small_network
from critical_neurons.core.batch import digest_rows
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.removal.metrics import count_macs, count_parameters, measure_accuracy
from critical_neurons.selection import layerwise_search
from critical_neurons.selection.effort import EFFORTS
from tests.zoo import first_or_slow

QUICK = {"formulation": "linearised", "onnx": False}
"""One small program: for tests of what follows the choice of units."""


compress = partial(cn.compress, effort="quick")


@pytest.fixture(scope="module")
def digits():
    """Inputs and labels to work with, and others for the test."""
    (inputs, labels), test = split_digits(seed=0)
    return (inputs[:600], labels[:600]), test


def narrow_network():
    """`small_network` with half of its units."""
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
        *(torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.AvgPool2d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
    )


@pytest.fixture(scope="module")
def model(digits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("critical_neurons.cli.digits.small_network", narrow_network)
        return train_small_network(*digits[0], seed=0)


@pytest.fixture(scope="module")
def halved(model, digits):
    reported, details = [], []
    found = compress(
        model, *digits[0], macs=0.5, test=digits[1], onnx=False, progress=reported.append, detail=details.append
    )
    return found, (reported, details)


def test_the_share_is_met_and_little_is_lost(halved, model, digits):
    found, (reported, details) = halved
    assert count_macs(found.model, digits[0][0]) <= 0.5 * count_macs(model, digits[0][0])
    comparison = found.comparison
    assert comparison.data == "test"
    assert comparison.inputs == len(digits[1][1])
    assert comparison.after.accuracy == measure_accuracy(found.model, *digits[1])
    assert comparison.after.accuracy > comparison.before.accuracy - 0.05
    assert reported == ["Searching", "Planning", "Removing and refitting", "Comparing"]
    assert any(text.startswith("ordering units: ") for text in details)
    assert any(text.startswith("refitting: ") for text in details)
    assert details[-1] == "Measuring latency in torch, batch of 64"


def test_it_is_the_search_on_all_inputs(halved, model, digits):
    found, _ = halved
    scores = cn.search(model, digits[0][0], macs=0.5, effort="quick")
    assert np.array_equal(found.scores.per_unit, scores.per_unit)
    assert np.array_equal(found.plan.stays, cn.plan(scores).stays)
    expected = cn.prune(model, cn.plan(scores), digits[0][0], compensate="least_squares")
    with torch.no_grad():
        assert torch.equal(found.model(digits[1][0]), expected(digits[1][0]))


def test_distillation_goes_on_from_least_squares(model, digits):
    details, trained = [], cn.Distillation(steps=5)
    given = {"macs": 0.5, "compensate": trained, "seed": 3, "distance": "squares", "onnx": False}
    found = compress(model, digits[0][0], **given, detail=details.append)
    assert found.scores.compensate == "least_squares"
    expected = cn.prune(model, found.plan, digits[0][0], compensate=trained, seed=3, distance="squares")
    with torch.no_grad():
        assert torch.equal(found.model(digits[1][0]), expected(digits[1][0]))
    assert any(text.startswith("distilling: ") for text in details)


def test_a_search_needs_no_labels(halved, model, digits):
    found = compress(model, digits[0][0], macs=0.5, test=digits[1], onnx=False)
    assert np.array_equal(found.plan.stays, halved[0].plan.stays)
    assert found.comparison.data == "test"


@pytest.mark.usefixtures("short_descent")
def test_the_search_knows_what_is_refitted(model, digits):
    reported = []
    found = compress(model, *digits[0], units=0.5, compensate="none", progress=reported.append, onnx=False)
    assert (found.scores.settings["method"], found.scores.compensate) == ("gates", "none")
    assert reported == ["Searching", "Planning", "Removing", "Comparing"]
    masked = cn.mask(model, found.plan)
    with torch.no_grad():
        assert torch.allclose(found.model(digits[1][0]), masked(digits[1][0]), atol=1e-5)


@pytest.mark.slow
def test_refitting_pays(model, digits):
    refitted, plain = (
        compress(model, *digits[0], macs=0.5, **given, test=digits[1], **QUICK)
        for given in ({}, {"compensate": "none"})
    )
    assert np.array_equal(refitted.plan.stays, plain.plan.stays)
    assert refitted.comparison.after.accuracy > plain.comparison.after.accuracy


def test_the_settings_of_the_paper(model, digits):
    inputs, labels = digits[0]
    found = compress(model, inputs, labels, macs=0.5, paper=True, onnx=False)
    settings = found.scores.settings
    assert settings["formulation"] == PAPER
    assert found.scores.budget is None
    assert sorted(settings["labels"]) == list(range(10))
    digests = digest_rows(inputs.numpy())
    scored = [digests.index(each) for each in found.scores.inputs]
    assert measure_accuracy(model, inputs[scored], labels[scored]) == 1.0
    expected = cn.prune(model, cn.plan(found.scores, macs=0.5), inputs)
    with torch.no_grad():
        assert torch.equal(found.model(inputs), expected(inputs))  # nothing is refitted
    assert count_macs(found.model, inputs) <= 0.5 * count_macs(model, inputs)


def test_the_settings_of_the_paper_can_be_overridden(model, digits):
    inputs, labels = digits[0]
    wrong = (labels + 1) % 10  # no input is classified correctly: any is taken
    found = compress(
        *(model, inputs, wrong),
        units=0.5,
        paper=True,
        compensate="least_squares",
        onnx=False,
        formulation=cn.Linearised(loss_weight=2.0),
        solver=cn.Solver(gap=1e-3),
    )
    settings = found.scores.settings
    assert (settings["formulation"], settings["solver"]) == (cn.Linearised(loss_weight=2.0), cn.Solver(gap=1e-3))
    assert found.scores.budget is None
    assert sorted(settings["labels"]) == list(range(10))
    assert len(found.model.calibrated_on) == len(set(digest_rows(inputs.numpy())))


def test_the_result_can_be_saved(halved, tmp_path, digits):
    found, _ = halved
    cn.save(found.model, tmp_path / "smaller", plan=found.plan)
    again = cn.load(tmp_path / "smaller", narrow_network)
    with torch.no_grad():
        assert torch.equal(again(digits[1][0]), found.model(digits[1][0]))


@pytest.mark.slow
def test_accuracy_on_what_was_used_is_called_calibration(model, digits):
    inputs, labels = digits[0]
    alone = compress(model, inputs, labels, units=0.7, **QUICK)
    assert alone.comparison.data == "calibration"
    mixed = compress(model, inputs, labels, params=0.7, test=(inputs[:50], labels[:50]), **QUICK)
    assert mixed.comparison.data == "calibration"
    assert count_parameters(mixed.model) <= 0.7 * count_parameters(model)


def test_max_drop_is_judged_on_what_was_held_out(model, digits, monkeypatch):
    gathered, gather = [], layerwise_search.gather_moments
    monkeypatch.setattr(layerwise_search, "gather_moments", lambda *given: gathered.append(given) or gather(*given))
    inputs, labels = digits[0]
    found = compress(model, inputs, labels, max_drop=0.02, test=digits[1], onnx=False)
    drop = found.plan.provenance["drop"]
    assert drop["before"] - drop["after"] <= 0.02 + 1e-9
    assert drop["evaluations"] <= ROUGH_STEPS + 1 + FINE_STEPS
    assert len(gathered) == 1  # for all candidates
    assert len(found.scores.inputs) == len(labels) - round(len(labels) * HELD_OUT_SHARE)
    judged_on = found.plan.seen.difference(found.scores.inputs)
    assert count_macs(found.model, inputs) < 0.5 * count_macs(model, inputs)
    held_out = [at for at, digest in enumerate(digest_rows(inputs.numpy())) if digest in judged_on]
    assert measure_accuracy(found.model, inputs[held_out], labels[held_out]) == drop["after"]
    assert np.array_equal(cn.plan(found.scores).stays, found.plan.stays)


def test_a_judge_of_ones_own(model, digits):
    judged = []

    def count(candidate):
        judged.append(candidate)
        return count_parameters(candidate) / 1000

    found = compress(model, *digits[0], max_drop=0.99, evaluate=count, compensate="none", **QUICK)
    assert count_parameters(judged[0]) == count_parameters(model)
    assert len(judged) == 1 + found.plan.provenance["drop"]["evaluations"]
    assert count_parameters(model) - count_parameters(found.model) <= 990


def test_ctrl_c_while_the_solver_works_leaves_the_best_so_far(model, digits):
    reported = []

    def interrupt(text):
        reported.append(text)
        if len(reported) == 2:
            raise KeyboardInterrupt

    found = compress(model, *digits[0], macs=0.5, detail=interrupt, **QUICK)
    assert found.scores.status is cn.Status.FEASIBLE
    assert len(found.scores.history) == 2
    assert count_macs(found.model, digits[0][0]) <= 0.5 * count_macs(model, digits[0][0])


def test_ctrl_c_while_the_most_is_looked_for_leaves_the_best_so_far(model, digits):
    judged = []

    def judge(candidate):
        judged.append(count_macs(candidate, digits[0][0]))
        if len(judged) == 4:
            raise KeyboardInterrupt
        return 1.0

    found = compress(model, digits[0][0], max_drop=0.1, evaluate=judge, test=digits[1], onnx=False)
    assert "interrupted" in found.plan.rule
    assert count_macs(found.model, digits[0][0]) == min(judged[:3])


def test_what_a_drop_was_judged_on_is_no_test_data(model, digits):
    inputs, labels = digits[0]
    found = compress(model, inputs, labels, max_drop=0.05, **QUICK)
    seen = found.model.calibrated_on
    assert len(seen) == len(set(digest_rows(inputs.numpy())))
    assert cn.compare(model, found.model, inputs[:40], labels[:40], onnx=False, repeats=1).data == "calibration"


@pytest.mark.slow
def test_layers_that_must_stay_leave_a_drop_to_the_others(model, digits):
    found = compress(model, *digits[0], max_drop=0.05, ignore=["0", "3"], onnx=False)
    assert set(found.plan.removed) == {"8"}


@pytest.mark.parametrize(
    "settings",
    first_or_slow({"keep": ["0"], "min_units": 3, "round_to": 4}, {"keep": "3"}, {"min_units": 6}, {"round_to": 4}),
)
def test_shares_are_met_and_no_room_is_left_whatever_must_stay(model, digits, settings):
    found = compress(model, *digits[0], macs=0.6, **settings, onnx=False)
    widths, step = {name: len(kept) for name, kept in found.plan.kept.items()}, settings.get("round_to", 1)
    limit = 0.6 * count_macs(model, digits[0][0])
    assert count_macs(found.model, digits[0][0]) == count_small_network(widths) <= limit
    for layer in found.plan.layers[:-1]:
        if layer.name in settings.get("keep", ()):
            assert widths[layer.name] == layer.total
            continue
        assert widths[layer.name] >= settings.get("min_units", 1)
        assert widths[layer.name] % step == 0
        wider = widths | {layer.name: widths[layer.name] + step}
        assert wider[layer.name] > layer.total or count_small_network(wider) > limit


def count_small_network(widths):
    """Multiply-adds of `narrow_network`: 8x8 pixels, then 4x4."""
    first, second, third, classes = widths.values()
    return 64 * 9 * first * (1 + second) + 16 * second * third + third * classes


def test_a_span(model, digits):
    found = compress(model, *digits[0], units=0.5, start="3", stop="8", onnx=False)
    assert set(found.scores) == {"3"}
    assert (found.plan.span.start, found.plan.span.stop) == ("3", "8")
    assert found.model[3].out_channels == 8


def test_parameters_that_refitting_adds_are_counted(digits):
    torch.manual_seed(0)
    free = torch.nn.Sequential(
        torch.nn.Flatten(),
        *(torch.nn.Linear(64, 48, bias=False), torch.nn.ReLU(), torch.nn.Linear(48, 48, bias=False), torch.nn.ReLU()),
        torch.nn.Linear(48, 10, bias=False),
    )
    found = compress(free, *digits[0], params=0.5, onnx=False)
    assert found.model[3].bias is not None
    assert count_parameters(found.model) <= 0.5 * count_parameters(free)


@pytest.mark.slow
def test_test_data_in_batches(model, digits):
    pairs = list(zip(digits[1][0].split(200), digits[1][1].split(200), strict=True))
    found = compress(model, *digits[0], macs=0.6, test=pairs, **QUICK)
    assert (found.comparison.inputs, found.comparison.data) == (len(digits[1][1]), "test")


def test_a_program_is_under_the_budget_asked_for(model, digits):
    found = compress(model, *digits[0], units=0.8, seed=3, **QUICK)
    settings = found.scores.settings
    assert (settings["formulation"], found.scores.budget) == (cn.Linearised(), cn.Budget(units=0.8))
    assert settings["solver"] == cn.Solver(seed=3)
    assert found.plan.rule.startswith("at most 0.8 of the units kept")


@pytest.mark.parametrize(
    ("settings", "distilled"),
    [({"effort": "thorough"}, True), ({"effort": "thorough", "compensate": "least_squares"}, False), ({}, False)],
)
def test_what_is_thorough_is_distilled(model, digits, monkeypatch, settings, distilled):
    calls = []
    monkeypatch.setitem(EFFORTS, "thorough", EFFORTS["quick"])
    monkeypatch.setattr(
        prune_module, "distil", lambda original, smaller, *rest, **options: calls.append(1) or smaller
    )
    compress(model, digits[0][0][:100], macs=0.5, onnx=False, **settings)
    assert bool(calls) is distilled


def test_what_a_user_may_get_wrong(model, digits):
    inputs, labels = digits[0]
    with pytest.raises(InvalidSettingError, match="give one of units=, params=, macs=, latency= and max_drop="):
        compress(model, inputs, labels)
    with pytest.raises(InvalidSettingError, match="give one of"):
        compress(model, inputs, labels, macs=0.5, units=0.5)
    for settings in (
        {"macs": 0.5, "test": digits[1], "paper": True},
        {"macs": 0.5, "test": digits[1], "formulation": "linearised"},
        {"max_drop": 0.1, "test": digits[1]},
    ):
        with pytest.raises(InvalidInputError, match="labels: none"):
            compress(model, inputs, **settings)
    reported = []
    for settings, message in (
        ({"max_drop": 1.5}, "max_drop=1.5. Accepted: a share of accuracy"),
        ({"macs": 0.5, "compensate": "all"}, "compensate: found 'all'"),
        ({"macs": 0.5, "keep": "conv"}, "keep: no layer conv"),
        ({"macs": 0.5, "round_to": 0}, "round_to=0"),
        ({"macs": 1.5}, "macs: found 1.5. Accepted: a share"),
        ({"macs": 0.5, "solver": "highs"}, "solver: only for a program, but units are chosen by a search"),
        ({"macs": 0.5, "formulation": "milp"}, "formulation: found 'milp'"),
        ({"macs": 0.5, "formulation": cn.Paper(rescale=0.0)}, "budget: it takes the place .* leave out rescale"),
        ({"macs": 0.5, "formulation": "exact", "stop": "0"}, "stop: the exact formulation"),
    ):
        with pytest.raises(InvalidSettingError, match=message):
            compress(model, inputs, labels, **settings, progress=reported.append)
    with pytest.raises(InvalidInputError, match="calibration: found 7 inputs"):
        compress(model, inputs[:7], labels[:7], macs=0.5, progress=reported.append)
    with pytest.raises(InvalidInputError, match=r"calibration: found 8 inputs\. Give 9 or more"):
        compress(model, inputs[:8], labels[:8], macs=0.5, compensate="distil", progress=reported.append)
    for given, settings in (
        ((inputs, labels + 10), {"macs": 0.5}),
        ((inputs, labels + 10), {"max_drop": 0.1}),
        ((inputs, labels), {"macs": 0.5, "test": (inputs, labels + 10)}),
    ):
        with pytest.raises(InvalidInputError, match="Accepted: 0 to 9, one for each of the network's 10 outputs"):
            compress(model, *given, **settings, progress=reported.append)
    assert reported == []  # nothing was begun
    with pytest.raises(InvalidInputError, match="test: found inputs of shape"):
        compress(model, inputs, labels, macs=0.5, test=(inputs[:, :, :4], labels))
    with pytest.raises(InvalidInputError, match="held out to judge by"):
        compress(model, inputs[:20], labels[:20], max_drop=0.1)
    with pytest.raises(InvalidSettingError, match="macs cannot fall to"):
        compress(model, inputs, labels, macs=1e-6, **QUICK)
    with pytest.raises(InvalidSettingError, match="the budget cannot be met"):
        compress(model, inputs, labels, macs=1e-6)


class TwoHeads(nn.Module):
    """Gives a tuple, or a dict."""

    def __init__(self, named):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 12), nn.Linear(12, 2), nn.Linear(12, 1)
        self.named = named

    def forward(self, x):
        y = self.body(x).relu()
        return {"left": self.left(y), "right": self.right(y)} if self.named else (self.left(y), self.right(y))


@pytest.mark.parametrize("compensate", ["least_squares", "none"])
@pytest.mark.parametrize("named", [False, True])
def test_a_distance_of_the_users_own_decides_what_stays(named, compensate):
    """Only one of two outputs counts: the units that it reads stay."""
    torch.manual_seed(0)
    model, right = TwoHeads(named), "right" if named else 1
    with torch.no_grad():
        model.right.weight[:, :6], model.left.weight[:, 6:] = 0, 0

    def compare_right(found, wanted):
        return (found[right] - wanted[right]).square().sum(1)

    inputs = torch.randn(64, 4)
    found = cn.compress(
        model, inputs, units=0.5, distance=compare_right, compensate=compensate, effort="quick", onnx=False
    )
    assert found.plan.kept["body"].tolist() == [6, 7, 8, 9, 10, 11]
    assert found.scores.objective == pytest.approx(0, abs=1e-9)
    assert "distance=compare_right" in found.call

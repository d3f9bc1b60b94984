"""The most that can go: bisection over plans, judged by a function of the smaller network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.api.plan import DROP_STEPS
from critical_neurons.errors import InvalidSettingError
from critical_neurons.removal.metrics import count_macs, count_parameters

INPUTS = torch.from_numpy(np.random.default_rng(0).standard_normal((32, 6)))

LARGEST_UNIT = 0.043
"""The share of the multiply-adds that goes with one unit, at most: (40 + 3) / 1000 and less."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3)).double()


@pytest.fixture(scope="module")
def scores(model):
    return cn.score(model, INPUTS[:4], formulation="linearised", budget=cn.Budget(macs=0.5))


def share_left(model):
    """A judge that knows how much is left: the answer of the search is then known too."""

    def judge(candidate):
        return count_macs(candidate, INPUTS) / count_macs(model, INPUTS)

    return judge


@pytest.mark.parametrize("max_drop", [0.1, 0.5, 0.8])
def test_the_search_finds_the_smallest_share_that_is_good_enough(model, scores, max_drop):
    plan = cn.plan(scores, max_drop=max_drop, model=model, evaluate=share_left(model), calibration=INPUTS)
    left = share_left(model)(cn.prune(model, plan, INPUTS))
    assert 1 - left <= max_drop + 1e-9
    assert left <= 1 - max_drop + 2.0**-DROP_STEPS + LARGEST_UNIT
    assert plan.provenance["drop"]["evaluations"] <= DROP_STEPS
    assert plan.rule.startswith(f"at most {max_drop} lost")


def test_what_is_judged_is_what_prune_gives(model, scores):
    judged = []

    def judge(candidate):
        judged.append(candidate)
        return 1.0

    plan = cn.plan(
        scores,
        max_drop=0.0,
        model=model,
        evaluate=judge,
        calibration=INPUTS,
        compensate="least_squares",
        measure="units",
    )
    smaller = cn.prune(model, plan, INPUTS, compensate="least_squares")
    assert torch.equal(judged[0](INPUTS), model(INPUTS))
    assert torch.equal(judged[-1](INPUTS), smaller(INPUTS))
    assert count_parameters(smaller) < 0.1 * count_parameters(model)  # nothing was held against it


def test_no_inputs_are_needed_where_nothing_is_refitted(model, scores):
    options = {"model": model, "evaluate": share_left(model), "max_drop": 0.5}
    plan = cn.plan(scores, **options)
    for inputs in ({"example": INPUTS}, {"calibration": INPUTS}):
        assert cn.plan(scores, **options, **inputs).to_dict() == plan.to_dict()
    with pytest.raises(InvalidSettingError, match="compensate='bias' needs calibration="):
        cn.plan(scores, **options, compensate="bias")


def test_model_and_example_may_always_be_given(model, scores):
    assert cn.plan(scores, macs=0.5, model=model, example=INPUTS).to_dict() == cn.plan(scores, macs=0.5).to_dict()


def test_nothing_can_go(model, scores):
    whole = count_parameters(model)

    def judge(candidate):
        return float(count_parameters(candidate) == whole)

    plan = cn.plan(scores, max_drop=0.5, model=model, evaluate=judge, calibration=INPUTS)
    assert not plan.removed
    assert plan.provenance["drop"]["after"] == 1.0


def test_rounding_does_not_take_what_was_not_judged():
    torch.manual_seed(0)
    odd = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    scores = cn.score(odd, INPUTS[:4], formulation="linearised", budget=cn.Budget(macs=0.5))

    def judge(candidate):
        return float(count_parameters(candidate) == count_parameters(odd))

    plan = cn.plan(scores, max_drop=0.0, model=odd, evaluate=judge, round_to=8)
    assert not plan.removed


def test_the_model_is_judged_in_evaluation_mode_and_left_alone(scores):
    torch.manual_seed(0)
    live = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().train()
    before = {name: values.clone() for name, values in live.state_dict().items()}

    def judge(candidate):
        assert not candidate.training
        return candidate(INPUTS).mean().item()

    found = cn.score(live, INPUTS[:4], formulation="linearised", budget=cn.Budget(macs=0.5))
    cn.plan(found, max_drop=0.5, model=live, evaluate=judge, compensate="bias", calibration=iter(INPUTS.split(8)))
    assert live.training
    assert all(torch.equal(values, before[name]) for name, values in live.state_dict().items())


def test_the_other_settings_count(model, scores):
    def judge(candidate):
        return 1.0

    plan = cn.plan(scores, max_drop=0.1, model=model, evaluate=judge, calibration=INPUTS, keep="0", min_units=3)
    assert len(plan.kept["0"]) == 40
    assert len(plan.kept["2"]) >= 3


def test_ctrl_c_leaves_the_best_so_far(model, scores):
    calls = []

    def judge(candidate):
        calls.append(candidate)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 1.0

    plan = cn.plan(scores, max_drop=0.1, model=model, evaluate=judge, calibration=INPUTS)
    assert "interrupted" in plan.rule
    assert plan.provenance["drop"]["evaluations"] == 2
    assert plan.removed


def test_progress_is_reported(model, scores):
    reported = []
    cn.plan(
        scores, max_drop=0.3, model=model, evaluate=share_left(model), calibration=INPUTS, progress=reported.append
    )
    assert 1 <= len(reported) <= DROP_STEPS
    assert all("of the macs kept" in text for text in reported)


def test_a_judge_that_fails(model, scores):
    def raises(candidate):
        raise ValueError("no data")

    with pytest.raises(
        InvalidSettingError, match=r"evaluate: raised ValueError: no data \(network: nothing removed\)"
    ):
        cn.plan(scores, max_drop=0.1, model=model, evaluate=raises, calibration=INPUTS)

    def breaks(candidate):
        return 1.0 if count_parameters(candidate) == count_parameters(model) else float("nan")

    with pytest.raises(InvalidSettingError, match=r"evaluate: returned nan \(network: at most 0.5 of the macs kept"):
        cn.plan(scores, max_drop=0.1, model=model, evaluate=breaks, calibration=INPUTS)
    with pytest.raises(InvalidSettingError, match="evaluate: raised TypeError"):
        cn.plan(scores, max_drop=0.1, model=model, evaluate=lambda candidate: None, calibration=INPUTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_drop": 0.1}, "max_drop= needs model= and evaluate="),
        ({"max_drop": 1.5}, "max_drop=1.5. Accepted: a share of accuracy"),
        ({"max_drop": float("nan")}, "max_drop=nan"),
        ({"max_drop": True}, "max_drop=True"),
        ({"max_drop": 0.1, "macs": 0.5}, "max_drop= finds the share kept itself"),
        ({"max_drop": 0.1, "measure": "seconds"}, "measure='seconds'. Accepted: 'units', 'params', 'macs'"),
    ],
)
def test_what_a_user_may_get_wrong(scores, settings, message):
    with pytest.raises(InvalidSettingError, match=message.replace(".", r"\.")):
        cn.plan(scores, **settings)


def test_a_path_in_place_of_scores_is_reported():
    with pytest.raises(InvalidSettingError, match=r"plan: found str\. Accepted: Scores"):
        cn.plan("scores.json", units=0.5)

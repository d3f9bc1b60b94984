"""Selecting: thresholds, shares, minima, rounding and ties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import critical_neurons as cn
from critical_neurons.core.structure import Layer, Product
from critical_neurons.errors import CriticalNeuronsError, InvalidSettingError
from tests import drawing
from tests.drawing import draw_scores, make_output, make_structure


def make_scores(blocks=1, **values):
    """Scores of hidden layers with these values, and an output layer of 3 behind them."""
    ends = np.cumsum([len(numbers) for numbers in values.values()])
    layers = [
        Layer(name, "Linear", np.arange(end - len(numbers), end), blocks=blocks)
        for end, (name, numbers) in zip(ends, values.items(), strict=True)
    ]
    structure = make_structure((*layers, make_output()), [layer.size for layer in layers])
    per_unit = np.concatenate([np.array(numbers, dtype=np.float64) for numbers in values.values()])
    scores = drawing.make_scores(structure, per_unit)
    return replace(scores, objective=1.0, bound=0.9, gap=0.1, settings={"loss_weight": 5.0})


def kept(plan):
    return {name: units.tolist() for name, units in plan.kept.items()}


SCORES = make_scores(a=[0.1, 0.5, 0.05, 1.0], b=[0.3, 0.2, 0.9])
OUT = {"out": [0, 1, 2]}


def test_a_threshold_removes_what_is_strictly_below():
    assert kept(cn.plan(SCORES, threshold=0.1)) == {"a": [0, 1, 3], "b": [0, 1, 2]} | OUT
    assert kept(cn.plan(SCORES, threshold=np.nextafter(0.1, 1))) == {"a": [1, 3], "b": [0, 1, 2]} | OUT
    assert kept(cn.plan(SCORES, threshold=0)) == {"a": [0, 1, 2, 3], "b": [0, 1, 2]} | OUT


def test_a_threshold_per_layer():
    plan = cn.plan(SCORES, threshold={"b": 0.3})
    assert kept(plan) == {"a": [0, 1, 2, 3], "b": [0, 2]} | OUT
    assert plan.layers[0].reason == "no threshold given for it"


def test_the_mean_is_each_layer_s_own():
    assert kept(cn.plan(SCORES, threshold="mean")) == {"a": [1, 3], "b": [2]} | OUT
    equal = make_scores(a=[0.5, 0.5], b=[0.25, 0.75])
    assert kept(cn.plan(equal, threshold="mean")) == {"a": [0, 1], "b": [1]} | OUT


@pytest.mark.parametrize(
    ("size", "share", "count"),
    [
        (100, 0.29, 29),
        (100, 0.57, 57),
        (10, 0.3, 3),
        (10, 0.7, 7),
        (10, 0.35, 3),
        (3, 1.0, 3),
        (3, 0.999, 2),
        (3, 0.1, 1),
    ],
)
def test_a_share_keeps_at_most_that_many(size, share, count):
    scores = make_scores(a=np.linspace(0, 1, size))
    assert cn.plan(scores, units=share).kept["a"].tolist() == list(range(size - count, size))


def test_a_share_is_taken_in_every_layer():
    assert kept(cn.plan(SCORES, units=0.5)) == {"a": [1, 3], "b": [2]} | OUT


def test_a_share_of_all_units_together():
    assert kept(cn.plan(SCORES, units=0.5, scope="global")) == {"a": [1, 3], "b": [2]} | OUT
    uneven = make_scores(a=[0.9, 0.8, 0.7, 0.6], b=[0.1, 0.2])
    assert kept(cn.plan(uneven, units=0.5, scope="global")) == {"a": [0, 1], "b": [1]} | OUT
    assert kept(cn.plan(uneven, units=0.67, scope="global")) == {"a": [0, 1, 2], "b": [1]} | OUT


def test_a_share_of_all_counts_the_minimum_in():
    uneven = make_scores(a=[0.9, 0.8, 0.7, 0.6], b=[0.1, 0.2, 0.3])
    plan = cn.plan(uneven, units=4 / 7, scope="global", min_units=2)
    assert kept(plan) == {"a": [0, 1], "b": [1, 2]} | OUT
    assert kept(cn.plan(uneven, units=0.1, scope="global", min_units=2)) == {"a": [0, 1], "b": [1, 2]} | OUT


def test_every_layer_keeps_its_minimum():
    plan = cn.plan(SCORES, threshold=2.0)
    assert kept(plan) == {"a": [3], "b": [2]} | OUT
    assert "minimum" in plan.layers[0].reason
    assert kept(cn.plan(SCORES, threshold=2.0, min_units=2)) == {"a": [1, 3], "b": [0, 2]} | OUT
    assert kept(cn.plan(SCORES, units=0.01, min_units=50)) == {"a": [0, 1, 2, 3], "b": [0, 1, 2]} | OUT


def test_rounding_is_up_under_a_threshold_and_down_under_a_share():
    scores = make_scores(a=np.linspace(0, 1, 11))
    assert len(cn.plan(scores, threshold=0.5).kept["a"]) == 6
    rounded = cn.plan(scores, threshold=0.5, round_to=4)
    assert rounded.kept["a"].tolist() == list(range(3, 11))
    assert "rounding" in rounded.layers[0].reason
    assert cn.plan(scores, units=0.6, round_to=4).kept["a"].tolist() == list(range(7, 11))
    assert len(cn.plan(scores, threshold=0.0, round_to=4).kept["a"]) == 11
    assert len(cn.plan(scores, units=0.2, round_to=4).kept["a"]) == 2  # at most the share comes first


def test_ties_keep_the_smaller_number():
    scores = make_scores(a=[0.5] * 6, b=[1.0, 0.0, 1.0, 1.0])
    for _ in range(3):
        assert kept(cn.plan(scores, units=0.5)) == {"a": [0, 1, 2], "b": [0, 2]} | OUT
    assert kept(cn.plan(scores, units=0.4, scope="global")) == {"a": [0], "b": [0, 2, 3]} | OUT
    assert kept(cn.plan(make_scores(a=[0.0, 0.0], b=[0.0]), threshold=0.5)) == {"a": [0], "b": [0]} | OUT


def test_a_budget_is_filled_with_what_fits_and_no_more():
    """Of 36 parameters a second unit of b needs 10; a third of a, which feeds itself, 9 - 4."""
    scores = make_scores(a=[0.8, 0.7, 0.3, 0.2], b=[0.9, 0.5])
    params = (Product("a", 16, (np.arange(4), np.arange(4))), Product("b", 20, (np.array([4, 5]),)))
    scores = replace(scores, structure=replace(scores.structure, params=params))
    assert kept(cn.plan(scores, params=18 / 36)) == {"a": [0, 1], "b": [0]} | OUT
    assert kept(cn.plan(scores, params=19 / 36)) == {"a": [0, 1, 2], "b": [0]} | OUT
    assert kept(cn.plan(scores, params=24 / 36)) == {"a": [0, 1], "b": [0, 1]} | OUT
    assert kept(cn.plan(scores, params=26 / 36, round_to=2)) == {"a": [0, 1], "b": [0, 1]} | OUT


RULES = [{"threshold": 2.0}, {"threshold": "mean"}, {"threshold": {"a": 2.0, "b": 2.0}}, {"units": 0.25}]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", ["a", ("a",), ["a", "out"], {"a"}])
def test_layers_to_keep_lose_nothing(rule, keep):
    plan = cn.plan(SCORES, **rule, round_to=3, keep=keep)
    assert plan.kept["a"].tolist() == [0, 1, 2, 3]
    assert list(plan.removed) in (["b"], [])
    assert plan.kept["b"].tolist() == cn.plan(SCORES, **rule, round_to=3).kept["b"].tolist()
    assert plan.layers[0].reason == "kept, as asked"
    assert plan.layers[-1].reason == "it gives the network's output"
    assert plan.rule.endswith("kept, as asked")


def test_a_layer_that_shares_units_keeps_the_whole_group():
    scores = draw_scores("resnet")
    everything = cn.plan(scores, units=0.5)
    plan = cn.plan(scores, units=0.5, keep="stage1.second")
    assert {"stem", "stage1.second"} <= set(everything.removed)
    assert set(plan.removed) == set(everything.removed) - {"stem", "stage1.second"}
    reasons = {layer.name: layer.reason for layer in plan.layers}
    assert reasons["stem"] == reasons["stage1.second"] == "kept, as asked"


def test_a_share_of_all_is_met_by_the_layers_not_kept():
    low = make_scores(a=[0.1, 0.1], b=[0.9, 0.8, 0.7, 0.6])
    assert kept(cn.plan(low, units=0.5, scope="global", keep="a")) == {"a": [0, 1], "b": [0]} | OUT
    with pytest.raises(InvalidSettingError) as caught:
        cn.plan(low, units=0.4, scope="global", keep="a")
    assert str(caught.value) == (
        "plan: units cannot fall to 0.4; with the fewest units and a kept, as asked, they are 0.5."
    )


@pytest.mark.parametrize("rule", [{"threshold": 9.0}, {"threshold": "mean"}, {"units": 0.01}])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_output_layer_is_never_touched(rule, scope):
    plan = cn.plan(SCORES, **rule, **({"scope": scope} if "units" in rule else {}))
    assert plan.kept["out"].tolist() == [0, 1, 2]
    assert "out" not in plan.removed
    assert plan.layers[-1].reason == "it gives the network's output"


def test_a_plan_says_where_it_comes_from():
    plan = cn.plan(SCORES, threshold=0.25)
    assert plan.architecture == "architecture"
    assert plan.provenance["status"] == "optimal"
    assert plan.provenance["gap"] == 0.1
    assert plan.provenance["settings"] == {"loss_weight": 5.0}
    assert plan.structure.fingerprint.weights == "weights"
    assert plan.structure is SCORES.structure
    assert plan.stays.tolist() == [False, True, False, True, True, False, True, True]


BAD = {
    "neither": ({}, "give one of threshold=, units=, params= and macs="),
    "both": ({"threshold": 0.1, "units": 0.5}, "give one of threshold=, units=, params= and macs="),
    "no share": ({"units": 0.0}, "units=0.0. Accepted: a share above 0"),
    "share above one": ({"units": 1.5}, "units=1.5"),
    "share that is no number": ({"units": float("nan")}, "units=nan"),
    "share in words": ({"units": "half"}, "units='half'"),
    "threshold that is no number": ({"threshold": float("nan")}, "threshold of a is nan"),
    "infinite threshold": ({"threshold": {"b": float("inf")}}, "threshold of b is inf"),
    "threshold in words": ({"threshold": "median"}, "threshold='median'. Accepted: a number, a mapping, or 'mean'"),
    "threshold of another type": ({"threshold": [0.1]}, "threshold"),
    "unknown layer": ({"threshold": {"c": 0.1}}, "no scores for c. Scored layers: a, b"),
    "output layer": ({"threshold": {"out": 0.1}}, "no scores for out"),
    "unknown scope": ({"units": 0.5, "scope": "model"}, "scope='model'. Accepted: 'layer', 'global'"),
    "no minimum": ({"units": 0.5, "min_units": 0}, "min_units=0"),
    "half a minimum": ({"units": 0.5, "min_units": 1.5}, "min_units=1.5"),
    "no rounding": ({"units": 0.5, "round_to": 0}, "round_to=0"),
    "unknown layer to keep": ({"units": 0.5, "keep": ("a", "c")}, "keep: no layer c. Layers: a, b, out."),
    "unknown name to keep": ({"units": 0.5, "keep": "ab"}, "keep: no layer ab. Layers: a, b, out."),
    "number to keep": ({"units": 0.5, "keep": 3}, "keep=3. Accepted: names of layers."),
    "numbers to keep": ({"units": 0.5, "keep": [0]}, "keep=[0]. Accepted: names of layers."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings(case):
    arguments, message = BAD[case]
    with pytest.raises(InvalidSettingError) as caught:
        cn.plan(SCORES, **arguments)
    assert message in str(caught.value)
    assert isinstance(caught.value, CriticalNeuronsError)

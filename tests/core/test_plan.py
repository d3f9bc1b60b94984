"""Plan: printing, saving, drawing others of the same counts; refusing other networks and damaged files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.plan import Plan
from critical_neurons.core.structure import NO_UNIT, Layer
from critical_neurons.errors import InvalidFileError, InvalidSettingError, OutputError, PlanMismatchError
from tests.drawing import make_output, make_structure
from tests.forging import forge, seal

A_SCORES = np.array([0.9, 0.1, 0.5, 0.5, 0.2, 0.8])


STRUCTURE = make_structure(
    (
        Layer("features.0", "Conv2d", np.arange(6)),
        Layer("hidden", "Linear", np.full(4, NO_UNIT), reason="ignored, as asked"),
        make_output(),
    ),
    (6,),
)


def make_plan(structure=STRUCTURE, removed=(1, 3, 4)):
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    stays[list(removed)] = False
    rule = "score < 0.5 removed"
    provenance = {"status": "optimal", "gap": 1e-5, "objective": 0.1 + 0.2}
    return Plan(structure, stays, dict.fromkeys(["features.0"], rule), rule, provenance)


def test_kept_and_removed():
    plan = make_plan()
    assert plan.kept["features.0"].tolist() == [0, 2, 5]
    assert {name: units.tolist() for name, units in plan.removed.items()} == {"features.0": [1, 3, 4]}


def test_printing_shows_every_layer_kept_of_total_and_why():
    lines = str(make_plan()).splitlines()
    assert [line.split() for line in lines] == [
        ["features.0", "3", "of", "6", "score", "<", "0.5", "removed"],
        ["hidden", "4", "of", "4", "ignored,", "as", "asked"],
        ["out", "3", "of", "3", "it", "gives", "the", "network's", "output"],
        ["units", "3", "of", "6", "score", "<", "0.5", "removed"],
    ]
    assert repr(make_plan()) == "Plan(score < 0.5 removed: 3 of 6 units removed)"


SHARED = make_structure(
    (
        Layer("stem", "Linear", np.array([0, 1, 2])),
        Layer("branch", "Linear", np.array([2, 1, 0])),
        Layer("hidden", "Linear", np.array([3, 4])),
        make_output(),
    ),
    (3, 2),
)


def test_printed_totals_count_shared_units_once():
    plan = make_plan(SHARED, removed=(0, 3))
    assert str(plan).splitlines()[-1].split()[:4] == ["units", "3", "of", "5"]
    assert repr(plan) == "Plan(score < 0.5 removed: 2 of 5 units removed)"
    assert plan.kept["branch"].tolist() == [0, 1]


def test_random_keeps_the_counts_and_draws_without_replacement():
    plan = make_plan()
    for seed in range(20):
        drawn = plan.random(seed=seed)
        units = drawn.kept["features.0"]
        assert len(set(units.tolist())) == 3
        assert np.array_equal(units, np.sort(units))
        assert set(units.tolist()) <= set(range(6))
        assert np.array_equal(drawn.kept["hidden"], np.arange(4))
        assert np.array_equal(drawn.kept["out"], np.arange(3))
        assert drawn.structure is plan.structure


def test_preferred_units_stay_as_many_as_before():
    plan = make_plan().preferred(np.array([1.0, 5.0, -2.0, 4.0, 5.0, 0.0]), "drawn")
    assert plan.kept["features.0"].tolist() == [1, 3, 4]
    assert plan.rule == "drawn, counts of: score < 0.5 removed"
    assert [layer.reason for layer in plan.layers[:2]] == [plan.rule, "ignored, as asked"]


def test_of_equally_preferred_units_the_first_stay():
    assert make_plan().preferred(np.zeros(6), "drawn").kept["features.0"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        (np.ones(5), r"drawn: found numbers of shape \(5,\). Accepted: .* each of the 6"),
        (np.full(6, np.nan), "a finite"),
    ],
)
def test_preferences_that_do_not_fit_are_refused(preference, message):
    with pytest.raises(PlanMismatchError, match=message):
        make_plan().preferred(preference, "drawn")


def test_random_is_seeded():
    plan = make_plan()
    drawn = [plan.random(seed=seed).kept["features.0"].tolist() for seed in range(20)]
    assert drawn == [plan.random(seed=seed).kept["features.0"].tolist() for seed in range(20)]
    assert len({tuple(units) for units in drawn}) > 5
    assert plan.random().kept["features.0"].tolist() == drawn[0]


def test_random_says_so():
    drawn = make_plan().random(seed=7)
    assert drawn.layers[0].reason == "random, seed 7, counts of: score < 0.5 removed"
    assert drawn.layers[1].reason == "ignored, as asked"
    assert drawn.architecture == make_plan().architecture


def test_critical_removes_the_highest():
    plan = make_plan().critical({"features.0": A_SCORES})
    assert plan.kept["features.0"].tolist() == [1, 2, 4]  # of the two at 0.5 the smaller number stays
    assert plan.removed["features.0"].tolist() == [0, 3, 5]
    assert "highest-scored removed" in plan.rule


@pytest.mark.parametrize("scores", [{}, {"features.0": A_SCORES[:5]}])
def test_critical_wants_scores_of_the_same_layers(scores):
    with pytest.raises(PlanMismatchError, match=r"features\.0: "):
        make_plan().critical(scores)


def test_plans_survive_saving(tmp_path):
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    again = cn.Plan.load(tmp_path / "plan.json")
    assert again.to_dict() == plan.to_dict()
    assert str(again) == str(plan)
    assert again.provenance["objective"] == 0.1 + 0.2
    assert again.kept["features.0"].dtype == np.int64
    assert np.array_equal(again.random(seed=3).kept["features.0"], plan.random(seed=3).kept["features.0"])


def test_plans_of_scores_survive_saving(tmp_path):
    model, inputs = mlp(), torch.rand(3, 4)
    plan = cn.plan(cn.score(model, inputs, solver=cn.Solver(threads=1)), units=0.5)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_dict() == plan.to_dict()
    smaller = cn.prune(model, again, inputs)
    assert [smaller[0].out_features, smaller[2].in_features] == [2, 2]


FILE = """
{"format": "critical_neurons plan", "version": 2,
 "layers": [
  {"name": "0", "kept": [0, 2], "total": 3, "reason": "at most 0.7 of the units kept, by layer"},
  {"name": "3", "kept": [0, 1], "total": 2, "reason": "it gives the network's output"}],
 "rule": "at most 0.7 of the units kept, by layer",
 "provenance": {"status": "optimal", "objective": 1.492432706479564},
 "span": {"start": null, "stop": null}, "seen": ["0f", "1e"],
 "structure": {
  "layers": [
   {"name": "0", "kind": "Linear", "units": [[0, 1, 3]], "reason": "", "blocks": 1},
   {"name": "3", "kind": "Linear", "units": [[-1, 0, 2]], "reason": "it gives the network's output", "blocks": 1}],
  "group_sizes": [3],
  "slices": [{"tensor": "0.weight", "axis": 0, "units": [[0, 1, 3]]},
             {"tensor": "3.weight", "axis": 1, "units": [[0, 1, 3]]}],
  "wirings": [
   {"module": "0", "inputs": [[-1, 0, 2]], "outputs": [[0, 1, 3]], "constants": 2, "kernel": 1, "positions": 1,
    "groups": 1, "biased": true, "alone": true},
   {"module": "3", "inputs": [[0, 1, 3]], "outputs": [[-1, 0, 2]], "constants": [0.0, 0.5, -0.25], "kernel": 1,
    "positions": 1, "groups": 1, "biased": true, "alone": true}],
  "params": [{"module": "0", "amount": 6, "axes": [[[0, 1, 3]]]}, {"module": "3", "amount": 2, "axes": []}],
  "macs": [{"module": "0", "amount": 6, "axes": [[[0, 1, 3]]]}],
  "fingerprint": {"architecture": "7d97788dd6cca40f", "weights": "1f4e7c4d6d55d155"}, "notes": []}}
"""
"""As version 2 was first written."""


def test_files_of_version_2_load(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(seal(json.loads(FILE)))
    plan = Plan.load(path)
    assert plan.to_dict() == json.loads(FILE)
    assert plan.removed["0"].tolist() == [1]
    assert plan.structure.wirings[1].constants.tolist() == [0.0, 0.5, -0.25]


DAMAGE = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "kept: all",
    "another format": lambda text: text.replace("critical_neurons plan", "critical_neurons scores"),
    "a list": lambda text: "[]",
    "without layers": lambda text: forge(text, lambda data: data.pop("layers")),
    "layers of another type": lambda text: forge(text, lambda data: data.update(layers=3)),
    "field missing": lambda text: forge(text, lambda data: data["layers"][0].pop("reason")),
    "field too many": lambda text: forge(text, lambda data: data["layers"][0].update(more=1)),
    "unit outside": lambda text: forge(text, lambda data: data["layers"][0].update(kept=[0, 6])),
    "unit twice": lambda text: forge(text, lambda data: data["layers"][0].update(kept=[0, 0])),
    "negative unit": lambda text: forge(text, lambda data: data["layers"][0].update(kept=[-1, 2])),
    "units out of order": lambda text: forge(text, lambda data: data["layers"][0].update(kept=[2, 0])),
    "half a unit": lambda text: forge(text, lambda data: data["layers"][0].update(kept=[0.5, 2])),
    "no unit left": lambda text: forge(text, lambda data: data["layers"][0].update(kept=[])),
    "another size": lambda text: forge(text, lambda data: data["layers"][0].update(total=7)),
    "layer missing": lambda text: forge(text, lambda data: data["layers"].pop()),
    "without a structure": lambda text: forge(text, lambda data: data.pop("structure")),
    "a structure with fewer units": lambda text: forge(text, lambda data: data["structure"].update(group_sizes=[5])),
    "a structure with more units": lambda text: forge(text, lambda data: data["structure"].update(group_sizes=[7])),
}


def test_files_that_tear_shared_units_apart_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    make_plan(SHARED, removed=(0, 3)).save(path)
    path.write_text(forge(path.read_text(), lambda data: data["layers"][1].update(kept=[0, 1, 2])))
    with pytest.raises(InvalidFileError, match="branch: it keeps channels that it shares with removed ones"):
        Plan.load(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage, tmp_path):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    path.write_text(DAMAGE[damage](path.read_text()))
    with pytest.raises(InvalidFileError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_other_versions_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    path.write_text(forge(path.read_text(), lambda data: data.update(version=99)))
    with pytest.raises(InvalidFileError, match="format version 99, of another release; this one reads version 2"):
        Plan.load(path)


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(InvalidFileError, match=r"nothing\.json: cannot be read"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(OutputError, match="does not exist"):
        make_plan().save(tmp_path / "nowhere" / "plan.json")


def mlp(hidden=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))


OTHERS = {
    "other sizes": lambda: mlp(hidden=6),
    "other names": lambda: nn.Sequential(mlp()),
    "more layers": lambda: nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(3, 2)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_another_network_is_refused(other):
    inputs = torch.rand(3, 4)
    plan = cn.plan(cn.score(mlp(), inputs, solver=cn.Solver(threads=1)), units=0.5)
    for use in (lambda model: cn.prune(model, plan, inputs), lambda model: cn.mask(model, plan)):
        with pytest.raises(PlanMismatchError, match="made for another network"):
            use(OTHERS[other]())


def test_a_plan_fits_the_same_network_with_other_weights():
    inputs = torch.rand(3, 4)
    plan = cn.plan(cn.score(mlp(), inputs, solver=cn.Solver(threads=1)), units=0.5)
    other = mlp()
    with torch.no_grad():
        other[0].weight += 1
    assert cn.prune(other, plan, inputs)[0].out_features == 2


def test_a_file_that_touches_the_output_layer_is_refused(tmp_path):
    plan = cn.plan(cn.score(mlp(), torch.rand(3, 4), solver=cn.Solver(threads=1)), units=0.5)
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(forge(path.read_text(), lambda data: data["layers"][1].update(kept=[0])))
    with pytest.raises(
        InvalidFileError, match="2: it removes channels that must stay: it gives the network's output"
    ):
        Plan.load(path)


BLOCKS = make_structure((Layer("0", "Conv2d", np.arange(6), blocks=2), make_output()), (6,))


WRONG_SIZES = [
    (make_plan(removed=[NO_UNIT]), "found no entry for each of 6 units and a last, True"),
    (replace(make_plan(), stays=np.ones(6, dtype=bool)), "found no entry for each of 6 units"),
]
NOT_REMOVABLE = [
    (make_plan(removed=range(6)), r"features\.0: it removes all units; a layer is never emptied"),
    (make_plan(SHARED, removed=(3, 4)), "hidden: it removes all units"),
    (make_plan(BLOCKS, removed=(0, 3, 4)), "0: it keeps 2, 1 channels of its blocks"),
    (make_plan(BLOCKS, removed=(0, 1, 2)), "0: it keeps 0, 3 channels of its blocks"),
]
MASK = pytest.param(cn.mask, id="mask")
PRUNE = pytest.param(lambda model, plan: cn.prune(model, plan, torch.rand(3, 4)), id="prune")
SAVE = pytest.param(lambda model, plan: cn.save(model, "never written", plan=plan), id="save")


@pytest.mark.parametrize(("plan", "message"), WRONG_SIZES)
@pytest.mark.parametrize("use", [MASK, PRUNE, SAVE])
def test_plans_of_another_size_are_refused(use, plan, message):
    with pytest.raises(PlanMismatchError, match=message):
        use(mlp(), plan)


@pytest.mark.parametrize(("plan", "message"), NOT_REMOVABLE)
@pytest.mark.parametrize("use", [PRUNE, SAVE])
def test_plans_that_cannot_be_carried_out_are_refused(use, plan, message):
    with pytest.raises(PlanMismatchError, match=message):
        use(mlp(), plan)


def test_all_units_of_a_layer_can_be_masked():
    model, inputs = mlp(), torch.rand(3, 4)
    structure = cn.inspect(model, inputs)
    masked = cn.mask(model, make_plan(structure, removed=range(5)))
    assert torch.equal(masked(inputs), model[2].bias.expand(3, 3))


@pytest.mark.parametrize("use", [MASK, PRUNE, SAVE])
def test_scores_in_place_of_a_plan_are_reported(use):
    scores = cn.score(mlp(), torch.rand(3, 4), solver=cn.Solver(threads=1))
    with pytest.raises(InvalidSettingError, match=r"plan: found Scores\. Accepted: a Plan, as cn\.plan\(scores"):
        use(mlp(), scores)

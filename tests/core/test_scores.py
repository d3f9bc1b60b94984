"""Scores: saved and loaded to the last bit, averaged with the worst status and the largest gap."""

from __future__ import annotations

import copy
import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.scores import Scores, average_scores
from critical_neurons.core.solution import Status, Step, relative_gap
from critical_neurons.core.structure import NO_UNIT, Fingerprint, Layer, Wiring
from critical_neurons.errors import CriticalNeuronsError, InvalidFileError, OutputError
from critical_neurons.structure import fingerprint
from tests.drawing import make_output, make_structure
from tests.forging import forge, seal

AWKWARD = [0.1 + 0.2, 1 / 3, 5e-324, np.nextafter(1.0, 0.0), 0.0, 1.0]
"""Numbers that a careless format would round."""


STRUCTURE = replace(
    make_structure(
        (Layer("a", "Conv2d", np.arange(6), blocks=2), Layer("b.0", "Linear", np.arange(6, 8)), make_output()),
        (6, 2),
        (Wiring("a", np.arange(6, 8), np.arange(6), np.array([0.1 + 0.2, 0.0]), kernel=9, groups=2),),
    ),
    fingerprint=Fingerprint("0123", "4567"),
)


def make_scores(**changes):
    scores = Scores(
        values_by_layer={"a": np.array(AWKWARD), "b.0": np.array([0.25, 2 / 3])},
        structure=STRUCTURE,
        status=Status.OPTIMAL,
        objective=-0.1 * 3,
        bound=-0.31,
        gap=0.01,
        seconds=1 / 7,
        settings={"formulation": cn.Paper(), "ignore": [], "labels": [0, 1]},
        budget=cn.Budget(macs=0.5),
        history=(Step(0.1, None, -np.pi, 3, 4), Step(0.2, 1 / 3, None, 5, 6)),
        sizes={"columns": 10, "rows": 20},
        logit_error=1e-15,
        notes=("softmax is left out",),
    )
    return replace(scores, **changes)


def assert_equal(left, right):
    """To the last bit."""
    assert left.to_dict() == right.to_dict()
    assert list(left) == list(right)
    for name in left:
        assert left[name].dtype == right[name].dtype == np.float64
        assert left[name].tobytes() == right[name].tobytes()
    assert left.per_unit.tobytes() == right.per_unit.tobytes()
    for one, other in zip(left.layers, right.layers, strict=True):
        assert one.units.dtype == other.units.dtype == np.int64
    for one, other in zip(left.structure.wirings, right.structure.wirings, strict=True):
        assert one.constants.tobytes() == other.constants.tobytes()
    assert left.fingerprint == right.fingerprint
    assert left.status is right.status
    assert left.history == right.history
    assert left.notes == right.notes
    assert len(left.parts) == len(right.parts)
    for one, other in zip(left.parts, right.parts, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("status", Status)
def test_scores_survive_saving(status, tmp_path):
    scores = make_scores(status=status, gap=None, bound=None)
    scores.save(tmp_path / "scores.json")
    assert_equal(cn.Scores.load(tmp_path / "scores.json"), scores)


def test_averaged_scores_survive_saving_with_their_parts(tmp_path):
    parts = [make_scores(), make_scores(values_by_layer={"a": np.array(AWKWARD[::-1]), "b.0": np.array([0.1, 0.7])})]
    scores = average_scores(parts, settings={"labels": [0, 1]}, seconds=3.0, notes=("interrupted",))
    scores.save(str(tmp_path / "scores.json"))
    again = Scores.load(str(tmp_path / "scores.json"))
    assert_equal(again, scores)
    assert len(again.parts) == 2


def test_solved_scores_survive_saving(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    scores = cn.score(
        model, torch.rand(4, 4), torch.tensor([0, 1, 2, 0]), formulation=cn.ByClass(), solver=cn.Solver(threads=1)
    )
    scores.save(tmp_path / "scores.json")
    again = Scores.load(tmp_path / "scores.json")
    assert_equal(again, scores)
    assert again.parts[0].history == scores.parts[0].history
    assert cn.plan(again, units=0.5).to_dict() == cn.plan(scores, units=0.5).to_dict()


def test_the_file_is_json_with_format_version_settings_and_fingerprint(tmp_path):
    make_scores().save(tmp_path / "scores.json")
    data = json.loads((tmp_path / "scores.json").read_text())
    assert data["format"] == "critical_neurons scores"
    assert data["version"] == 2
    assert data["settings"]["formulation"]["loss_weight"] == 5.0
    assert data["budget"] == {"macs": 0.5}
    assert data["structure"]["fingerprint"] == {"architecture": "0123", "weights": "4567"}


FILE = """
{"format": "critical_neurons scores", "version": 2, "scores": {"0": [0.0, 0.25, 1.0]},
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
  "fingerprint": {"architecture": "7d97788dd6cca40f", "weights": "1f4e7c4d6d55d155"}, "notes": []},
 "status": "optimal",
 "objective": 1.492432706479564, "bound": 1.492432706479564, "gap": 0.0, "seconds": 0.06424445099946752,
 "settings": {
  "formulation": {"name": "paper", "loss_weight": {"loss_increase": 0.01}, "objective": "balanced", "rescale": 2.0,
    "loss": "auto",
   "integer": true, "bounds": "interval", "input_radius": 0.0},
  "by_class": false,
  "solver": {"name": "auto", "options": {}, "time_limit": 300.0, "gap": 0.0001, "threads": null, "seed": 0},
  "labels": [0, 1]},
 "history": [{"seconds": 0.0069, "objective": 1.492432706479564, "bound": 1.49, "rows": 0, "cuts": 4}],
 "sizes": {"columns": 6, "rows": 7, "rows_used": 1, "gates": 0, "cuts": 4}, "logit_error": 0.0, "notes": [],
 "layer_choices": [], "incumbent": null, "dual": null, "budget": null, "compensate": "none",
 "span": {"start": null, "stop": null}, "inputs": ["0f", "1e"], "parts": []}
"""
"""As version 2 was first written."""


def test_files_of_version_2_load(tmp_path):
    path = tmp_path / "scores.json"
    path.write_text(seal(json.loads(FILE)))
    scores = Scores.load(path)
    assert scores.to_dict() == {**json.loads(FILE), "search_history": None}
    assert scores["0"].tolist() == [0.0, 0.25, 1.0]
    assert scores.structure.wirings[1].constants.tolist() == [0.0, 0.5, -0.25]
    assert scores.settings["formulation"] == cn.Paper(loss_weight=cn.Lagrangian(0.01))
    assert scores.settings["solver"] == cn.Solver()


DAMAGE = {
    "empty": lambda text: "",
    "cut off": lambda text: text[:-20],
    "no JSON": lambda text: "scores: high",
    "binary": lambda text: "\x00\x01",
    "a list": lambda text: "[1]",
    "another format": lambda text: text.replace("critical_neurons scores", "critical_neurons plan"),
    "layer missing": lambda text: forge(text, lambda data: data["scores"].pop("a")),
    "layer too short": lambda text: forge(text, lambda data: data["scores"]["a"].pop()),
    "unknown status": lambda text: forge(text, lambda data: data.update(status="good")),
    "field missing": lambda text: forge(text, lambda data: data.pop("history")),
    "words for numbers": lambda text: forge(text, lambda data: data["scores"].update(a=["high"] * 6)),
    "scores of another type": lambda text: forge(text, lambda data: data.update(scores=3)),
    "unknown formulation": lambda text: forge(text, lambda data: data["settings"]["formulation"].update(name="mine")),
    "unknown setting": lambda text: forge(text, lambda data: data["settings"]["formulation"].update(colour=1)),
    "setting of another type": lambda text: forge(
        text, lambda data: data["settings"]["formulation"].update(binary=True)
    ),
    "bad setting": lambda text: forge(text, lambda data: data["settings"]["formulation"].update(rescale="two")),
    "two budgets": lambda text: forge(text, lambda data: data["budget"].update(units=0.5)),
    "budget in words": lambda text: forge(text, lambda data: data.update(budget="macs")),
    "part damaged": lambda text: forge(text, lambda data: data.update(parts=[{}])),
    "without a structure": lambda text: forge(text, lambda data: data.pop("structure")),
    "a structure with fewer units": lambda text: forge(text, lambda data: data["structure"].update(group_sizes=[6])),
    "a structure with more units": lambda text: forge(
        text, lambda data: data["structure"].update(group_sizes=[6, 3])
    ),
    "score that is no number": lambda text: forge(
        text, lambda data: data["scores"]["a"].__setitem__(0, float("nan"))
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage, tmp_path):
    path = tmp_path / "scores.json"
    make_scores().save(path)
    path.write_text(DAMAGE[damage](path.read_text()))
    with pytest.raises(InvalidFileError) as caught:
        Scores.load(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, CriticalNeuronsError)


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_other_versions_are_refused(version, tmp_path):
    path = tmp_path / "scores.json"
    make_scores().save(path)
    path.write_text(forge(path.read_text(), lambda data: data.update(version=version)))
    with pytest.raises(InvalidFileError, match=r"format version .*, of another release; this one reads version 2"):
        Scores.load(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(InvalidFileError, match=r"nothing\.json: cannot be read"):
        Scores.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("path", ["nowhere/scores.json", "."])
def test_an_unwritable_path(path, tmp_path):
    with pytest.raises(OutputError):
        make_scores().save(tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "scores.json"
    make_scores().save(path)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        make_scores(seconds=9.0).save(path)
    monkeypatch.undo()
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        make_scores(seconds=9.0).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_scores_that_cannot_be_written_leave_the_old_file(tmp_path):
    path = tmp_path / "scores.json"
    make_scores().save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        make_scores(settings={"what": object()}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_of_all_units(tmp_path):
    path = tmp_path / "scores.csv"
    scores = make_scores()
    scores.to_csv(path)
    lines = read_csv(path)
    assert list(lines[0]) == ["layer", "channel", "unit", "score", "reason"]
    for layer in scores.layers:
        own = [line for line in lines if line["layer"] == layer.name]
        assert [int(line["channel"]) for line in own] == list(range(layer.size))
        assert {line["reason"] for line in own} == {layer.reason}
        if layer.removable:
            assert [int(line["unit"]) for line in own] == layer.units.tolist()
            assert np.array([float(line["score"]) for line in own]).tobytes() == scores[layer.name].tobytes()
        else:
            assert {(line["unit"], line["score"]) for line in own} == {("", "")}
    assert len(lines) == sum(layer.size for layer in scores.layers)


def test_channels_that_must_stay_have_no_score_in_the_table(tmp_path):
    layer = Layer("a", "Conv2d", np.array([0, NO_UNIT, 1]))
    structure = make_structure((layer,), (2,))
    make_scores(structure=structure, values_by_layer={"a": np.array([0.5, 1.0, 0.25])}).to_csv(tmp_path / "a.csv")
    assert [(line["unit"], line["score"]) for line in read_csv(tmp_path / "a.csv")] == [
        ("0", "0.5"),
        ("", ""),
        ("1", "0.25"),
    ]


def test_the_table_quotes_what_has_to_be(tmp_path):
    odd = Layer('a "b", c', "Linear", np.full(1, NO_UNIT), reason="it feeds d, which\nis wide: é")
    make_scores(structure=make_structure((odd,), ())).to_csv(tmp_path / "scores.csv")
    assert read_csv(tmp_path / "scores.csv") == [
        {"layer": odd.name, "channel": "0", "unit": "", "score": "", "reason": odd.reason}
    ]


def test_a_failing_table_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "scores.csv"
    path.write_text("old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        make_scores().to_csv(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_scores_are_a_mapping():
    scores = make_scores()
    assert list(scores) == ["a", "b.0"]
    assert len(scores) == 2
    assert "a" in scores
    assert "out" not in scores
    assert dict(scores)["b.0"].tolist() == [0.25, 2 / 3]
    assert scores.get("out") is None
    with pytest.raises(KeyError, match=r"no scores for 'out'\. Scored layers: a, b\.0"):
        scores["out"]
    assert repr(scores) == "Scores(2 layers, 8 units, optimal, gap 1.0e-02)"
    assert repr(make_scores(gap=None)).endswith("gap none)")


def test_averaging():
    parts = [
        make_scores(values_by_layer={"a": np.zeros(6), "b.0": np.array([0.0, 1.0])}, logit_error=1e-12),
        make_scores(values_by_layer={"a": np.ones(6), "b.0": np.array([1.0, 1.0])}, status=Status.FEASIBLE, gap=0.5),
        make_scores(
            values_by_layer={"a": np.full(6, 0.5), "b.0": np.array([0.2, 1.0])},
            gap=0.2,
            notes=("softmax is left out", "stopped early"),
        ),
    ]
    scores = average_scores(parts, settings={"labels": [0, 1]}, seconds=7.0, notes=("2 of 3",))
    assert scores["a"].tolist() == [0.5] * 6
    assert scores["b.0"] == pytest.approx([0.4, 1.0])
    assert scores.status is Status.FEASIBLE
    assert scores.gap == 0.5
    assert scores.objective is None
    assert scores.bound is None
    assert scores.seconds == 7.0
    assert scores.logit_error == 1e-12
    assert scores.sizes == {"columns": 30, "rows": 60}
    assert scores.notes == ("softmax is left out", "stopped early", "2 of 3")
    assert scores.parts == tuple(parts)


def test_units_that_layers_share_have_one_score():
    layers = (
        Layer("a", "Conv2d", np.array([0, 1, 2])),
        Layer("b", "Conv2d", np.array([2, 2, 0, 0, 1, 1])),
        make_output(),
    )
    values = {"a": np.array([0.1, 0.2, 0.3]), "b": np.array([0.3, 0.3, 0.1, 0.1, 0.2, 0.2])}
    scores = make_scores(structure=make_structure(layers, (3,)), values_by_layer=values)
    assert scores.per_unit.tolist() == [0.1, 0.2, 0.3]


def test_averaging_with_an_unknown_gap_has_none():
    scores = average_scores([make_scores(gap=0.5), make_scores(gap=None)], settings={"labels": [0, 1]}, seconds=1.0)
    assert scores.gap is None


def test_statuses_are_ordered_from_best_to_worst():
    ranked = sorted(Status, key=lambda status: status.rank)
    assert ranked[0] is Status.OPTIMAL
    assert ranked[1] is Status.FEASIBLE
    assert ranked[-1] is Status.FAILED
    for status in Status:
        other = make_scores(status=status)
        assert (
            average_scores([make_scores(), other, make_scores()], settings={"labels": [0, 1]}, seconds=1.0).status
            is status
        )
    assert len({status.sentence for status in Status}) == len(Status)


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [
        (0.5, 0.25, 0.25),
        (4.0, 3.0, 0.25),
        (-4.0, -5.0, 0.25),
        (-0.5, -0.75, 0.25),
        (1.0, 1.0, 0.0),
        (1.0, 1.0 + 1e-12, 0.0),
        (None, 1.0, None),
        (1.0, None, None),
        (None, None, None),
    ],
)
def test_the_gap(objective, bound, gap):
    assert relative_gap(objective, bound) == gap
    assert Step(0.0, objective, bound, 0, 0).gap == gap


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def test_the_fingerprint_of_the_same_model_is_the_same():
    assert fingerprint(net()) == fingerprint(copy.deepcopy(net()).train())
    assert fingerprint(net()) == fingerprint(net().requires_grad_(False))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.reshape(-1).__setitem__(0, 0.5),
        lambda model: model[4].bias.data.__setitem__(2, 1e-30),
        lambda model: model[1].running_var.__setitem__(1, 1.5),
        lambda model: model.double(),
    ],
    ids=["weight", "bias", "statistics", "type"],
)
def test_the_fingerprint_changes_with_the_weights(change):
    model = net()
    change(model)
    assert fingerprint(model).weights != fingerprint(net()).weights
    assert fingerprint(model).architecture == fingerprint(net()).architecture


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Sequential(nn.Sequential(*net())),
        lambda: nn.Sequential(*net()[:4], nn.Linear(8, 4)),
        lambda: nn.Sequential(*net()[:4], nn.Linear(8, 3, bias=False)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, (9, 1)), *net()[1:]),
    ],
    ids=["names", "size", "bias", "shape"],
)
def test_the_fingerprint_changes_with_the_architecture(other):
    assert fingerprint(other()).architecture != fingerprint(net()).architecture

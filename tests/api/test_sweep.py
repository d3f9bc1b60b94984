"""Networks of several sizes: those that `compress` would make, found once, and kept."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.api import sweep as module
from critical_neurons.errors import InvalidInputError, InvalidSettingError

QUICK = {"effort": "quick", "seed": 1}


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    inputs = torch.rand(60, 6)
    return model, inputs, torch.arange(60) % 3


@pytest.fixture(scope="module")
def swept(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    methods = ("search", "norm", "random", "paper")
    return folder, cn.sweep(*task, macs=[0.3, 0.6], methods=methods, folder=folder, **QUICK)


def test_points_are_what_compress_finds(task, swept):
    for share in (0.3, 0.6):
        alone = cn.compress(*task, macs=share, onnx=False, **QUICK)
        found = swept[1].pick(share)
        assert np.array_equal(found.plan.stays, alone.plan.stays)
        assert found.comparison.after.accuracy == alone.comparison.after.accuracy
        assert found.comparison.data == "calibration"
        for one, two in zip(found.model.parameters(), alone.model.parameters(), strict=True):
            assert torch.equal(one, two)


def test_every_point_keeps_to_its_share(swept):
    points = swept[1].curve.points
    assert [(point.method, point.share) for point in points] == [
        (method, share) for method in ("search", "norm", "random", "paper") for share in (0.6, 0.3)
    ]
    for point in points:
        assert point.comparison.after.macs <= point.share * point.comparison.before.macs


def test_norms_are_those_of_the_weights(task, swept):
    model, _, _ = task
    kept = swept[1].pick(0.3, "norm").plan.kept
    for name in ("0", "2"):
        norms = model.get_submodule(name).weight.detach().norm(dim=1)
        assert sorted(kept[name].tolist()) == sorted(norms.argsort(descending=True)[: len(kept[name])].tolist())


def test_random_removes_as_many_of_every_layer(swept):
    searched, drawn = (swept[1].pick(0.3, method).plan for method in ("search", "random"))
    assert [len(each) for each in searched.kept.values()] == [len(each) for each in drawn.kept.values()]
    assert not np.array_equal(searched.stays, drawn.stays)


def test_nothing_is_searched_again(task, swept, monkeypatch):
    folder, first = swept
    monkeypatch.setattr(module.Search, "find", None)
    again = cn.sweep(*task, macs=[0.3], folder=folder, **QUICK)
    one, two = first.pick(0.3), again.pick(0.3)
    assert np.array_equal(one.plan.stays, two.plan.stays)
    assert one.comparison == two.comparison
    assert (
        one.call
        == two.call
        == (
            "cn.sweep(model, inputs, labels, macs=(0.3, 0.6), methods=('search', 'norm', 'random', 'paper'), "
            "effort='quick', seed=1).pick(0.3, 'search')"
        )
    )
    for name, values in one.model.state_dict().items():
        assert torch.equal(values, two.model.state_dict()[name])


def test_one_search_is_set_up(task, monkeypatch):
    made, original = [], module.Search.__init__

    def count(self, *args, **kwargs):
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(module.Search, "__init__", count)
    cn.sweep(*task, units=[0.5], methods=["norm", "paper"], **QUICK)
    assert not made
    cn.sweep(*task, units=[0.8, 0.5, 0.3], **QUICK)
    assert len(made) == 1


def test_what_is_searched_for_is_also_removed_at_random(task, monkeypatch):
    searched, original = [], module.Search.find

    def find(self, budget):
        searched.append(budget.units)
        return original(self, budget)

    monkeypatch.setattr(module.Search, "find", find)
    cn.sweep(*task, units=[0.8, 0.3], methods=["search", "random"], **QUICK)
    assert searched == [0.8, 0.3]


def test_an_interrupt_leaves_what_was_found(task, tmp_path, monkeypatch):
    original, reported = module._SweepTask.find, []

    def find(self, method, share, tell):
        if share < 0.5:
            raise KeyboardInterrupt
        return original(self, method, share, tell)

    monkeypatch.setattr(module._SweepTask, "find", find)
    found = cn.sweep(*task, units=[0.8, 0.3], folder=tmp_path / "sweep", **QUICK)
    assert [point.share for point in found.curve.points] == [0.8]
    assert found.curve.notes == (module.INTERRUPTED,)
    monkeypatch.setattr(module._SweepTask, "find", original)
    whole = cn.sweep(*task, units=[0.8, 0.3], folder=tmp_path / "sweep", progress=reported.append, **QUICK)
    assert reported[0] == "1 network to find, 1 found before"
    assert [point.share for point in whole.curve.points] == [0.8, 0.3]


def test_curves_are_saved_and_shown(swept, tmp_path):
    curve = swept[1].curve
    curve.save(tmp_path / "curve.json")
    assert cn.Curve.load(tmp_path / "curve.json") == curve
    assert json.loads((tmp_path / "curve.json").read_text())["measure"] == "macs"
    assert len(str(curve).splitlines()) == 1 + len(curve.points)
    assert "How small can it go" not in curve._repr_html_()
    assert curve._repr_html_().count("<tr>") == 1 + len(curve.points)
    pytest.importorskip("matplotlib").use("agg")
    lines = {line.get_label(): line for line in curve.plot().get_lines()}
    macs, accuracies = lines["search"].get_data()
    expected = {
        (point.comparison.after.macs / point.comparison.before.macs, point.comparison.after.accuracy)
        for point in curve.points
        if point.method == "search"
    }
    assert set(zip(macs.tolist(), accuracies.tolist(), strict=True)) == expected
    drawn = curve.plot(by="params")
    assert drawn.get_xlabel() == "parameters, as a share of before"
    with pytest.raises(InvalidSettingError, match=r"by: found 'size'\. Accepted: macs, params, time"):
        curve.plot(by="size")
    swept[1].pick(0.3).report(tmp_path / "report.html", curve=curve)
    assert "How small can it go" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert swept[1]._repr_html_() == curve._repr_html_()
    cn.report(tmp_path / "curve.html", curve=swept[1])
    page = (tmp_path / "curve.html").read_text(encoding="utf-8")
    assert "<h1>How small can it go</h1>" in page
    assert "<pre><code>cn.sweep(model, inputs, labels, macs=(0.3, 0.6)" in page
    assert swept[1].curve.settings["inputs"] in page
    assert page.count('<figure class="chart">') == 2  # by multiply-adds and by time


@pytest.mark.slow
def test_the_same_on_several_processes(task, swept):
    found = cn.sweep(*task, macs=[0.3, 0.6], workers=cn.Workers(2), **QUICK)
    for share in (0.3, 0.6):
        assert np.array_equal(found.pick(share).plan.stays, swept[1].pick(share).plan.stays)


def test_bad_input(task, swept):
    with pytest.raises(InvalidSettingError, match="give the shares of one of"):
        cn.sweep(*task, macs=[0.5], units=[0.5])
    with pytest.raises(InvalidSettingError, match=r"shares: found 1\.5"):
        cn.sweep(*task, macs=[0.5, 1.5])
    with pytest.raises(InvalidSettingError, match=r"methods: found \['best'\]"):
        cn.sweep(*task, macs=[0.5], methods=["best"])
    with pytest.raises(InvalidInputError, match="The paper's scores need"):
        cn.sweep(*task[:2], macs=[0.5], methods=["paper"])
    with pytest.raises(InvalidSettingError, match="holds a sweep with other inputs, test"):
        cn.sweep(*task[:2], 1 - task[2] % 2, macs=[0.5], folder=swept[0], **QUICK)
    with pytest.raises(InvalidSettingError, match="holds a sweep with other seed"):
        cn.sweep(*task, macs=[0.5], folder=swept[0], effort="quick", seed=2)
    with pytest.raises(InvalidSettingError, match=r"pick: found search-0\.5. Accepted: search-0\.6, search-0\.3"):
        swept[1].pick(0.5)

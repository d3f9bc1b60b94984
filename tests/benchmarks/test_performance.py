"""benchmarks/performance.py: cases, what they take by part, and the page that is made of them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.formulations.lazy_rows import ReluRows
from critical_neurons_reproduction.score_settings import read_score_settings
from critical_neurons_reproduction.store import Cell, Store
from performance import CAP, Case, Place, list_cases, run_apart, run_cases
from performance_page import LIMITS, TABLE, build_page, collect, list_bars, write_page
from timing import OTHER, Parts, follow_parts, measure

TAKEN = {
    "seconds": 3.0,
    "processor_seconds": 2.0,
    "parts": {"solver": 1.5, OTHER: 0.5},
    "added_megabytes": 10,
    "peak_megabytes": 400,
    "load": 1.0,
    "objective": -1.0,
    "status": "optimal",
    "gap": 0.0,
    "sizes": {"columns": 9, "rows": 2000, "rows_used": 7, "cuts": 5, "gates": 0},
}
DEEP = {**TAKEN, "status": "feasible", "gap": 0.25, "bound": -2.0, "mean_score": 0.9, "units": 9, "below_half": 1}
ACCURACY = {"none": 0.4, "least_squares": 0.8}


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def test_a_part_within_another_counts_for_itself():
    parts = Parts()
    inner = parts.follow("inner", partial(burn, 0.04))

    def work():
        burn(0.02)
        inner()

    parts.follow("outer", work)()
    seconds = parts.seconds
    assert 0.04 <= seconds["inner"] < 0.06
    assert 0.02 <= seconds["outer"] < 0.04


def test_scoring_is_followed_and_nothing_stays_changed():
    original = ReluRows.build
    inputs = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    scores, taken = measure(partial(cn.score, make_model(), inputs, **read_score_settings({"integer": False})))
    assert scores.status is cn.Status.OPTIMAL
    assert {"reading", "bounding", "encoding", "judging rows", "solver"} <= set(taken["parts"])
    assert sum(taken["parts"].values()) == pytest.approx(taken["processor_seconds"], abs=0.01)
    assert taken["peak_megabytes"] >= taken["added_megabytes"] >= 0
    assert ReluRows.build is original
    with pytest.raises(ZeroDivisionError), follow_parts():
        raise ZeroDivisionError
    assert ReluRows.build is original


def test_cases_without_data_or_weights(tmp_path):
    cells = [case.cell for case in list_cases(Place(None, tmp_path))]
    assert len({cell.key for cell in cells}) == len({cell.name for cell in cells}) == len(cells)
    assert not [cell.name for cell in cells if "vgg16" in cell.name or "resnet20" in cell.name]
    assert max(cell.settings["images"] for cell in cells) <= 500
    weights = tmp_path / "weights"
    weights.write_bytes(b"some")
    more = [case.cell for case in list_cases(Place(tmp_path, tmp_path, vgg=weights))]
    assert len([cell for cell in more if "vgg16" in cell.name]) == 2 + 4
    assert not {cell.key for cell in cells} & {cell.key for cell in more}


@pytest.mark.slow
def test_a_case_runs_in_a_process_of_its_own_and_is_ended_by_its_cap(tmp_path):
    place = Place(None, tmp_path)
    np.savez(tmp_path / "digits.npz", inputs=np.random.default_rng(0).random((10, 12)), labels=np.arange(10) % 3)
    case = next(case for case in list_cases(place) if case.cell.name == "units/100")
    found = run_apart(case, place)
    assert found["status"] == "optimal"
    assert found["sizes"]["columns"] == 200 + 1 + 10
    assert run_apart(replace(case, cap=1), place) == {"ended": 1}


def test_what_is_stored_is_not_run_again_and_nothing_behind_a_cap_is(tmp_path, capsys):
    def fail(place):
        raise AssertionError("was run")

    store = Store(tmp_path)
    cells = [Cell(TABLE, f"literal/authors/{images}", {"images": images, "data": "digits"}) for images in (1, 2, 5)]
    cases = {cell.name: Case(cell, fail, CAP, "literal/authors/") for cell in cells}
    store.add(cells[0], TAKEN)
    store.add(cells[1], {"ended": CAP})
    np.savez(tmp_path / "digits.npz")
    assert run_cases(cases, Place(None, tmp_path), store, only=[], again=False) == []
    assert "literal/authors/5: skipped" in capsys.readouterr().out
    assert store.find(cells[2]) is None


class TestPage:
    @pytest.fixture
    def store(self, tmp_path):
        store = Store(tmp_path)
        results = {
            "images/fc3/100": TAKEN,
            "images/fc3/1000": {**TAKEN, "processor_seconds": 2.9},
            "images/lenet5/1000": {**TAKEN, "seconds": 31.0, "processor_seconds": 45.0},
            "units/100": TAKEN,
            "depth/2": {**TAKEN, "parameters": 100},
            "depth/4": {**TAKEN, "processor_seconds": 1.0, "parameters": 50},
            "side/16": TAKEN,
            "workers/1": TAKEN,
            "literal/ours/1": TAKEN,
            "literal/folded/1": {**TAKEN, "processor_seconds": 3.0},
            "literal/authors/1": {"ended": CAP},
            "literal/folded/2": {"failed": "cvxpy:CLARABEL failed"},
            "deep/vgg16/paper": DEEP,
            "worth/vgg16/paper": {"before": 0.9, "accuracy": {"none": 0.5, "least_squares": 0.7}},
            "worth/vgg16/cn.search": {"before": 0.9, "accuracy": ACCURACY},
        }
        for name, result in results.items():
            store.add(Cell(TABLE, name, {"data": "digits"}), result)
        return store

    def test_bars_are_read_off_the_figures(self, store):
        results = collect(store.find_all(TABLE))
        states = {bar.asked: bar.met for bar in list_bars(results)}
        found = list(states.values())
        assert found[: len(LIMITS)] == [True, False]
        assert states["FC-3: 1000 images within about 12 times what 100 take"] is True
        assert states["LeNet-5: 1000 images within about 12 times what 100 take"] is None
        assert states["FC-3: seconds grow with an exponent of at most 1 in images"] is True
        assert states["two hidden layers: seconds grow with an exponent of at most 1.3 in parameters"] is None
        assert [met for asked, met in states.items() if "VGG-16, paper" in asked] == [True]

    def test_everything_stored_is_reported(self, store, tmp_path):
        page = tmp_path / "performance.md"
        write_page(store.find_all(TABLE), page)
        text = page.read_text()
        assert "feasible, gap 25.0%" in text
        assert "Fitted exponent -1.00 in layers, 1.00 in parameters." in text
        assert "Paper, relaxed: no scores have an objective below -2.000." in text
        assert f"ended after {CAP}" in text
        assert "the solver failed" in text
        assert "| cn.search | 40.00 | 80.00 |" in text
        assert "Without compensation the better program, paper, relaxed, is 10.00 points above cn.search." in text
        assert "With compensation the better program, paper, relaxed, is 10.00 points below cn.search." in text
        assert (tmp_path / "performance" / "growth.svg").stat().st_size > 0
        for line in text.splitlines():
            assert not line.startswith("|") or line.endswith("|")

    def test_weights_are_not_mixed(self, tmp_path):
        store = Store(tmp_path)
        for name, weights in (("worth/vgg16/paper", "old"), ("deep/vgg16/paper", "new")):
            store.add(Cell(TABLE, name, {"network": "vgg16", "weights": weights}), DEEP)
        assert list(collect(store.find_all(TABLE))) == ["deep/vgg16/paper"]

    def test_an_empty_store_has_a_page(self, tmp_path):
        write_page([], tmp_path / "performance.md")
        assert "Nothing has been measured yet." in build_page([], {}, "performance")


def test_tables_have_as_many_cells_as_headings(tmp_path):
    store = Store(tmp_path)
    for name, result in (("literal/ours/1", TAKEN), ("literal/authors/2", {"ended": CAP}), ("images/fc3/10", TAKEN)):
        store.add(Cell(TABLE, name, {"data": "digits"}), result)
    records = store.find_all(TABLE)
    text = build_page(records, collect(records), "performance")
    widths = [
        {line.count("|") for line in table.splitlines() if line.startswith("|")} for table in text.split("\n\n")
    ]
    assert all(len(width) <= 1 for width in widths)

"""benchmarks/passes.py: the cases, and the page's section on targets."""

from __future__ import annotations

import json

import pytest

import passes_page
from passes import list_cases
from passes_page import MOST_PASSES, describe_passes

LINE = {
    "pass_seconds": 1.0,
    "search_seconds": 7.0,
    "refit_seconds": 4.0,
    "passes": 11.0,
    "parts": {"refitting": 4.0, "other": 0.5},
    "peak_megabytes": 5000,
    "load": 1.0,
}


@pytest.fixture
def describe(tmp_path, monkeypatch):
    def write(*lines):
        path = tmp_path / "passes.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        monkeypatch.setattr(passes_page, "RESULTS", path)
        return describe_passes()

    return write


def test_every_target_is_a_case():
    assert set(MOST_PASSES) <= set(list_cases())


@pytest.mark.parametrize(
    ("name", "found", "state"),
    [
        ("resnet18/256/quick", {}, "met"),
        ("resnet18/256/quick", {"passes": 12.1}, "**not met**"),
        ("resnet18/256/standard", {"passes": 12.1}, "met"),
        ("vgg16_bn/256/quick", {"peak_megabytes": 6001}, "**not met**"),
        ("vgg16/1000/quick", {"peak_megabytes": 6001}, "met"),
        ("resnet18/32/quick", {"passes": 99.0}, ""),
    ],
)
def test_what_is_measured_is_compared_with_its_target(describe, name, found, state):
    network, images, effort = name.split("/")
    rows = [row for row in describe({"name": name, **LINE, **found}).splitlines() if row.startswith(f"| {network} |")]
    row = next(row for row in rows if f"| {images} | {effort} |" in row)
    assert row.endswith(f"| 1.0 | {state} |")


def test_what_was_measured_before_later_changes_is_not_shown(describe):
    old = {"name": "resnet18/256/quick", "commit": "0123abc", **LINE}
    new = {**old, "name": "resnet50/256/quick", "passes": 10.5}
    del new["commit"]
    section = describe(old, new)
    assert section.count("not measured") == len(MOST_PASSES) - 1
    assert "0123abc" not in section
    assert "| 10.5 |" in section
    assert "resnet18/256/quick" not in section

"""The soak runs, names what goes wrong, and goes on where it was stopped."""

from collections import Counter

import pytest

import soak
from soak_networks import go_the_whole_way


@pytest.mark.slow
def test_networks_go_the_whole_way():
    assert go_the_whole_way(4) == "searched"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [15, 29, 31, 33, 47])
def test_networks_with_programs(seed):
    assert "scored" in go_the_whole_way(seed)


def test_what_goes_wrong_is_named():
    def check(seed):
        raise KeyError("weight")

    found = soak.attempt(check, "network", 3, Counter())
    assert found["seed"] == 3
    assert found["error"] == "KeyError: 'weight'"


def test_what_is_stored_is_not_run_again(monkeypatch, tmp_path):
    def count(seed):
        ran.append(seed)
        return "fine"

    ran = []
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "soak.jsonl")
    monkeypatch.setattr(soak, "find_commit", lambda: "0123456789ab")
    monkeypatch.setattr(soak, "list_kinds", lambda files, networks: [("network", count, networks, 2)])
    soak.run(0, 3)
    soak.run(0, 5)
    assert ran == [0, 1, 2, 4]
    page = soak.write_page(soak.read_lines())
    assert "| network | 4 | 4 fine | 0 | 0 |" in page
    assert "`0123456789ab`" in page


def test_violations_are_mended_when_their_seeds_run_well_again():
    bad = {"seed": 7, "error": "KeyError", "at": "here"}
    line = {
        "kind": "network",
        "first": 0,
        "count": 50,
        "cpu_seconds": 1.0,
        "outcomes": {"fine": 49},
        "violations": [bad],
    }
    again = {
        "kind": "network",
        "again": [7],
        "count": 0,
        "cpu_seconds": 1.0,
        "outcomes": {"fine": 1},
        "violations": [],
    }
    assert list(soak.list_rows([line])) == [("network", "50", "49 fine", 0, 1, 1), ("", bad)]
    assert list(soak.list_rows([line, again])) == [("network", "50", "50 fine", 1, 0, 2)]
    assert list(soak.list_rows([line, {**again, "violations": [bad]}]))[1:] == [("", bad)]

"""Store: what goes in comes out, whatever else is in the file and whoever else is writing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from critical_neurons.errors import InvalidFileError, InvalidSettingError, OutputError
from critical_neurons_reproduction import store as module
from critical_neurons_reproduction.store import Cell, CellState, Store
from tests.forging import forge

CELL = Cell("table2", "mnist fc3, seed 0", {"data": "mnist", "loss_weight": 5.0, "widths": (300, 100), "seed": 0})
LINES_EACH = 200


def test_results_come_back(tmp_path):
    store = Store(tmp_path / "deep" / "results")
    assert store.find(CELL) is None
    added = store.add(CELL, {"accuracy": np.float64(0.95), "removed": [1, 2], "note": None})
    found = Store(str(tmp_path / "deep" / "results")).find(CELL)
    assert found == added
    assert found.result == {"accuracy": 0.95, "removed": [1, 2], "note": None}
    assert found.cell == CELL
    assert set(found.versions) >= {"python", "critical_neurons", "torch", "highspy"}
    assert found.machine["cores"] >= 1
    assert found.recorded.endswith("+00:00")
    (line,) = (tmp_path / "deep" / "results" / "table2.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == CELL.key


def test_equal_settings_have_equal_keys():
    again = Cell("table2", CELL.name, {"seed": np.int64(0), "widths": [300, 100], "loss_weight": 5, "data": "mnist"})
    assert again.key == CELL.key
    assert again == CELL
    assert hash(again) == hash(CELL)


@pytest.mark.parametrize(
    "change",
    [
        {"table": "table1"},
        {"name": "mnist fc3, seed 1"},
        {"settings": {**CELL.settings, "loss_weight": 5.5}},
        {"settings": {**CELL.settings, "further": None}},
        {"profile": "quick"},
        {"schedule": "3 of 30 epochs"},
    ],
)
def test_cells_that_differ_do_not_find_each_other(tmp_path, change):
    store, other = Store(tmp_path), replace(CELL, **change)
    store.add(other, {"accuracy": 0.5})
    assert store.find(CELL) is None
    store.add(CELL, {"accuracy": 0.9})
    assert store.find(CELL).result == {"accuracy": 0.9}
    assert store.find(other).result == {"accuracy": 0.5}


def test_the_newest_line_counts(tmp_path):
    store = Store(tmp_path)
    for accuracy in (0.1, 0.3, 0.2):
        store.add(CELL, {"accuracy": accuracy})
    assert store.find(CELL).result == {"accuracy": 0.2}
    assert len((tmp_path / "table2.jsonl").read_text().splitlines()) == 3


def test_results_of_another_method_stay_but_do_not_count(tmp_path, monkeypatch):
    store, shortened = Store(tmp_path), replace(CELL, schedule="3 of 30 epochs")
    store.add(CELL, {"accuracy": 0.9})
    store.add(shortened, {"accuracy": 0.8})
    monkeypatch.setattr(module, "METHOD_VERSION", module.METHOD_VERSION + 1)
    assert store.find(CELL) is None
    assert store.find_best(CELL) == [None]
    assert store.find_all(CELL.table) == []
    assert store.find_missing([CELL]) == [CELL]
    assert store.find_problems() == []
    assert len((tmp_path / "table2.jsonl").read_text().splitlines()) == 2


def test_all_results_of_a_table(tmp_path):
    store, other = Store(tmp_path), replace(CELL, name="another")
    assert store.find_all(CELL.table) == []
    store.add(CELL, {"accuracy": 0.7})
    second = store.add(other, {"accuracy": 0.8})
    newest = store.add(CELL, {"accuracy": 0.9})
    store.add(replace(CELL, table="table1"), {"accuracy": 0.1})
    assert store.find_all(CELL.table) == [second, newest]


def test_status_tells_done_from_shortened_from_missing(tmp_path):
    store = Store(tmp_path)
    missing, short, done = (replace(CELL, name=f"cell {at}") for at in range(3))
    quick = replace(missing, profile="quick")
    store.add(quick, {"accuracy": 0.1})
    store.add(replace(short, schedule="1 of 30 epochs"), {"accuracy": 0.2})
    store.add(replace(short, schedule="3 of 30 epochs"), {"accuracy": 0.3})
    store.add(done, {"accuracy": 0.4})
    store.add(replace(done, schedule="3 of 30 epochs"), {"accuracy": 0.5})
    other = Cell("table1", "idp", {})
    assert store.report_status([missing, short, done, quick, other]) == [
        CellState("table2", "cell 0", "missing"),
        CellState("table2", "cell 1", "shortened", "3 of 30 epochs"),
        CellState("table2", "cell 2", "done", "the paper's"),
        CellState("table2", "cell 0", "done", "the paper's"),
        CellState("table1", "idp", "missing"),
    ]
    found = store.find_best(short, replace(done, schedule="3 of 30 epochs"), missing)
    assert [record and record.result for record in found] == [{"accuracy": 0.3}, {"accuracy": 0.4}, None]
    assert store.find_missing([done, missing]) == [missing]


def test_damaged_lines_are_named_and_left_alone(tmp_path):
    store, path = Store(tmp_path), tmp_path / "table2.jsonl"
    store.add(CELL, {"accuracy": 0.9})
    whole = path.read_bytes()
    changed = whole.replace(b'"seed": 0', b'"seed": 1')
    later = whole.replace(b'"version": 2', b'"version": 99')
    without = forge(whole.decode(), lambda data: data.pop("result")).encode() + b"\n"
    moved = forge(whole.decode(), lambda data: data["cell"]["settings"].update(seed=1)).encode() + b"\n"
    lines = [b"\xff\xfe\n", b"\n", b"[1, 2]\n", changed, later, without, moved, whole[:-40]]
    path.write_bytes(whole + b"".join(lines))
    torn = path.read_bytes()
    second = replace(CELL, name="mnist fc3, seed 1")
    store.add(second, {"accuracy": 0.8})
    assert path.read_bytes().startswith(torn)
    assert store.find(CELL).result == {"accuracy": 0.9}
    assert store.find(second).result == {"accuracy": 0.8}
    assert store.find_problems() == [
        f"{path}, line 2: not a complete line of JSON.",
        f"{path}, line 4: not a critical_neurons cell.",
        f"{path}, line 5: changed since it was written: its digest differs.",
        f"{path}, line 6: format version 99; supported: 2.",
        f"{path}, line 7: Object missing required field `result`.",
        f"{path}, line 8: its key does not match its cell.",
        f"{path}, line 9: not a complete line of JSON.",
    ]


@pytest.mark.parametrize("cut", [1, 2, 300])
def test_a_torn_last_line_does_not_swallow_the_next(tmp_path, cut):
    store, path = Store(tmp_path), tmp_path / "table2.jsonl"
    store.add(CELL, {"accuracy": 0.9})
    path.write_bytes(path.read_bytes()[:-cut])
    second = replace(CELL, name="mnist fc3, seed 1")
    store.add(second, {"accuracy": 0.8})
    assert store.find(second).result == {"accuracy": 0.8}
    assert len(store.find_problems()) == (0 if cut == 1 else 1)  # without its newline alone a line is whole


WRITER = """
import sys
from pathlib import Path
from critical_neurons_reproduction.store import Cell, Store
folder, writer, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = Store(folder)
(folder / f"ready {writer}").touch()
while len(list(folder.glob("ready *"))) < 2:
    pass
for at in range(count):
    store.add(Cell("table2", f"{writer} {at}", {}), {"padding": "x" * (37 * at)})
"""


def test_two_processes_write_at_once(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name, str(LINES_EACH)])
        for name in ("first", "second")
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    store = Store(tmp_path)
    assert store.find_problems() == []
    lines = (tmp_path / "table2.jsonl").read_text().splitlines()
    names = [json.loads(line)["cell"]["name"] for line in lines if line]
    for writer in ("first", "second"):
        assert [name for name in names if name.startswith(writer)] == [f"{writer} {at}" for at in range(LINES_EACH)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": "Table 2"}, "table: found 'Table 2'. Accepted: lower-case letters"),
        ({"table": "../table2"}, "as it names a file"),
        ({"name": ""}, "a cell is named ''"),
        ({"profile": "slow"}, "profile='slow'. Accepted: 'quick', 'full'"),
        ({"schedule": ""}, "schedule=''"),
        ({"settings": [1]}, "settings: found list"),
        ({"settings": {"deep": [1, {"data": np.zeros(2)}]}}, r"settings.deep\[1\].data: found array"),
        ({"settings": {1: 2}}, "settings: found {1: 2}"),
        ({"settings": {"rate": float("nan")}}, "settings.rate: found nan. Accepted: text, finite numbers"),
    ],
)
def test_bad_cells_are_refused(change, message):
    with pytest.raises(InvalidSettingError, match=message):
        replace(CELL, **change)


def test_bad_results_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(InvalidSettingError, match=r"seed 0: result.accuracy: found inf"):
        Store(tmp_path).add(CELL, {"accuracy": float("inf")})
    assert list(tmp_path.iterdir()) == []


def test_paths_that_do_not_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="the result cannot be written"):
        Store(tmp_path / "file").add(CELL, {})
    (tmp_path / "table2.jsonl").mkdir()
    with pytest.raises(InvalidFileError, match=r"table2\.jsonl: not a regular file"):
        Store(tmp_path).find(CELL)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk(tmp_path):
    (tmp_path / "table2.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"table2\.jsonl: the result cannot be written \(No space left"):
        Store(tmp_path).add(CELL, {})

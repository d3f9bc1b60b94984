"""The notebooks run, and print what is stored in them but for the figures, which differ between processors."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from tests.zoo import first_or_slow

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
FIGURE = re.compile(r"[-+]?\d[\d.,]*(e[-+]\d+)?")


def read_cells(name):
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run(name):
    """What every cell printed, and what is stored."""
    names = {}
    for number, cell in enumerate(read_cells(name)):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        stored = "".join("".join(each["text"]) for each in cell["outputs"] if each["output_type"] == "stream")
        yield output.getvalue(), stored


@pytest.fixture(autouse=True)
def without_a_screen(monkeypatch, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    yield
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.mark.parametrize("name", first_or_slow("five-minutes", "researcher"))
def test_it_runs_and_prints_what_is_stored(name):
    if name == "researcher":
        pytest.importorskip("cvxpy")
    for output, stored in run(name):
        assert re.sub(r"\s+", " ", FIGURE.sub("#", output)) == re.sub(r"\s+", " ", FIGURE.sub("#", stored))


@pytest.mark.parametrize("name", ["five-minutes", "researcher"])
def test_outputs_are_stored_without_errors(name):
    cells = read_cells(name)
    assert all(cell["execution_count"] for cell in cells)
    outputs = [each for cell in cells for each in cell["outputs"]]
    assert not [each for each in outputs if each["output_type"] == "error"]
    assert sum("image/png" in each.get("data", {}) for each in outputs) == 2

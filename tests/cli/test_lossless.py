"""The command `lossless`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import critical_neurons as cn
from critical_neurons.cli.commands import app

MODELS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].bias[:3] -= 9
    return model
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    (tmp_path / "boxed_models.py").write_text(MODELS)
    inputs = np.random.default_rng(0).random((9, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.repeat([0, 1, 2], 3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["lossless", "boxed_models:net", *map(str, arguments)])


def test_saves_a_network_that_loads(workspace):
    done = run("--input-shape", 6, "--box", "0,1", "--save", "smaller", "--record", "record.json", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["parameters"]["after"] < result["parameters"]["before"]
    import boxed_models

    model, smaller = boxed_models.net(), cn.load("smaller", boxed_models.net)
    points = torch.rand(20, 6)
    torch.testing.assert_close(smaller(points), model(points), rtol=1e-4, atol=1e-5)
    assert cn.Stability.load("record.json").to_dict()["units"] == result["stability"]["units"]


@pytest.mark.parametrize("where", [("--box", "data"), ("--radius", "0.01"), ("--box", "0,1", "--radius", "0.01")])
def test_boxes_of_data(where):
    done = run("--data", "data.npz", *where, "--record", "record.json")
    assert done.exit_code == 0, done.output
    assert "Undecided" in done.stdout
    assert "Parameters:" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--input-shape", 6, "--box", "0,1"), "where the result goes"),
        (("--input-shape", 6, "--record", "r.json"), "give the range of the inputs"),
        (("--input-shape", 6, "--box", "1,0", "--record", "r.json"), "it is empty"),
        (("--input-shape", 6, "--box", "0,inf", "--record", "r.json"), "NaN or infinite"),
        (("--input-shape", 6, "--box", "0", "--record", "r.json"), "two numbers"),
        (("--input-shape", 6, "--box", "data", "--record", "r.json"), "with --data"),
        (("--data", "data.npz", "--box", "0,0.5", "--record", "r.json"), "lie outside"),
        (("--data", "data.npz", "--box", "0,1", "--record", "data.npz"), "this command reads it"),
    ],
)
def test_mistakes_end_in_a_sentence(options, message):
    done = run(*options)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output

"""Commands on ONNX files: they are models like others, and what is written is one again."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import critical_neurons as cn
from critical_neurons.cli.commands import app
from critical_neurons.removal.metrics import count_macs, count_parameters

TOLERANCE = 1e-5
SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """A small network as an ONNX file, and inputs with the classes that it gives them."""
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 3)),
    ).eval()
    inputs = torch.randn(150, *SHAPE)
    cn.export(model, path, inputs)
    with torch.no_grad():
        outputs = model(inputs)
    return path.read_bytes(), inputs.numpy(), (outputs - outputs.mean(0)).argmax(1).numpy()


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch, content):
    (tmp_path / "model.onnx").write_bytes(content[0])
    np.savez(tmp_path / "data.npz", inputs=content[1], labels=content[2])
    monkeypatch.chdir(tmp_path)


def succeed(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def refuse(*arguments):
    before = sorted(os.listdir())
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir()) == before
    return " ".join(result.stderr.split())


def run_onnx(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: inputs})[0]


def test_compress_from_onnx_to_onnx(content):
    options = ("--macs", 0.5, "--effort", "quick", "--output", "smaller.onnx", "--no-onnx")
    result = succeed("compress", "model.onnx", "data.npz", *options)
    assert "Written: smaller.onnx" in result.stderr
    assert sorted(os.listdir()) == ["data.npz", "model.onnx", "smaller.onnx"]
    before, after = (cn.from_onnx(path) for path in ("model.onnx", "smaller.onnx"))
    row = torch.from_numpy(content[1][:1])
    assert count_macs(after, row) <= 0.5 * count_macs(before, row)
    assert count_parameters(after) < count_parameters(before)
    assert Path("smaller.onnx").stat().st_size < len(content[0])
    outputs, originals = (run_onnx(path, content[1]) for path in ("smaller.onnx", "model.onnx"))
    assert outputs.shape == originals.shape
    with torch.no_grad():
        assert np.allclose(outputs, after(torch.from_numpy(content[1])), atol=TOLERANCE)
    # Half the work, refitted: far nearer to the original than its mean output is.
    assert ((outputs - originals) ** 2).mean() < 0.5 * ((originals - originals.mean(0)) ** 2).mean()


def test_compress_without_labels(content):
    np.savez("inputs.npz", inputs=content[1])
    options = ("--macs", 0.5, "--effort", "quick", "--save", "made", "--no-onnx")
    result = succeed("compress", "model.onnx", "inputs.npz", *options)
    assert "150 inputs of shape 1x8x8, without labels" in result.stderr
    with_labels = succeed("compress", "model.onnx", "data.npz", *options, "--overwrite")
    assert "accuracy" not in result.stdout.replace("No accuracy", "").replace("an accuracy", "")
    assert "accuracy" in with_labels.stdout
    for option in (("--max-drop", 0.01), ("--macs", 0.5, "--paper")):
        reported = refuse("compress", "model.onnx", "inputs.npz", *option, "--save", "smaller")
        assert ": needs the right classes, but inputs.npz holds no labels" in reported


@pytest.mark.slow
def test_every_command_takes_the_file(content):
    assert "3 of 4 layers can be removed" in succeed("inspect", "model.onnx").stdout
    scoring = ("--per-class", 1, "--formulation", "linearised", "--macs", 0.5)
    succeed("score", "model.onnx", "data.npz", *scoring, "--output", "scores.json")
    outputs = ("--output", "pruned.onnx", "--save", "folder")
    succeed("prune", "model.onnx", "--scores", "scores.json", "--macs", 0.5, *outputs)
    measured = ("--data", "data.npz", "--no-onnx", "--repeats", 1)
    assert "multiply-adds" in succeed("evaluate", "model.onnx", "folder", *measured).stdout
    succeed("export", "model.onnx", "folder", "--output", "again.onnx")
    found = [run_onnx(path, content[1]) for path in ("pruned.onnx", "again.onnx")]
    assert np.allclose(*found, atol=TOLERANCE)


def test_an_open_shape_comes_from_the_data_or_an_option():
    model = onnx.load("model.onnx")
    for axis in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        axis.Clear()
        axis.dim_param = "side"
    onnx.save(model, "open.onnx")
    assert "say what an input looks like, with --input-shape 3,32,32 or --data" in refuse("inspect", "open.onnx")
    for options in (("--input-shape", "1,8,8"), ("--data", "data.npz")):
        assert "layers can be removed" in succeed("inspect", "open.onnx", *options).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compress", "gone.onnx", "data.npz", "--macs", 0.5, "--output", "s.onnx"), "gone.onnx: no such ONNX file"),
        (("compress", "model.onnx", "data.npz", "--macs", 0.5), "a folder with --save, or a file with --output"),
        (("compress", "model.onnx", "data.npz", "--macs", 0.5, "--output", "./model.onnx"), "reads it, for MODEL"),
        (("score", "model.onnx", "data.npz", "--output", "model.onnx"), "reads it, for MODEL"),
        (("inspect", "model.onnx", "--weights", "data.npz"), "--weights: model.onnx holds its weights"),
        (("inspect", "model.onnx", "--input-shape", "1,9,9"), "reads inputs of shape (1, 8, 8), not (1, 9, 9)"),
        (("prune", "model.onnx", "--scores", "s.json", "--units", 0.5, "--output", "s.h5"), "or in .onnx or .pt2"),
        (("prune", "model.onnx", "--scores", "s.json", "--units", 0.5, "--output", "model.onnx"), "for MODEL"),
    ],
)
def test_refusals(arguments, message):
    assert message in refuse(*arguments)


@pytest.mark.parametrize("size", [0, 100, 4000])
def test_a_damaged_file_is_one_sentence(content, size):
    Path("model.onnx").write_bytes(content[0][:size])
    assert "Error: model.onnx: " in refuse("inspect", "model.onnx")

"""Law: whenever a run is interrupted, ended or killed, nothing is half-written, and it can be repeated."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest

import critical_neurons as cn
from critical_neurons.io.checkpoint import read_results
from critical_neurons_reproduction.datasets import digest_pictures
from critical_neurons_reproduction.store import Store
from tests.blocks import write_blocks

KILLS = 25
"""Of every command."""

REPEATED = 5
"""After one of this many kills the whole run is repeated; all others follow each other in the same folder."""

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
MODEL = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
"""
COMMANDS = {
    "score": "score killed_model:build data.npz --per-class 1 --output scores.json",
    "prune": "prune killed_model:build --scores given.json --units 0.5 --compensate least_squares"
    " --calibration data.npz --save pruned --plan plan.json",
    "compress": "compress killed_model:build data.npz --macs 0.5 --effort quick --save smaller --output smaller.onnx"
    " --report report.html",
    "reproduce": "reproduce lambda --profile quick --seeds 1 --only lambda-5/balanced --data blocks",
}
OUTPUTS = ["scores.json", "pruned", "plan.json", "smaller", "smaller.onnx", "report.html"]

START = """
from critical_neurons import interrupted_start
interrupted_start.end_cleanly()
from critical_neurons_reproduction.datasets import PICTURES
PICTURES["fashion_mnist"] = "{digest}"
from critical_neurons.cli import main
main()
"""
"""`reproduce` takes no other pictures than the original ones, but for tests."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "killed_model.py").write_text(MODEL)
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz", inputs=generator.random((48, 1, 8, 8), dtype=np.float32), labels=np.arange(48) % 4
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path[1:]))
    return tmp_path


def start(command, code=""):
    begin = ["-c", code] if code else ["-m", "critical_neurons"]
    return subprocess.Popen(
        [sys.executable, *begin, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(command, code=""):
    with start(command, code) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said


def check_outputs(folder):
    """What is there is whole."""
    check = {
        "scores.json": cn.Scores.load,
        "plan.json": cn.Plan.load,
        "pruned": read_results,
        "smaller": read_results,
        "smaller.onnx": onnx.load,
        "report.html": lambda path: path.read_text().rstrip().endswith("</html>") or pytest.fail("half a page"),
    }
    for name in OUTPUTS:
        if (folder / name).exists():
            check[name](folder / name)
    if (folder / "results").exists():
        assert not Store(folder / "results").find_problems()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_moment(name, folder):
    command, code, generator = COMMANDS[name], "", random.Random(name)
    if name == "prune":
        run(COMMANDS["score"])
        (folder / "scores.json").rename("given.json")
    if name == "reproduce":
        write_blocks(folder / "blocks")
        code = START.format(digest=digest_pictures(folder / "blocks" / "fashion_mnist", cache=folder / "cache"))
    kept = sorted(each.name for each in folder.iterdir())
    began = time.monotonic()
    run(command, code)
    whole = time.monotonic() - began
    check_outputs(folder)
    for turn in range(KILLS):
        clean(folder, kept)
        number = generator.choice(SIGNALS)
        with start(command, code) as process:
            time.sleep(generator.uniform(0, whole))
            process.send_signal(number)
            _, said = process.communicate(timeout=300)
        assert process.returncode in (0, 130, 143, -number), said
        assert "Traceback" not in said or is_of_python(said), said
        check_outputs(folder)
        if number != signal.SIGKILL:  # then nothing can be cleared away
            assert not list(folder.rglob(".*.part"))
        if turn % REPEATED == 0:
            clean(folder, kept, whole=False)
            run(command, code)
            check_outputs(folder)


def clean(folder, kept, *, whole=True):
    """Outputs that are there go; `whole`: as before the first run, else `reproduce` has nothing left to do."""
    for each in folder.iterdir():
        if each.name in OUTPUTS or (whole and each.name not in kept):
            (shutil.rmtree if each.is_dir() else os.remove)(each)


def is_of_python(said):
    """From before the first line of the package."""
    return "critical_neurons/" not in said

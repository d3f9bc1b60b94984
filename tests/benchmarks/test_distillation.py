"""benchmarks/distillation.py: a cell of a tiny network, what is stored, and the page made of it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import critical_neurons as cn
import distillation
from critical_neurons_reproduction.datasets import LabelledImages
from distillation import HARNESS, OLDEST_HARNESS, OURS, measure, reestimate
from distillation_page import describe, draw
from preferring import Subject

FEW = cn.Distillation(steps=2, learning_rate=1e-3)
STORED = {
    "harness": HARNESS,
    "part": "test",
    "images": 40,
    "draw": 0,
    "settings": FEW.to_dict(),
    "date": "2026-01-01",
    "machine": "some",
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
        )
        inputs = torch.randn(40, 6)
    return Subject(model.eval(), inputs, model(inputs).argmax(1), {})


@pytest.mark.parametrize("method", [OURS, "greedy elimination"])
def test_a_cell_has_every_step_and_its_seconds(subject, method):
    found = measure(subject, {"macs": 0.6}, method, LabelledImages(subject.inputs, subject.labels), FEW, 0)
    assert found["accuracy"]["before"] == 1.0
    assert set(found["accuracy"]) - {"before"} == set(found["processor_seconds"]) - {"choosing"}
    assert sum(found["kept"].values()) < 23
    line = {**STORED, **found, "network": "resnet20", "macs": 0.6, "method": method, "versions": {"torch": "2"}}
    line["threads"] = 2
    page = "\n".join(describe([line], ""))
    assert f"| ResNet-20 | 0.6 of the MACs | {method} | 40 | 1 | 100.00 |" in page
    assert "for ResNet-20 at 0.6 of the MACs on 2 threads" in " ".join(page.split())
    assert b"<svg" in draw([line])


def test_batch_norms_have_the_statistics_of_the_inputs(subject):
    found = reestimate(subject.model, subject.inputs)
    torch.testing.assert_close(found[1].running_mean, found[0](subject.inputs).mean(0))
    assert not found.training
    assert not torch.equal(found[1].running_mean, subject.model[1].running_mean)


def test_cells_that_are_stored_are_known_again(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(distillation, "RESULTS", path)
    assert distillation.read_lines() == []
    stored = [(OLDEST_HARNESS - 1, 0.3), (HARNESS - 1, 0.5), (OLDEST_HARNESS, 0.73), (HARNESS, 0.5)]
    lines = [{"harness": harness, "network": "resnet20", "macs": macs} for harness, macs in stored]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert distillation.read_lines() == lines[2:]
    assert describe([], "") == ["Nothing has been measured on test images yet."]

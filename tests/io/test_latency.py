"""Latency budgets: a table of layer times by width, met by what the smaller model takes. The clock is made up."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.costs import count_cost
from critical_neurons.errors import InvalidSettingError
from critical_neurons.io import latency
from critical_neurons.io.latency import Stopwatch, meet_latency
from critical_neurons.io.onnx_runtime import convert_layer, open_onnx
from critical_neurons.removal.metrics import count_macs
from critical_neurons.structure import find_structure

CALL, MAC = 2e-6, 1e-9
"""Seconds of a call, and of a multiply-add, on the machine made up."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )


INPUTS = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(
        latency, "take_times", lambda timed: [CALL + MAC * count_macs(each.module, each.row) for each in timed]
    )


@pytest.mark.parametrize("onnx", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_table_gives_the_time_at_every_width(clock, onnx):
    model = build()
    structure = Stopwatch(model, INPUTS, onnx=onnx).add_table(find_structure(model, INPUTS))
    kept = np.ones(structure.unit_count + 1)
    for share in (1.0, 0.5):
        kept[:-1] = np.arange(structure.unit_count) % 8 < 8 * share
        expected = 1e9 * CALL + count_cost(structure, kept, "macs")
        assert count_cost(structure, kept, "latency") == pytest.approx(expected, rel=0.01)
    assert type(structure).from_dict(structure.to_dict()).latency[-1].amount == structure.latency[-1].amount


def test_compress_meets_the_share_of_the_time(clock):
    model, reported = build(), []
    found = cn.compress(model, INPUTS, latency=0.7, keep="0", effort="quick", onnx=False, detail=reported.append)
    before, after = (CALL + MAC * count_macs(each, INPUTS) for each in (model, found.model))
    assert 0.5 * before < after <= 0.7 * before
    assert len(found.plan.kept["0"]) == 8
    assert any("of the time in torch" in text for text in reported)


def test_times_are_of_the_processor():
    """A machine that is busy with something else does not count."""
    (taken,) = latency.take_times([latency.Timed(nn.Identity(), INPUTS[:1], lambda rows: time.sleep(0.002))])
    assert taken < 0.001


def test_layers_are_really_timed():
    model = build()
    watch = Stopwatch(model, INPUTS, onnx=False)
    structure = watch.add_table(find_structure(model, INPUTS))
    assert count_cost(structure, np.ones(structure.unit_count + 1), "latency") > 0
    assert 0.2 < watch.compare(model) < 5


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), torch.rand(1, 3, 8, 8)),
        (nn.Conv1d(3, 4, 3, dilation=2, bias=False), torch.rand(1, 3, 9)),
        (nn.Linear(5, 3, bias=False), torch.rand(1, 2, 5)),
    ],
)
def test_a_layer_computes_the_same_in_onnxruntime(module, example):
    run = open_onnx(convert_layer(module, example))
    torch.testing.assert_close(run(example), module(example).detach())


def test_a_missed_share_is_corrected():
    asked = []

    def find(share: float) -> float:
        asked.append(share)
        return share

    assert meet_latency(0.5, find, find, lambda share: 0.2 + share * 0.8) <= 0.5
    assert asked[0] == 0.5 > asked[-1]


def test_what_cannot_be_met_is_said(clock):
    with pytest.raises(InvalidSettingError, match=r"latency: 0.5 .* was not met; the last smaller model took 0.9"):
        meet_latency(0.5, float, float, lambda share: 0.9)
    with pytest.raises(InvalidSettingError, match=r"latency: 0.05 .* cannot be met.*Give a larger share"):
        cn.compress(build(), INPUTS, latency=0.05, effort="quick", onnx=False)
    with pytest.raises(InvalidSettingError, match="latency: needs a search"):
        cn.compress(build(), INPUTS, torch.zeros(20), latency=0.5, paper=True)
    with pytest.raises(InvalidSettingError, match="latency: found 2"):
        cn.compress(build(), INPUTS, latency=2)
    with pytest.raises(InvalidSettingError, match="latency is for compress"):
        cn.score(build(), INPUTS[:2], torch.zeros(2, dtype=torch.long), budget=cn.Budget(latency=0.5))

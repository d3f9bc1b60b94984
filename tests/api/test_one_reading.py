"""A model is run for its structure once, from the search to the smaller model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.structure.run import LabelledRun

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def count(monkeypatch):
    """How often a labelled run has been made."""
    runs, run = [], LabelledRun.run
    monkeypatch.setattr(LabelledRun, "run", lambda self, *args: runs.append(self) or run(self, *args))
    return lambda: len(runs)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def test_from_search_to_the_smaller_model(count):
    model = build()
    scores = cn.search(model, INPUTS, units=0.5, effort="quick")
    assert count() == 1
    plan = cn.plan(scores)
    smaller = cn.prune(model, plan, INPUTS, compensate="least_squares")
    cn.mask(model, plan)
    assert smaller[0].out_features < 6
    assert count() == 1


@pytest.mark.parametrize("keep", [(), ["0"]])
def test_compress(count, keep):
    cn.compress(build(), INPUTS, units=0.5, keep=keep, effort="quick", onnx=False)
    assert count() == 1


def test_sweep(count):
    cn.sweep(build(), INPUTS, [0, 1] * 8, units=[0.7, 0.5], effort="quick")
    assert count() == 1


def test_score(count):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    plan = cn.plan(cn.score(model, INPUTS, [0, 1] * 8, formulation="linearised"), units=0.5)
    cn.prune(model, plan, INPUTS)
    assert count() == 1

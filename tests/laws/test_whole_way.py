"""Law: every network of the zoo goes the whole way, and shared or grouped units are removed alike everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import critical_neurons as cn
from tests.zoo import GRAPHS, MAX_POOLED, ZOO, build_model, draw_inputs

SAME_OUTPUTS = 1e-9
LOGIT_TOLERANCE = 1e-9
LITTLE_LOSS = 0.05
"""λ that lets the scores fall."""


@pytest.mark.networks(
    *("mlp", "nest", "constants of every channel", "resnet", "mobilenet", "concatenation on a stream", "decoder"),
    *("grouped convolutions", "batch norm behind the relu, then padding", "leaky relus", "tokens", "vgg"),
)
@pytest.mark.parametrize("name", ZOO)
def test_inspect_score_plan_prune(name):
    model, inputs = build_model(name), draw_inputs(name, 2)
    structure, network = cn.inspect(model, inputs), cn.read_network(model, inputs)
    assert len(str(structure).splitlines()) == len(structure.layers) + len(structure.notes)
    assert {layer.name for layer in network.removable} <= {layer.name for layer in structure.removable}
    scores = cn.score(model, inputs, formulation=cn.Paper(loss_weight=LITTLE_LOSS), solver=cn.Solver(threads=1))
    assert scores.status is cn.Status.OPTIMAL
    assert scores.logit_error <= LOGIT_TOLERANCE
    assert list(scores) == [layer.name for layer in network.removable]
    plan = cn.plan(scores, units=0.5)
    smaller = cn.prune(model, plan, inputs)
    fresh = draw_inputs(name, 5, seed=9)
    with torch.no_grad():
        expected, found = cn.mask(model, plan)(fresh), smaller(fresh)
    assert (expected - found).abs().max() <= SAME_OUTPUTS * max(1.0, float(expected.abs().max()))
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    for layer in plan.structure.layers:
        assert np.array_equal(np.flatnonzero(plan.stays[layer.units]), plan.kept[layer.name])


@pytest.mark.networks("resnet", "mobilenet", "concatenation on a stream", "grouped convolutions", "vgg")
@pytest.mark.parametrize("name", [*GRAPHS, *MAX_POOLED])
def test_plans_and_scores_survive_saving(name, tmp_path):
    model, inputs = build_model(name), draw_inputs(name, 2)
    scores = cn.score(model, inputs, solver=cn.Solver(threads=1))
    scores.save(tmp_path / "scores.json")
    plan = cn.plan(cn.Scores.load(tmp_path / "scores.json"), units=0.6)
    plan.save(tmp_path / "plan.json")
    again = cn.Plan.load(tmp_path / "plan.json")
    one, other = cn.prune(model, cn.plan(scores, units=0.6), inputs), cn.prune(model, again, inputs)
    with torch.no_grad():
        assert torch.equal(one(inputs), other(inputs))

"""Law: a plan within a share of the parameters or multiply-adds gives a module that is within it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError
from critical_neurons.removal.remove import remove_units
from tests.drawing import draw_scores
from tests.zoo import ZOO, first_or_slow, share_case

SHARES = [0.5, 0.75]
PRINTED = 5e-4
"""Shares are printed with four digits."""


def count_params(model, inputs):
    return sum(parameter.numel() for parameter in model.parameters())


def count_uses(module, read, given):
    """The positions at which every weight is used: a transposed convolution spreads each input over the kernel."""
    match module:
        case nn.Linear():
            return given[0, ..., 0].numel()
        case nn.ConvTranspose2d():
            return read[0, 0].numel()
        case _:
            return given[0, 0].numel()


def count_macs(model, inputs):
    """Every weight of a layer times the positions it is used at, seen on the way through the real module."""
    seen = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, output: seen.append(module.weight.numel() * count_uses(module, args[0], output))
        )
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d)
    ]
    with torch.no_grad():
        model(inputs[:1])
    for hook in hooks:
        hook.remove()
    return sum(seen)


MEASURES = {"params": count_params, "macs": count_macs}


def read_least(error):
    return float(re.search(r"they are ([\d.e-]+)\.$", str(error))[1])


@pytest.mark.parametrize("round_to", first_or_slow(1, 8, 2, first=2))
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", ZOO)
def test_what_is_left_is_within_the_share(name, measure, round_to):
    case, count = share_case(name), MEASURES[measure]
    inputs = torch.from_numpy(case.inputs)
    whole = count(case.model, inputs)
    for seed, share in enumerate(SHARES):
        scores = draw_scores(name, seed)
        with pytest.raises(InvalidSettingError, match="cannot fall to") as caught:
            cn.plan(scores, **{measure: 1e-9}, round_to=round_to)
        if share < read_least(caught.value) + PRINTED:
            continue
        plan = cn.plan(scores, **{measure: share}, round_to=round_to)
        left = count(remove_units(case.model, plan.structure, plan.stays), inputs)
        assert left <= share * whole
        assert f"({left / whole:.4g})" in plan.rule


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", ["mlp", "resnet", "mobilenet", "densenet", "sum of three", "grouped convolutions"])
def test_with_layers_kept_the_others_meet_it_or_the_least_is_reported(name, measure):
    case, scores, count = share_case(name), draw_scores(name), MEASURES[measure]
    inputs = torch.from_numpy(case.inputs)
    whole = count(case.model, inputs)
    for layer in case.network.layers:
        with pytest.raises(InvalidSettingError) as caught:
            cn.plan(scores, **{measure: 1e-9}, keep=layer.name)
        least = read_least(caught.value) + PRINTED
        assert least < 1 + 2 * PRINTED
        plan = cn.plan(scores, **{measure: min(least, 1.0)}, keep=layer.name)
        assert layer.name not in plan.removed
        assert count(remove_units(case.model, plan.structure, plan.stays), inputs) <= least * whole

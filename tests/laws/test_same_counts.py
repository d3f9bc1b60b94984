"""Every baseline removes as many units of every group as the plan it is set against, and fits the network."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons_reproduction.baselines import plan_by_activation, plan_by_norm, plan_by_sensitivity
from tests.drawing import count_by_group
from tests.zoo import ZOO, Case, share_case

BASELINES: dict[str, Callable[[cn.Plan, Case], cn.Plan]] = {
    "L1": lambda plan, case: plan_by_norm(plan, case.model, norm=1),
    "L2": lambda plan, case: plan_by_norm(plan, case.model, norm=2),
    "activation": lambda plan, case: plan_by_activation(plan, case.model, case.inputs),
    "sensitivity": lambda plan, case: plan_by_sensitivity(plan, case.model, case.inputs, case.labels),
}

SHARED = ("mlp", "resnet", "mobilenet", "concatenation on a stream", "grouped convolutions", "tokens", "vgg")
"""Units of one layer, shared by several, in blocks, and read side by side."""


@pytest.mark.networks(*SHARED)
@pytest.mark.parametrize("name", ZOO)
def test_counts_are_the_same_and_blocks_and_shared_units_agree(name: str) -> None:
    case = share_case(name, seed=1 if name == "densenet" else 0)  # by seed 0 its last activations are all zero
    plan = cn.plan(cn.score(case.model, case.inputs, case.labels, formulation="linearised"), units=0.5)
    weights = {key: value.clone() for key, value in case.model.state_dict().items()}
    for baseline, choose in BASELINES.items():
        chosen = choose(plan, case)
        assert count_by_group(chosen) == count_by_group(plan), baseline
        chosen.check()
        again = choose(plan, case)
        assert all(np.array_equal(again.kept[layer], kept) for layer, kept in chosen.kept.items()), baseline
    assert all(torch.equal(value, weights[key]) for key, value in case.model.state_dict().items())
    over_layers = plan_by_sensitivity(plan, case.model, case.inputs, case.labels, kept=0.2)
    over_layers.check()
    assert all(len(kept) for kept in over_layers.kept.values())

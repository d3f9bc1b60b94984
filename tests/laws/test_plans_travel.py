"""A plan fits every model of its architecture, whatever was ignored when it was made and whatever the weights are."""

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.removal.metrics import count_parameters
from tests.drawing import draw_scores
from tests.zoo import ZOO, build_model, share_case

SHARED = (
    *("mlp", "resnet", "mobilenet", "concatenation on a stream", "grouped convolutions"),
    *("batch norm behind the relu, then padding", "tokens", "vgg"),
)
"""Units of one layer, shared by several, in blocks, read side by side, or that leave constants behind."""

pytestmark = pytest.mark.networks(*SHARED)


@pytest.mark.parametrize("name", ZOO)
def test_plans_of_scores_with_an_ignored_layer(name: str) -> None:
    case = share_case(name)
    ignored = case.network.removable[0].name
    if not cn.read_network(case.model, torch.from_numpy(case.inputs), ignore=[ignored]).removable:
        pytest.skip("nothing is left to score")
    scores = cn.score(case.model, case.inputs, case.labels, formulation="linearised", ignore=ignored)
    plan = cn.plan(scores, units=0.5)
    assert ignored not in plan.removed
    smaller = cn.prune(case.model, plan, case.inputs)  # checks that masked is removed
    assert count_parameters(smaller) < count_parameters(case.model)


@pytest.mark.parametrize("name", ZOO)
def test_smaller_weights_load_into_another_model_pruned_by_the_same_plan(name: str) -> None:
    case = share_case(name)
    plan = cn.plan(draw_scores(name), units=0.5)
    smaller = cn.prune(case.model, plan, case.inputs)
    other = cn.prune(build_model(name, seed=7), plan, case.inputs)
    other.load_state_dict(smaller.state_dict())
    rows = torch.from_numpy(case.inputs)
    with torch.no_grad():
        assert torch.equal(other(rows), smaller(rows))


@pytest.mark.parametrize("name", ZOO)
def test_single_precision_models_are_pruned(name: str) -> None:
    case = share_case(name)
    model = build_model(name).float()
    plan = cn.plan(cn.score(model, case.inputs, case.labels, formulation="linearised"), units=0.5).random(seed=1)
    smaller, masked = cn.prune(model, plan, case.inputs), cn.mask(model, plan)
    rows = torch.from_numpy(case.inputs).float()
    with torch.no_grad():
        assert np.allclose(smaller(rows), masked(rows), rtol=1e-4, atol=1e-4)

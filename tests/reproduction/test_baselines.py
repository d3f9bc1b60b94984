"""Baselines: which units go, by hand and by torch; SNIP's masks; shares of what is removed; pleasant errors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError, InvalidSettingError, PlanMismatchError
from critical_neurons.io.builtin_models import lenet5
from critical_neurons.removal.metrics import count_parameters
from critical_neurons_reproduction.baselines import (
    mask_connections,
    measure_sensitivity,
    plan_by_activation,
    plan_by_norm,
    plan_by_sensitivity,
    share_as_published,
    share_of_parameters,
    share_of_units,
)
from tests.zoo import build_model, share_case

SAME = 1e-12
"""Relative difference allowed between two ways to compute one number in float64."""

STEP = 1e-6
"""Of a central difference quotient."""

SLOPE_TOLERANCE = 1e-6
"""Relative error of that quotient."""


def small_model() -> nn.Sequential:
    """Weights that order the hidden units one way by L1 norm and another way by L2 norm."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0, 1.0], [2.5, 0.0, 0.0], [-0.1, 0.2, 0.1]]))
        model[0].bias.copy_(torch.tensor([0.0, 0.0, 9.0]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.5, 2.0], [-1.0, 0.5, 2.0]]))
        model[2].bias.zero_()
    return model


INPUTS = np.array([[0.5, 0.2, 0.1], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.3, 0.3, 0.9]])
LABELS = np.array([0, 1, 0, 1])


def plan_for(model: nn.Module, units: float = 0.34) -> cn.Plan:
    return cn.plan(cn.score(model, INPUTS, LABELS, formulation="linearised"), units=units)


def test_norms_order_units_as_they_should():
    model = small_model()
    plan = plan_for(model)
    assert len(plan.kept["0"]) == 1
    assert plan_by_norm(plan, model, norm=1).kept["0"].tolist() == [0]
    chosen = plan_by_norm(plan, model, norm=2)
    assert chosen.kept["0"].tolist() == [1]
    assert chosen.rule == f"smallest L2 norm of incoming weights removed, counts of: {plan.rule}"


def test_shared_units_are_judged_by_all_their_layers():
    """A shared unit whose weights are large in every one of its layers is the last to go, one that is small in all
    of them the first."""
    case = share_case("resnet", seed=1)
    plan = cn.plan(cn.score(case.model, case.inputs, case.labels, formulation="linearised"), units=0.5)
    structure = case.network.structure
    groups = [layer for layer in structure.removable if "together" in structure.describe(layer)]
    shared = [layer for layer in groups if np.isin(layer.units, groups[0].units).any()]
    totals = np.zeros(structure.unit_count)
    for layer in shared:
        weight = case.model.get_submodule(layer.name).weight.detach().flatten(1)
        totals[layer.units] += weight.abs().sum(1).numpy()
    chosen = plan_by_norm(plan, case.model, norm=1)
    units = groups[0].units
    stays = np.isin(np.arange(len(units)), chosen.kept[groups[0].name])
    assert len(shared) > 1
    assert 0 < stays.sum() < len(units)
    assert totals[units[stays]].min() >= totals[units[~stays]].max()


def test_mean_activation_is_that_of_torch():
    model = small_model()
    activations = torch.relu(model[0](torch.from_numpy(INPUTS))).mean(0)
    for units in (0.34, 0.67):
        plan = plan_for(model, units)
        best = np.sort(np.argsort(-activations.detach().numpy())[: len(plan.kept["0"])])
        assert np.array_equal(plan_by_activation(plan, model, INPUTS).kept["0"], best)


def test_mean_activation_stops_at_a_ceiling():
    """Unit 0 is active once and far above the ceiling, unit 1 always and below it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU6(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[90.0, 0.0], [0.0, 4.0]]))
        model[0].bias.zero_()
    inputs, labels = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([0, 1])
    plan = cn.plan(cn.score(model, inputs, labels, formulation="linearised"), units=0.5)
    assert plan_by_activation(plan, model, inputs).kept["0"].tolist() == [1]


def test_mean_activation_of_a_span():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
    ).double()
    scores = cn.score(model, INPUTS, LABELS, formulation="linearised", start="2")
    plan = cn.plan(scores, units=0.4)
    activations = model[:4](torch.from_numpy(INPUTS)).mean(0).detach().numpy()
    best = np.sort(np.argsort(-activations)[: len(plan.kept["2"])])
    assert np.array_equal(plan_by_activation(plan, model, INPUTS).kept["2"], best)


def test_sensitivity_is_the_slope_of_the_loss_in_a_factor_of_the_weight():
    case = share_case("nest")
    found = measure_sensitivity(case.model, case.inputs, case.labels)
    rows, labels = torch.from_numpy(case.inputs), torch.from_numpy(case.labels)
    slopes = {}
    with torch.no_grad():
        for name, values in found.items():
            slopes[name] = torch.zeros_like(values)
            for at in np.ndindex(*values.shape):
                losses = []
                for factor in (1 + STEP, 1 - STEP):
                    changed = copy.deepcopy(case.model)
                    changed.get_submodule(name).weight[at] *= factor
                    losses.append(float(functional.cross_entropy(changed(rows), labels)))
                slopes[name][at] = abs(losses[0] - losses[1]) / (2 * STEP)
    whole = sum(float(values.sum()) for values in slopes.values())
    assert list(found) == ["features.0.convolution", "features.1.0.convolution", "head.hidden", "head.logits"]
    for name, values in found.items():
        assert torch.allclose(values, slopes[name] / whole, rtol=SLOPE_TOLERANCE, atol=SLOPE_TOLERANCE)


def test_sensitivity_does_not_depend_on_the_batch_size(monkeypatch):
    case = share_case("nest", 7)
    whole = measure_sensitivity(case.model, case.inputs, case.labels)
    monkeypatch.setattr("critical_neurons_reproduction.baselines.BATCH_SIZE", 3)
    for name, values in measure_sensitivity(case.model, case.inputs, case.labels).items():
        assert torch.allclose(values, whole[name], rtol=SAME, atol=SAME)


def test_sensitivity_by_unit_sums_incoming_weights():
    model = small_model()
    sums = measure_sensitivity(model, INPUTS, LABELS)["0"].sum(1).numpy()
    for units in (0.34, 0.67):
        plan = plan_for(model, units)
        best = np.sort(np.argsort(-sums)[: len(plan.kept["0"])])
        assert np.array_equal(plan_by_sensitivity(plan, model, INPUTS, LABELS).kept["0"], best)


def test_sensitivity_by_unit_over_all_layers():
    torch.manual_seed(0)
    model = lenet5()
    inputs, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    plan = cn.plan(cn.score(model, inputs, labels, formulation="linearised"), units=0.5)
    chosen = plan_by_sensitivity(plan, model, inputs, labels, kept=0.45)
    assert 1 - share_of_units(chosen) == pytest.approx(0.45, abs=1 / 226)
    sums = {name: values.flatten(1).sum(1) for name, values in measure_sensitivity(model, inputs, labels).items()}
    scored = [layer for layer in chosen.layers if layer.name in chosen.removed]
    stay = torch.cat([sums[layer.name][layer.kept] for layer in scored])
    go = torch.cat([sums[layer.name][layer.removed] for layer in scored])
    assert stay.min() >= go.max()
    assert len(chosen.kept["11"]) == 10
    cn.prune(model, chosen, inputs)


@pytest.mark.parametrize("kept", [0.45, 1.0])
def test_connections_kept_are_the_most_sensitive_of_all_layers(kept):
    torch.manual_seed(0)
    model = lenet5()
    inputs, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    masks = mask_connections(model, inputs, labels, kept=kept)
    sensitivity = measure_sensitivity(model, inputs, labels)
    assert set(masks) == {(name, "weight") for name in sensitivity}
    flat = torch.cat([masks[name, "weight"].flatten() for name in sensitivity]).bool()
    values = torch.cat([values.flatten() for values in sensitivity.values()])
    assert int(flat.sum()) == int(kept * len(flat))
    if kept < 1:
        assert values[flat].min() >= values[~flat].max()
    for (name, parameter), mask in masks.items():
        prune.custom_from_mask(model.get_submodule(name), parameter, mask)
        assert model.get_submodule(name).weight.dtype == torch.float32
    assert sum(int((mask == 0).sum()) for mask in masks.values()) == int((~flat).sum())


def test_shares_removed():
    """Of 9 + 3 + 6 + 2 parameters, a hidden unit has 3 incoming weights, a bias and 2 outgoing weights."""
    model = small_model()
    plan = plan_for(model)
    assert share_of_units(plan) == pytest.approx(2 / 3)
    assert share_as_published(model, plan) == pytest.approx(2 * 3 / 20)
    assert share_of_parameters(model, plan, INPUTS) == pytest.approx(2 * 6 / 20)


def test_share_as_published_counts_kernels():
    torch.manual_seed(0)
    model = lenet5()
    inputs = torch.rand(4, 3, 32, 32)
    plan = cn.plan(cn.score(model, inputs, torch.arange(4), formulation="linearised"), units=0.5)
    incoming = 3 * 75 + 8 * 150 + 60 * 400 + 42 * 120
    assert share_as_published(model, plan) == pytest.approx(incoming / count_parameters(model))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda plan, model: plan_by_norm(plan, model, norm=3), InvalidSettingError, "norm=3. Accepted: 1 or 2"),
        (lambda plan, model: plan_by_norm(plan, build_model("mlp"), norm=1), PlanMismatchError, "another network"),
        (lambda plan, model: plan_by_sensitivity(plan, model, INPUTS), InvalidInputError, "labels: none given"),
        (lambda plan, model: measure_sensitivity(model, INPUTS, LABELS + 1), InvalidInputError, "Accepted: 0 to 1"),
        (lambda plan, model: measure_sensitivity(nn.ReLU(), INPUTS, LABELS), InvalidInputError, "no linear layer"),
        (
            lambda plan, model: mask_connections(model, INPUTS, LABELS, kept=0),
            InvalidSettingError,
            "kept=0. Accepted",
        ),
        (
            lambda plan, model: measure_sensitivity(nn.Linear(3, 1).double(), INPUTS, LABELS * 0),
            InvalidInputError,
            "0.0",
        ),
    ],
)
def test_errors(call, error, message):
    model = small_model()
    with pytest.raises(error, match=message):
        call(plan_for(model), model)

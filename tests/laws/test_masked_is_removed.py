"""Law: a model with all weights of some units at zero and the smaller model without them are the same function."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import PlanMismatchError, PruningError
from critical_neurons.removal.same_outputs import check_removal
from tests.drawing import draw_plan
from tests.zoo import CORE, ZOO, build_model, draw_inputs, first_or_slow

SAME_OUTPUTS = 1e-9
"""Largest relative difference of outputs in float64."""

SAME_OUTPUTS_SINGLE = 1e-4
"""The same in float32."""

SEEDS = [0, 1, 2]


def draw_trial(name, seed=0):
    return build_model(name, seed), draw_inputs(name, 6, seed + 10), draw_plan(share_structure(name, seed), seed)


@cache
def share_structure(name, seed):
    return cn.inspect(build_model(name, seed), draw_inputs(name, 6, seed + 10))


def assert_same(left, right, tolerance):
    assert (left - right).abs().max() <= tolerance * max(1.0, float(left.abs().max()))


def differentiate(model, inputs):
    """One step of training; the gradients it was made of."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    optimiser.step()
    return gradients


@pytest.mark.syntax
@pytest.mark.parametrize("seed", first_or_slow(*SEEDS))
@pytest.mark.parametrize("name", ZOO)
def test_masked_is_removed(name, seed):
    model, inputs, plan = draw_trial(name, seed)
    assert plan.structure.removable
    masked, smaller = cn.mask(model, plan), cn.prune(model, plan, inputs[:2])
    fresh = draw_inputs(name, 9, seed + 100)  # none of the rows that prune looks at
    with torch.no_grad():
        assert_same(masked(fresh), smaller(fresh), SAME_OUTPUTS)
    removed = sum(len(units) for units in plan.removed.values())
    assert (sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())) == (
        removed > 0
    )


@pytest.mark.parametrize("name", ZOO)
def test_masked_is_removed_in_single_precision(name):
    model, inputs, plan = draw_trial(name)
    model, inputs = model.float(), inputs.float()
    with torch.no_grad():
        masked, smaller = cn.mask(model, plan)(inputs), cn.prune(model, plan, inputs)(inputs)
    assert masked.dtype == smaller.dtype == torch.float32
    assert_same(masked, smaller, SAME_OUTPUTS_SINGLE)


def test_plans_change_outputs():
    """Otherwise the law would hold for a mask that does nothing."""

    def is_changed(name, seed):
        model, inputs, plan = draw_trial(name, seed)
        with torch.no_grad():
            return (model(inputs) - cn.mask(model, plan)(inputs)).abs().max() > 1e-3

    changed = [name for name in CORE if any(is_changed(name, seed) for seed in SEEDS)]
    assert len(changed) >= len(CORE) * 3 // 4


def find_new_biases(model, plan):
    """Layers without a bias get one where removed units leave a constant behind."""
    stays = plan.stays
    return {
        f"{wiring.module}.bias"
        for wiring in plan.structure.wirings
        if getattr(model.get_submodule(wiring.module), "bias", 0) is None
        and wiring.constants[~stays[wiring.inputs]].any()
    }


def test_a_layer_without_a_bias_gets_one():
    """Otherwise the allowance made for it below would never be used."""
    trials = [draw_trial("batch norm behind the relu of a convolution", seed) for seed in SEEDS]
    assert {"3.bias"} in [find_new_biases(model, plan) for model, _, plan in trials]


@pytest.mark.parametrize("name", ZOO)
def test_the_smaller_model_is_the_same_otherwise(name):
    model, inputs, plan = draw_trial(name)
    model = model.float().train()
    list(model.modules())[-1].eval()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    smaller = cn.prune(model, plan, inputs)
    assert type(smaller) is type(model)
    pairs = list(zip(model.named_modules(), smaller.named_modules(), strict=True))
    for (old_name, old), (new_name, new) in pairs:
        assert old_name == new_name
        assert type(old) is type(new)
        assert old.training == new.training
    old_state, new_state = model.state_dict(), smaller.state_dict()
    gained = find_new_biases(model, plan)
    assert [key for key in new_state if key not in gained] == list(old_state)
    assert gained <= set(new_state)
    for key in old_state:
        assert old_state[key].dtype == new_state[key].dtype
        assert old_state[key].device == new_state[key].device
    new_parameters = dict(smaller.named_parameters())
    for key, parameter in model.named_parameters():
        assert new_parameters[key].requires_grad == parameter.requires_grad
        assert new_parameters[key].is_leaf
        assert new_parameters[key] is not parameter
    for layer in plan.layers:
        module = smaller.get_submodule(layer.name)
        assert module.weight.shape[isinstance(module, nn.ConvTranspose2d)] == len(layer.kept)
        assert getattr(module, "out_features", getattr(module, "out_channels", None)) == len(layer.kept)
    for _, module in smaller.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.num_features == len(module.running_mean)


@pytest.mark.parametrize("name", ZOO)
def test_both_train_as_before(name):
    model, inputs, plan = draw_trial(name)
    before = copy.deepcopy(model.state_dict())
    smaller, masked = cn.prune(model, plan, inputs).train(), cn.mask(model, plan).train()
    for trained in (smaller, masked):
        start = {key: parameter.detach().clone() for key, parameter in trained.named_parameters()}
        gradients = differentiate(trained, inputs)
        assert all(gradient is not None for gradient in gradients.values())
        moved = [key for key, parameter in trained.named_parameters() if not torch.equal(parameter, start[key])]
        assert moved
    assert all(torch.equal(before[key], values) for key, values in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mlp", "nest", "convolution in one dimension"])
def test_gradients_of_what_stays_are_the_same(name):
    model, inputs, plan = draw_trial(name)
    masked, smaller = (differentiate(m, inputs) for m in (cn.mask(model, plan), cn.prune(model, plan, inputs)))
    kept = plan.kept
    for layer in plan.layers:
        assert_same(
            masked[f"{layer.name}.weight"][kept[layer.name]].abs().sum(),
            smaller[f"{layer.name}.weight"].abs().sum(),
            SAME_OUTPUTS,
        )


def list_masked(model, plan):
    """Of every tensor that removed units have a part in, which entries are theirs."""
    ones, twos = (cn.mask(fill(model, number), plan).state_dict() for number in (1, 2))
    return {name: values == twos[name] for name, values in ones.items() if values.is_floating_point()}


def fill(model, number):
    """A copy with the same number everywhere, so that whatever is the same in two of them has been put there."""
    filled = copy.deepcopy(model)
    for values in filled.state_dict().values():
        values.fill_(number)
    return filled


@pytest.mark.parametrize("name", ZOO)
def test_all_that_belongs_to_removed_units_is_zero(name):
    model, _, plan = draw_trial(name)
    masked, gone = cn.mask(model, plan).state_dict(), list_masked(model, plan)
    assert any(places.any() for places in gone.values()) == bool(plan.removed)
    for layer in plan.layers:
        weight = masked[f"{layer.name}.weight"]
        made = weight.movedim(int(isinstance(model.get_submodule(layer.name), nn.ConvTranspose2d)), 0)
        assert torch.count_nonzero(made[layer.removed]) == 0
    for name, places in gone.items():
        assert (masked[name][places] == name.endswith("running_var")).all()  # variances are one


@pytest.mark.parametrize("name", ZOO)
def test_masks_stay_at_zero_under_training(name):
    model, inputs, plan = draw_trial(name)
    if any(wiring.constants.any() for wiring in plan.structure.wirings):
        pytest.skip("removed units leave constants behind, and what reads them learns again")
    masked, gone = cn.mask(model, plan).train(), list_masked(model, plan)
    for _ in range(2):
        differentiate(masked, inputs)
    for name, values in masked.state_dict().items():
        if name in gone and not name.endswith("running_var"):
            assert torch.count_nonzero(values[gone[name]]) == 0


@pytest.mark.parametrize("name", ZOO)
def test_states_fit_another_pruned_copy(name):
    model, inputs, plan = draw_trial(name)
    smaller = cn.prune(model, plan, inputs)
    other = cn.prune(build_model(name, seed=5), plan, inputs)
    other.load_state_dict(smaller.state_dict())
    with torch.no_grad():
        assert torch.equal(other(inputs), smaller(inputs))


@pytest.mark.parametrize("name", ["mlp", "nest"])
def test_masked_and_smaller_can_be_copied_and_pickled(name, tmp_path):
    model, inputs, plan = draw_trial(name)
    for made in (cn.mask(model, plan), cn.prune(model, plan, inputs)):
        torch.save(made, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        with torch.no_grad():
            assert torch.equal(again(inputs), made(inputs))
            assert torch.equal(copy.deepcopy(made)(inputs), made(inputs))


@pytest.mark.parametrize("name", ["mlp", "nest"])
def test_pruning_twice(name):
    """A smaller model is a model like any other."""
    model, inputs, plan = draw_trial(name)
    smaller = cn.prune(model, plan, inputs)
    again = draw_plan(cn.inspect(smaller, inputs), 3)
    with torch.no_grad():
        assert_same(cn.mask(smaller, again)(inputs), cn.prune(smaller, again, inputs)(inputs), SAME_OUTPUTS)
    with pytest.raises(PlanMismatchError, match="another network"):
        cn.prune(smaller, plan, inputs)


def test_a_plan_that_removes_nothing_copies():
    model, inputs = build_model("nest"), draw_inputs("nest", 3)
    plan = cn.plan(cn.score(model, inputs, solver=cn.Solver(threads=1)), units=1.0)
    smaller = cn.prune(model, plan, inputs)
    assert plan.removed == {}
    assert smaller is not model
    with torch.no_grad():
        assert torch.equal(smaller(inputs), model(inputs))


def test_the_check_inside_prune_sees_a_difference():
    model, inputs, plan = draw_trial("mlp")
    masked, smaller = cn.mask(model, plan), cn.prune(model, plan, inputs)
    check_removal(masked, smaller, inputs)
    with torch.no_grad():
        smaller[0].bias += 1e-3
    with pytest.raises(PruningError, match="other outputs than the masked one"):
        check_removal(masked, smaller, inputs)


def test_the_check_inside_prune_sees_a_model_that_does_not_run():
    model, inputs, _ = draw_trial("mlp")
    broken = copy.deepcopy(model)
    broken[2] = nn.Linear(3, 4).double()
    with pytest.raises(PruningError, match="the smaller model does not run"):
        check_removal(model, broken, inputs)


@pytest.mark.parametrize("name", ["mlp", "nest", "mlp with batch norm and dropout"])
def test_plans_of_scores_go_through(name):
    """From scores to a smaller model, with every way to select."""
    model, inputs = build_model(name), draw_inputs(name, 4)
    scores = cn.score(model, inputs, solver=cn.Solver(threads=1))
    plan = cn.plan(scores, units=0.6)
    for chosen in (plan, plan.random(seed=1), plan.critical(scores), cn.plan(scores, threshold="mean")):
        masked, smaller = cn.mask(model, chosen), cn.prune(model, chosen, inputs)
        with torch.no_grad():
            assert_same(masked(inputs), smaller(inputs), SAME_OUTPUTS)

"""Adapting: masks for torch.nn.utils.prune, and an importance that Torch-Pruning really removes units by."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch_pruning
from torch import nn
from torch.nn.utils import prune

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError, PlanMismatchError, PruningError
from tests.drawing import draw_scores, make_scores
from tests.zoo import ZOO, build_model, draw_inputs, share_case

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

SAME_OUTPUTS = 1e-9
"""Largest relative difference of outputs in float64."""

UNMASKABLE = {
    "batch norm behind the relu": "3",
    "batch norm behind the relu of a convolution": "3",
    "constants behind the relu": "two",
    "constants of every channel": "logits",
}
"""Where removed units leave a constant, and the first module that reads it."""


def assert_same(left, right):
    difference, size = (left - right).abs().max().item(), left.abs().max().item()
    assert difference <= SAME_OUTPUTS * max(1.0, size)


def mask_parameters(model, plan):
    masked = copy.deepcopy(model)
    for (module, parameter), mask in cn.as_masks(plan, model).items():
        prune.custom_from_mask(masked.get_submodule(module), parameter, mask)
    return masked


def list_zeros(mask, axis):
    """Indices of an axis at which all is masked."""
    if axis >= mask.ndim:
        return []
    return [at for at in range(mask.shape[axis]) if not mask.select(axis, at).any()]


class TestMasks:
    @pytest.mark.parametrize("name", [name for name in ZOO if name not in UNMASKABLE])
    def test_masked_parameters_give_what_mask_gives(self, name):
        case = share_case(name)
        plan = cn.plan(draw_scores(name), units=0.5)
        masked = mask_parameters(case.model, plan)
        fresh = draw_inputs(name, 9, seed=100)
        with torch.no_grad():
            assert_same(cn.mask(case.model, plan)(fresh), masked(fresh))
        assert any(prune.is_pruned(module) for module in masked.modules())

    @pytest.mark.parametrize("name", ["resnet", "mlp with batch norm and dropout"])
    def test_also_in_training_mode(self, name):
        plan = cn.plan(draw_scores(name), units=0.5)
        model, inputs = build_model(name).train(), draw_inputs(name, 5)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        assert_same(cn.mask(model, plan)(inputs), mask_parameters(model, plan)(inputs))

    def test_what_is_masked(self):
        scores = make_scores(
            share_case("nest").network.structure, np.array([0.1, 0.9, *[0.2, 0.7, 0.6], *[0.8, 0.9, 0.3]])
        )
        masks = cn.as_masks(cn.plan(scores, threshold=0.5), build_model("nest"))
        rows, columns = (
            {key: gone for key, mask in masks.items() if (gone := list_zeros(mask, axis))} for axis in (0, 1)
        )
        assert rows == {
            ("features.0.convolution", "weight"): [0],
            ("features.0.norm", "weight"): [0],
            ("features.0.norm", "bias"): [0],
            ("features.1.0.convolution", "weight"): [0],
            ("features.1.0.norm", "weight"): [0],
            ("features.1.0.norm", "bias"): [0],
            ("head.hidden", "weight"): [2],
            ("head.hidden", "bias"): [2],
        }
        first, hidden = ("features.1.0.convolution", "weight"), ("head.hidden", "weight")
        (last,) = columns.keys() - {first, hidden}  # the layer behind the hidden one
        positions = masks[hidden].shape[1] // 3
        assert columns == {first: [0], hidden: list(range(positions)), last: [2]}
        for key, mask in masks.items():
            assert set(mask.unique().tolist()) == {0.0, 1.0}
            expected = torch.ones_like(mask)
            expected[rows.get(key, [])] = 0
            if mask.ndim > 1:
                expected[:, columns.get(key, [])] = 0
            assert torch.equal(mask, expected)  # all weights of a unit or none

    def test_masks_have_the_type_of_the_parameters_and_need_no_gradient(self):
        plan = cn.plan(draw_scores("nest"), units=0.5)
        model = build_model("nest").float()
        for (module, parameter), mask in plan.as_masks(model).items():
            values = model.get_submodule(module).get_parameter(parameter)
            assert (mask.shape, mask.dtype, mask.device) == (values.shape, values.dtype, values.device)
            assert not mask.requires_grad

    def test_a_plan_that_removes_nothing_masks_nothing(self):
        assert cn.as_masks(cn.plan(draw_scores("nest"), units=1.0), build_model("nest")) == {}

    @pytest.mark.parametrize("name", UNMASKABLE)
    def test_constants_that_go_into_a_bias_are_refused(self, name):
        plan = cn.plan(draw_scores(name), units=0.5)
        with pytest.raises(PruningError, match=rf"^{UNMASKABLE[name]}: it reads removed units that leave a constant"):
            cn.as_masks(plan, share_case(name).model)
        everything = cn.plan(draw_scores(name), units=1.0)
        assert cn.as_masks(everything, share_case(name).model) == {}

    def test_a_plan_of_another_network_is_refused(self):
        with pytest.raises(PlanMismatchError, match="the plan was made for another network"):
            cn.as_masks(cn.plan(draw_scores("nest"), units=0.5), build_model("mlp"))


TORN = {"mobilenet", "concatenation on a stream", "tokens"}
"""Networks where a unit has several channels of a layer."""

BLOCKED = {"grouped convolutions"}
"""Networks where Torch-Pruning removes the same channels of every block."""

CONSTANTS = {
    "batch norm behind the relu",
    "batch norm behind the relu of a convolution",
    "batch norm behind the relu, then a pool",
    "constants behind the relu",
    "constants of every channel",
}
"""Networks where Torch-Pruning drops constants."""

MIXED_UP = {"channels behind positions"}
"""Networks that Torch-Pruning breaks, whatever the importance: it loses track of channels behind positions."""

AGREED = [name for name in ZOO if name not in TORN | BLOCKED | MIXED_UP]


def prune_by_torch_pruning(name, scores, *, steps=1, max_pruning_ratio=1.0, plan=None, model=None, **options):
    """A model of the zoo made smaller by Torch-Pruning with our importance."""
    model = build_model(name) if model is None else model
    importance = cn.as_torch_pruning(scores, model, max_pruning_ratio=max_pruning_ratio)
    if plan is not None:
        options |= {"pruning_ratio": 0.0, "pruning_ratio_dict": importance.ratios(plan)}
    pruner = torch_pruning.pruner.BasePruner(
        model,
        draw_inputs(name, 2),
        importance,
        **{"ignored_layers": importance.ignored_layers, "iterative_steps": steps} | options,
    )
    for _ in range(steps):
        pruner.step()
    return model


def test_an_importance_that_is_given_no_model():
    scores = draw_scores("resnet")
    plan = cn.plan(scores, units=0.5)
    model = build_model("resnet")
    importance = scores.as_torch_pruning()
    known = scores.as_torch_pruning(model)
    pruner = torch_pruning.pruner.BasePruner(
        model,
        draw_inputs("resnet", 2),
        importance,
        pruning_ratio=0.0,
        pruning_ratio_dict=known.ratios(plan),
    )
    pruner.step()
    assert_pruned_by(plan, model, "resnet")


def assert_pruned_by(plan, smaller, name):
    """Torch-Pruning left the channels of the plan: the same weights, and outputs unless it drops constants."""
    case = share_case(name)
    expected = cn.prune(case.model, plan, case.inputs)
    for layer in plan.layers:
        assert torch.equal(smaller.get_submodule(layer.name).weight, expected.get_submodule(layer.name).weight), (
            layer.name
        )
    fresh = draw_inputs(name, 9, seed=100)
    with torch.no_grad():
        if name not in CONSTANTS:
            assert_same(expected(fresh), smaller(fresh))
        else:
            assert smaller(fresh).shape == expected(fresh).shape


def count_units(smaller, name):
    """Channels that are left of the first layer of every group."""
    groups = share_case(name).network.structure.groups
    return [smaller.get_submodule(group.layers[0]).weight.shape[0] for group in groups]


def score_groups(name, *scores):
    """The same score for all units of a group."""
    structure = share_case(name).network.structure
    return make_scores(structure, np.repeat(scores, structure.group_sizes).astype(float))


class TestTorchPruning:
    @pytest.mark.parametrize("name", AGREED)
    def test_the_highest_of_every_layer_stay(self, name):
        scores = draw_scores(name, levels=3)
        plan = cn.plan(scores, units=0.5)
        assert_pruned_by(plan, prune_by_torch_pruning(name, scores, plan=plan), name)

    @pytest.mark.parametrize("name", MIXED_UP)
    def test_what_torch_pruning_breaks_is_no_fault_of_the_scores(self, name):
        model = build_model(name)
        importance = torch_pruning.importance.MagnitudeImportance()
        torch_pruning.pruner.BasePruner(
            model, draw_inputs(name, 2), importance, pruning_ratio=0.5, ignored_layers=[model.head]
        ).step()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(draw_inputs(name, 2))

    @pytest.mark.parametrize("name", ["mlp", "nest", "resnet", "densenet", "flatten method", "sum of three"])
    def test_further_steps_of_a_pruner(self, name):
        scores = draw_scores(name, seed=2)
        plan = cn.plan(scores, units=0.4)
        assert_pruned_by(plan, prune_by_torch_pruning(name, scores, plan=plan, steps=3), name)

    @pytest.mark.parametrize("name", ["mlp", "sum of three"])
    def test_further_steps_over_all_layers(self, name):
        scores = draw_scores(name, seed=2)
        overall = cn.plan(scores, units=0.5, scope="global")
        smaller = prune_by_torch_pruning(name, scores, global_pruning=True, pruning_ratio=0.5, steps=4)
        assert_pruned_by(overall, smaller, name)

    @pytest.mark.parametrize("threshold", [0.3, 0.7, "mean", 2.0])
    @pytest.mark.parametrize("name", ["resnet", "nest"])
    def test_thresholds(self, name, threshold):
        """Torch-Pruning knows none: it gets the shares of a plan."""
        scores = draw_scores(name, seed=1)
        plan = cn.plan(scores, threshold=threshold)
        assert plan.removed
        assert_pruned_by(plan, prune_by_torch_pruning(name, scores, plan=plan), name)

    @pytest.mark.parametrize("levels", [1, 2, 3])
    def test_ties_do_not_over_prune(self, levels):
        """Ranked together, Torch-Pruning removes all that score no more than the last to go."""
        scores = draw_scores("resnet", levels=levels)
        plan = cn.plan(scores, units=0.6, scope="global")
        smaller = prune_by_torch_pruning("resnet", scores, global_pruning=True, pruning_ratio=0.4)
        assert sum(count_units(smaller, "resnet")) == int(0.6 * scores.structure.unit_count)
        assert_pruned_by(plan, smaller, "resnet")

    def test_a_group_of_equal_scores_is_not_skipped(self):
        """Torch-Pruning leaves a group whole that it would have to remove whole."""
        low_stem = score_groups("resnet", 0.0, 0.5, 0.6, 0.7)
        ratio = (low_stem.structure.group_sizes[0] - 1) / low_stem.structure.unit_count
        smaller = prune_by_torch_pruning("resnet", low_stem, global_pruning=True, pruning_ratio=ratio)
        assert count_units(smaller, "resnet") == [1, *low_stem.structure.group_sizes[1:]]
        assert_pruned_by(cn.plan(low_stem, units=1 - ratio, scope="global"), smaller, "resnet")

    def test_the_traps_are_there(self):
        """Equal numbers: all of every group is at most the last to go, so every group is skipped."""
        model, network = build_model("resnet"), share_case("resnet").network
        pruner = torch_pruning.pruner.BasePruner(
            model,
            draw_inputs("resnet", 2),
            lambda group: torch.full((len(group[0].idxs),), 0.5),
            global_pruning=True,
            pruning_ratio=0.4,
        )
        pruner.step()
        assert count_units(model, "resnet") == list(network.group_sizes)

    def test_the_output_layer_and_others_without_scores_stay_whole(self):
        inputs = draw_inputs("resnet", 2)
        network = cn.inspect(build_model("resnet"), inputs, ignore="stage1.first")
        scores = make_scores(network, np.linspace(0, 1, network.unit_count))
        plan = cn.plan(scores, units=0.5)
        for ignored in ({}, {"ignored_layers": []}):  # even where the list is forgotten
            smaller = prune_by_torch_pruning("resnet", scores, pruning_ratio=0.5, **ignored)
            assert smaller.head.weight.shape[0] == 2
            assert smaller.stage1.first.weight.shape[0] == 2
            assert_pruned_by(plan, smaller, "resnet")
        importance = cn.as_torch_pruning(scores, build_model("resnet"))
        assert importance.ignored == {"stage1.first": "ignored, as asked", "head": "it gives the network's output"}

    def test_the_most_a_layer_may_lose_holds_in_one_step_over_all(self):
        scores = score_groups("mlp", 0.1, 0.9)
        options = {"global_pruning": True, "pruning_ratio": 1 / 3}
        assert count_units(prune_by_torch_pruning("mlp", scores, **options), "mlp") == [2, 4]
        smaller = prune_by_torch_pruning("mlp", scores, max_pruning_ratio=0.5, **options)
        assert count_units(smaller, "mlp") == [3, 3]

    def test_units_with_several_channels_of_a_layer_stay_whole(self):
        scores = draw_scores("mobilenet")
        importance = cn.as_torch_pruning(scores, build_model("mobilenet"))
        torn = [name for name, reason in importance.ignored.items() if reason.startswith("Torch-Pruning would tear")]
        assert torn == ["6", "9"]
        with pytest.raises(PlanMismatchError, match=r"^6: the plan removes units of it, .* Plan with keep="):
            importance.ratios(cn.plan(scores, units=0.5))
        plan = cn.plan(scores, units=0.5, keep=torn)
        assert plan.removed
        assert_pruned_by(plan, prune_by_torch_pruning("mobilenet", scores, plan=plan), "mobilenet")

    def test_grouped_convolutions_lose_the_same_channels_of_every_block(self):
        name = "grouped convolutions"
        structure = share_case(name).network.structure
        scores = make_scores(structure, np.array([0.1, 0.2, 0.8, 0.3, *[0.9, 0.1, 0.3, 0.2], *[0.5, 0.6, 0.5, 0.5]]))
        plan = cn.plan(scores, units=0.5)
        smaller, whole = prune_by_torch_pruning(name, scores, plan=plan), build_model(name)
        assert count_units(smaller, name) == [2, 2, 2]
        assert torch.equal(smaller[0].weight, whole[0].weight[[0, 2]])  # means 0.45 and 0.25
        assert torch.equal(smaller[2].bias, whole[2].bias[[0, 2]])
        assert torch.equal(smaller[5].bias, whole[5].bias[[1, 3]])
        with torch.no_grad():
            assert smaller(draw_inputs(name, 3)).isfinite().all()

    def test_importance_of_some_channels_only(self):
        model, scores = build_model("flatten method"), draw_scores("flatten method")
        importance = cn.as_torch_pruning(scores, model)
        graph = torch_pruning.DependencyGraph().build_dependency(model, draw_inputs("flatten method", 2))
        group = graph.get_pruning_group(model.hidden, torch_pruning.prune_linear_out_channels, [2, 0])
        found = importance(group)
        assert found.shape == (2,)
        assert (found[0] > found[1]) == (scores["hidden"][2] > scores["hidden"][0])
        whole = importance(next(iter(graph.get_all_groups(ignored_layers=[model.logits]))))
        assert found.tolist() == whole[[2, 0]].tolist()

    def test_channels_removed_by_hand_are_followed(self):
        """Whichever layer of a group they were removed at."""
        name = "resnet"
        model, scores = build_model(name), score_groups(name, 0.4, 0.3, 0.2, 0.5)
        importance = cn.as_torch_pruning(scores, model)
        graph = torch_pruning.DependencyGraph().build_dependency(model, draw_inputs(name, 2))
        for layer, channel in ((model.stage2.second, 0), (model.stage2.shortcut[0], 1)):
            before = importance(
                graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, list(range(layer.out_channels)))
            )
            graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, [channel]).prune()
            everything = list(range(layer.out_channels))
            after = importance(graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, everything))
            assert after.tolist() == np.delete(before.numpy(), channel).tolist()

    def test_scores_stay_what_they_were_but_for_ties(self):
        scores = draw_scores("nest", levels=4)
        importance = cn.as_torch_pruning(scores, build_model("nest"))
        values, per_unit = importance.values % 2.0, scores.per_unit
        assert len(np.unique(importance.values)) == len(per_unit)
        assert np.abs(values - per_unit).max() < 1e-9


class TestBadInputForTorchPruning:
    def test_a_copy_of_the_model(self):
        model, scores = build_model("resnet"), draw_scores("resnet")
        importance = cn.as_torch_pruning(scores, model)
        pruner = torch_pruning.pruner.BasePruner(copy.deepcopy(model), draw_inputs("resnet", 2), importance)
        with pytest.raises(PlanMismatchError, match=r"another model.*not a copy"):
            pruner.step()

    def test_a_model_that_another_pruner_made_smaller(self):
        model, scores, inputs = build_model("mlp"), draw_scores("mlp"), draw_inputs("mlp", 2)
        importance = cn.as_torch_pruning(scores, model)
        first, second = (
            torch_pruning.pruner.BasePruner(model, inputs, importance, ignored_layers=importance.ignored_layers)
            for _ in range(2)
        )
        first.step()
        with pytest.raises(PlanMismatchError, match="has 2 channels where 4 of the 4 scored ones should be left"):
            second.step()
        with pytest.raises(PlanMismatchError, match="the scores were made for another network"):
            cn.as_torch_pruning(scores, model)

    def test_a_plan_of_another_network(self):
        importance = cn.as_torch_pruning(draw_scores("resnet"), build_model("resnet"))
        with pytest.raises(PlanMismatchError, match="another network"):
            importance.ratios(cn.plan(draw_scores("nest"), units=0.5))

    @pytest.mark.parametrize("ratio", [0.0, 1.5, float("nan"), "half", True])
    def test_ratios(self, ratio):
        with pytest.raises(InvalidSettingError, match=r"max_pruning_ratio=.* Accepted: a share above 0 and up to 1"):
            cn.as_torch_pruning(draw_scores("mlp"), build_model("mlp"), max_pruning_ratio=ratio)

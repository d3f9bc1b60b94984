"""Linearised programs, budgets, and the search for the loss weight."""

from functools import cache

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.core.costs import count_cost, differentiate_cost
from critical_neurons.errors import InfeasibleProgramError, InvalidSettingError
from critical_neurons.removal.metrics import count_parameters
from tests.zoo import ZOO, Case, first_or_slow, share_case

ROUNDING = 1e-6
SLOPE = 1e-6


def linearised(case: Case, budget: cn.Budget | None = None) -> cn.Scores:
    return cn.score(case.model, case.inputs, case.labels, formulation="linearised", budget=budget)


@cache
def linearise(name: str) -> cn.Scores:
    return linearised(share_case(name))


@pytest.mark.parametrize("name", ZOO)
def test_linearised_has_no_rows_and_no_certificate(name: str) -> None:
    scores = linearise(name)
    assert scores.sizes["gates"] == 0
    assert scores.sizes["rows"] == len(scores.structure.groups)  # the sparsity term alone
    assert scores.bound is None
    assert scores.gap is None
    assert any("nothing is certified" in note for note in scores.notes)


@pytest.mark.parametrize("name", ["mlp", "nest", "resnet", "mobilenet", "densenet", "grouped convolutions"])
@pytest.mark.parametrize("share", first_or_slow(0.4, 0.7))
def test_unit_budgets_are_met(name: str, share: float) -> None:
    case = share_case(name)
    by_layer = linearised(case, budget=cn.Budget(units=share))
    start = 0
    for size in by_layer.structure.group_sizes:
        assert by_layer.per_unit[start : start + size].sum() <= np.floor(share * size) + ROUNDING
        start += size
    overall = linearised(case, budget=cn.Budget(units=share, scope="global"))
    assert overall.per_unit.sum() <= np.floor(share * overall.structure.unit_count) + ROUNDING
    assert overall.objective is not None
    assert by_layer.objective is not None
    assert overall.objective <= by_layer.objective + ROUNDING + 1e-4


@pytest.mark.parametrize("name", ["mlp", "nest", "resnet", "mobilenet", "densenet", "vgg", "grouped convolutions"])
@pytest.mark.parametrize("measure", ["params", "macs"])
def test_plans_meet_the_true_count(name: str, measure: str) -> None:
    case = share_case(name)
    share = 0.7
    plan = cn.plan(linearised(case, budget=cn.Budget(**{measure: share})))
    smaller = cn.prune(case.model, plan, case.inputs)
    if measure == "params":
        assert count_parameters(smaller) <= share * count_parameters(case.model)
    else:
        before, after = count_multiply_adds(case.model, case), count_multiply_adds(smaller, case)
        assert after <= share * before


def count_multiply_adds(model: torch.nn.Module, case: Case) -> int:
    """By hooks on a real run: positions out times weights used at each; of a transposed convolution positions in."""
    total = 0

    def count(module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal total
        used = args[0] if isinstance(module, torch.nn.ConvTranspose2d) else output
        total += used[0].numel() * module.weight[0].numel()  # type: ignore[index, union-attr, operator]

    hooks = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.ConvTranspose2d)
    ]
    with torch.no_grad():
        model(torch.from_numpy(case.inputs))
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", ZOO)
def test_costs_are_those_of_the_model(name: str) -> None:
    case = share_case(name)
    network = case.network
    everything = np.ones(network.unit_count + 1)
    assert count_cost(network.structure, everything, "params") == count_parameters(case.model)
    assert count_cost(network.structure, everything, "macs") == count_multiply_adds(case.model, case)
    plan = cn.plan(linearise(name), units=0.6)
    smaller = cn.prune(case.model, plan, case.inputs)
    added = sum(module.bias is not None for module in smaller.modules() if hasattr(module, "bias"))
    before = sum(module.bias is not None for module in case.model.modules() if hasattr(module, "bias"))
    if added == before:  # a folded constant may have brought a bias
        assert count_cost(network.structure, plan.stays.astype(float), "params") == count_parameters(smaller)
    assert count_cost(network.structure, plan.stays.astype(float), "macs") == count_multiply_adds(smaller, case)


@pytest.mark.parametrize("name", ["mlp", "mobilenet", "resnet"])
@pytest.mark.parametrize("measure", ["params", "macs"])
def test_slopes_of_costs(name: str, measure: str) -> None:
    structure, units = share_case(name).network.structure, share_case(name).network.unit_count
    kept = np.append(np.random.default_rng(0).uniform(0, 1, units), 1.0)
    slope = differentiate_cost(structure, kept, measure)
    for unit in range(units):
        step = np.zeros(units + 1)
        step[unit] = 0.5
        up, down = (count_cost(structure, kept + sign * step, measure) for sign in (1, -1))
        assert slope[unit] == pytest.approx(up - down, rel=SLOPE)


def test_paper_rows_leave_no_room_for_a_small_budget() -> None:
    case = share_case("mlp")
    with pytest.raises(InfeasibleProgramError, match="activation pattern"):
        cn.score(case.model, case.inputs, case.labels, budget=cn.Budget(units=0.26))


def test_loss_weight_is_found() -> None:
    case = share_case("mlp")
    free = cn.score(case.model, case.inputs, case.labels, formulation=cn.Paper(loss_weight=1e-4))
    full = cn.score(case.model, case.inputs, case.labels, formulation=cn.Paper(loss_weight=1e4))
    wanted = float(free.per_unit.mean() + full.per_unit.mean()) / 2
    scores = cn.score(case.model, case.inputs, case.labels, formulation=cn.Paper(loss_weight=cn.Bisection(wanted)))
    assert scores.per_unit.mean() <= wanted
    assert 1e-4 < scores.settings["formulation"].loss_weight < 1e4
    more = cn.score(
        case.model,
        case.inputs,
        case.labels,
        formulation=cn.Paper(loss_weight=scores.settings["formulation"].loss_weight * 1.1),
    )
    assert more.per_unit.mean() >= scores.per_unit.mean()
    assert any("loss_weight" in note for note in scores.notes)


def test_a_share_that_cannot_be_reached() -> None:
    case = share_case("mlp")
    with pytest.raises(InfeasibleProgramError, match="cannot be reached"):
        cn.score(case.model, case.inputs, case.labels, formulation=cn.Paper(loss_weight=cn.Bisection(1e-3)))


def test_a_budget_out_of_reach() -> None:
    with pytest.raises(InvalidSettingError, match="cannot fall to"):
        linearised(share_case("mlp"), budget=cn.Budget(params=1e-3))


def test_the_public_steps_give_what_score_gives() -> None:
    case = share_case("nest")
    network = cn.read_network(case.model, torch.from_numpy(case.inputs))
    bounds = cn.bound_network(network, case.inputs)
    program = cn.encode(network, bounds, case.labels, cn.Objective("paper", loss_weight=1.0))
    solution = cn.solve(program, cn.Solver(gap=1e-6))
    scores = cn.score(
        case.model,
        case.inputs,
        case.labels,
        formulation=cn.Paper(objective="paper", loss_weight=1.0),
        solver=cn.Solver(gap=1e-6),
    )
    assert solution.objective == pytest.approx(scores.objective, rel=1e-5)

"""The exact program with scores 0 or 1 is the masked network: its optimum is the best of all masks, one by one."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.core.network import Affine, Concat, Input, MaxPool, Relu, Sum, pool_maximum
from critical_neurons.core.plan import Plan
from critical_neurons.core.structure import Floats
from critical_neurons.formulations.bound_propagation import bound_network
from tests.drawing import draw_scores
from tests.settings import settle
from tests.zoo import CORE, ZOO, Case, share_case

AGREEMENT = 1e-5
SOUND = 1e-9
MOST_UNITS = 8
HALF = 0.5
LOSS_WEIGHT, RESCALE = 5.0, 2.0

LARGER = {
    *("mlp", "mlp of three hidden layers", "softmax", "log softmax", "resnet", "densenet", "addition to itself"),
    *("concatenation", "grouped convolutions", "maxima"),
}
"""Networks with more units, or that end in a softmax."""

TINY = [name for name in ZOO if name not in LARGER]


def mask_by(case: Case, scores: Floats) -> nn.Module:
    """The model without the units of score 0."""
    return cn.mask(case.model, Plan(case.network.structure, np.append(scores == 1, True), {}, "by hand", {}))


def run_masked(case: Case, scores: Floats) -> Tensor:
    with torch.no_grad():
        return mask_by(case, scores)(torch.from_numpy(case.inputs))


def run_gated(case: Case, scores: Floats) -> Tensor:
    """The same logits, by a law below, and quick enough to go through all masks."""
    return torch.from_numpy(case.network.evaluate(case.inputs, scores)[-1])


def masked_loss(case: Case, scores: Floats, run: Callable[[Case, Floats], Tensor] = run_masked) -> float:
    """What is minimised under a budget."""
    return nn.functional.cross_entropy(run(case, scores), torch.from_numpy(case.labels)).item()


def masked_objective(case: Case, scores: Floats, run: Callable[[Case, Floats], Tensor] = run_masked) -> float:
    """Sparsity plus weighted loss of the masked model, by torch and a few lines of arithmetic."""
    softmax = masked_loss(case, scores, run)
    means = [part.mean() - RESCALE for part in np.split(scores, np.cumsum(case.network.group_sizes)[:-1])]
    sparsity = means[0] if len(means) == 1 else sum(means) - min(means)
    return float(sparsity + LOSS_WEIGHT * softmax)


@pytest.mark.networks(
    *("stride, padding and dilation", "nest", "constants of every channel", "clamps", "concatenation on a stream"),
    *("shortcut of slices and zeros", "tokens", "vgg", "max pool on a stream"),
)
@pytest.mark.parametrize("name", TINY)
def test_optimum_is_the_best_mask(name: str) -> None:
    case = share_case(name)
    assert case.network.unit_count <= MOST_UNITS
    scores = cn.score(
        case.model, case.inputs, case.labels, formulation=cn.Exact(binary=True), solver=cn.Solver(gap=1e-5)
    )
    masks = (np.array(bits, dtype=np.float64) for bits in product([0, 1], repeat=case.network.unit_count))
    best = min(masked_objective(case, mask, run_gated) for mask in masks)
    assert scores.status is cn.Status.OPTIMAL
    assert scores.objective == pytest.approx(best, rel=AGREEMENT, abs=AGREEMENT)
    assert scores.bound is not None
    assert scores.bound <= best + AGREEMENT
    assert masked_objective(case, scores.per_unit) == pytest.approx(scores.objective, rel=AGREEMENT, abs=AGREEMENT)


@pytest.mark.parametrize("name", TINY[::2])
def test_a_plan_given_is_judged_and_never_returned_worse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time it is returned itself; with time the best mask is, and the bound holds for all masks."""
    monkeypatch.setattr("critical_neurons.core.deadline.GRACE", 60.0)  # for reading, on a busy machine
    case = share_case(name)
    plan = cn.plan(draw_scores(name), units=HALF)
    given = plan.stays[:-1].astype(np.float64)
    budget = cn.budget_network(case.network, cn.Budget(units=HALF))
    masks = np.array(list(product([0.0, 1.0], repeat=case.network.unit_count)))
    limits, measure = None, masked_objective
    if np.all(budget.weights @ given <= budget.limits):  # a plan leaves a unit to every layer, a budget may not
        masks = masks[np.all(masks @ budget.weights.T <= budget.limits, axis=1)]
        limits, measure = cn.Budget(units=HALF), masked_loss
    settings = {"formulation": "exact", "binary": True, "threads": 1, "gap": 1e-5, "incumbent": plan}
    at_once, solved = (
        cn.score(case.model, case.inputs, case.labels, **settle(budget=limits, time_limit=seconds, **settings))
        for seconds in (1e-9, 60.0)
    )
    own = measure(case, given)
    best = min(measure(case, mask, run_gated) for mask in masks)
    for scores in (at_once, solved):
        assert scores.incumbent is not None
        assert scores.bound is not None
        assert scores.objective is not None
        assert scores.incumbent.objective == pytest.approx(own, rel=AGREEMENT, abs=AGREEMENT)
        assert scores.objective <= scores.incumbent.objective
        assert scores.incumbent.bound == scores.bound <= best + AGREEMENT
    assert solved.objective == pytest.approx(best, rel=AGREEMENT, abs=AGREEMENT)
    if limits:  # the unpruned network, which is larger, is no rival
        assert np.array_equal(at_once.per_unit, given)


def test_budgets_allow_most_plans() -> None:
    """Otherwise the law above would say little of budgets."""
    allowed = 0
    names = [name for name in TINY[::2] if name in CORE]
    for name in names:
        network = share_case(name).network
        budget = cn.budget_network(network, cn.Budget(units=HALF))
        given = cn.plan(draw_scores(name), units=HALF).stays[:-1]
        allowed += bool(np.all(budget.weights @ given <= budget.limits))
    assert allowed > len(names) / 2


def test_tiny_networks_of_every_kind_are_there() -> None:
    kinds = ("mlp without biases", "addition by function", "max pool in one dimension", "batch norm behind the relu")
    assert set(kinds) <= set(TINY), TINY


def test_windows_are_undecided_somewhere() -> None:
    """Otherwise the law above would say nothing of the choices of max pools."""
    case = share_case("vgg")
    assert "vgg" in TINY
    program = cn.encode(
        case.network, bound_network(case.network, case.inputs, pruned=True), case.labels, formulation="exact"
    )
    assert np.any((program.rows.lower == 1) & (program.rows.upper == 1))


@pytest.mark.parametrize("name", ZOO)
def test_gated_activations_are_the_masked_network(name: str) -> None:
    """What programs mean by a score of 0, an activation of zero, is what removal does, whatever stands behind it."""
    case = share_case(name)
    generator = np.random.default_rng(1)
    for _ in range(5):
        scores = generator.integers(0, 2, case.network.unit_count).astype(np.float64)
        logits, masked = run_gated(case, scores), run_masked(case, scores)
        assert (ZOO[name].finish(logits) - masked).abs().max() <= SOUND * max(1.0, float(masked.abs().max()))


@pytest.mark.parametrize("name", ZOO)
def test_bounds_hold_whatever_the_mask(name: str) -> None:
    """Pre-activations of masked networks lie inside the bounds for all scores."""
    case = share_case(name)
    network = case.network
    bounds = bound_network(network, case.inputs, pruned=True)
    generator = np.random.default_rng(0)
    for _ in range(5):
        kept = np.append(generator.integers(0, 2, network.unit_count), 1).astype(np.float64)
        values = _evaluate_masked(case, kept)
        for index, interval in bounds.before_relu.items():
            read = values[network.ops[index].sources[0]]
            assert (read >= interval.lower - SOUND).all()
            assert (read <= interval.upper + SOUND).all()


def _evaluate_masked(case: Case, kept: Floats) -> list[Floats]:
    """Every value of the network with the activations of removed units at zero."""
    values: list[Floats] = []
    for op in case.network.ops:
        match op:
            case Input():
                values.append(case.inputs)
            case Affine():
                values.append(op.map.apply(values[op.source]))
            case Relu():
                values.append(np.maximum(values[op.source], 0.0) * kept[op.units])
            case MaxPool():
                values.append(pool_maximum(op, values[op.source]))
            case Sum():
                values.append(np.sum([values[source] for source in op.sources], axis=0))
            case Concat():
                values.append(np.concatenate([values[source] for source in op.sources], axis=1))
    return values

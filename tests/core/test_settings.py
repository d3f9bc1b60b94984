"""Types of settings: each accepts the settings that apply to it and no others, and keeps them through JSON."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import critical_neurons as cn
from critical_neurons.core.formulation import FORMULATIONS, as_formulation, check_together, read_formulation
from critical_neurons.core.settings import list_settings
from critical_neurons.core.solver import as_solver
from critical_neurons.core.span import WHOLE, Span
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from tests.drawing import draw_scores

TYPES = (cn.Paper, cn.Exact, cn.Linearised, cn.Bisection, cn.Lagrangian, cn.ByClass, cn.Budget, cn.Solver)
SPARSITY = {"loss_weight", "objective", "rescale"}
HALF = cn.Budget(units=0.5)

amounts = st.floats(0, 1e6)
shares = st.floats(0, 1, exclude_min=True)
loss_weights = st.one_of(
    amounts,
    st.builds(cn.Bisection, st.floats(0, 1, exclude_min=True, exclude_max=True)),
    st.builds(cn.Lagrangian, amounts),
)
sparsities = {
    "loss_weight": loss_weights,
    "objective": st.sampled_from(["balanced", "authors", "paper"]),
    "rescale": st.floats(-10, 10),
}
gates = {"integer": st.booleans(), "bounds": st.sampled_from(["interval", "backward"])}
formulations = st.one_of(
    st.builds(cn.Paper, **sparsities, **gates, input_radius=amounts),
    st.builds(cn.Exact, **sparsities, **gates, binary=st.booleans()),
    st.builds(cn.Linearised, **sparsities),
)
budgets = st.one_of(
    st.builds(cn.Budget, units=shares, scope=st.sampled_from(["layer", "global"])),
    st.builds(cn.Budget, params=shares),
    st.builds(cn.Budget, macs=shares),
)
solvers = st.builds(
    cn.Solver,
    st.sampled_from(["auto", "highs", "cvxpy:CLARABEL"]),
    options=st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.text(max_size=5), max_size=3),
    time_limit=st.floats(1e-9, 1e6),
    gap=amounts,
    threads=st.none() | st.integers(1, 64),
    seed=st.integers(0, 2**31 - 1),
)


def carry(settings):
    """Through a file."""
    return json.loads(json.dumps(settings.to_dict()))


@given(formulations)
def test_formulations_survive_json(formulation):
    assert read_formulation(carry(formulation)) == formulation


@given(budgets)
def test_budgets_survive_json(budget):
    assert cn.Budget.from_dict(carry(budget)) == budget
    assert eval(repr(budget), {"Budget": cn.Budget}) == budget


@given(solvers)
def test_solvers_survive_json(solver):
    assert cn.Solver.from_dict(carry(solver)) == solver


def test_every_formulation_has_what_makes_sense_for_it():
    has = {kind: {each.name for each in fields(kind)} for kind in FORMULATIONS.values()}
    common = SPARSITY | {"loss"}
    assert has == {
        cn.Paper: common | {"integer", "bounds", "input_radius"},
        cn.Exact: common | {"integer", "bounds", "binary", "incumbent"},
        cn.Linearised: common,
    }


def test_score_has_ten_parameters():
    assert len(inspect.signature(cn.score).parameters) == 10


@pytest.mark.parametrize("kind", TYPES)
def test_every_field_says_what_it_is_where_help_shows_it(kind):
    for each in fields(kind):
        text = each.metadata["help"]
        assert text.endswith(".")
        assert f"`{each.name}`: {text}" in kind.__doc__


@pytest.mark.parametrize("kind", TYPES)
def test_nothing_changes_once_it_is_checked(kind):
    given = {cn.Bisection: {"mean_score": 0.5}, cn.Lagrangian: {"loss_increase": 0.1}, cn.Budget: {"macs": 0.5}}
    settings = kind(**given.get(kind, {}))
    with pytest.raises(AttributeError):
        setattr(settings, list_settings(kind)[0].name, 1.0)


ILLEGAL = {
    "unknown formulation": (
        lambda: as_formulation("milp"),
        "found 'milp'. Accepted: 'paper' or cn.Paper(...)",
    ),
    "a formulation's type": (lambda: as_formulation(cn.Paper), "formulation: found <class"),
    "loss weight in words": (
        lambda: cn.Paper(loss_weight="auto"),
        "loss_weight: found 'auto'. Accepted: 0 or more, cn.Bisection",
    ),
    "negative loss weight": (lambda: cn.Exact(loss_weight=-1), "loss_weight: found -1"),
    "true loss weight": (lambda: cn.Linearised(loss_weight=True), "loss_weight: found True"),
    "mean score of one": (lambda: cn.Bisection(1.0), "mean_score: found 1.0"),
    "negative increase": (lambda: cn.Lagrangian(-0.1), "loss_increase: found -0.1. Accepted: a number of 0 or more"),
    "increase in words": (lambda: cn.Lagrangian("0.1"), "loss_increase: found '0.1'"),
    "objective": (lambda: cn.Linearised(objective="mine"), "objective: found 'mine'"),
    "unhashable objective": (lambda: cn.Linearised(objective=["paper"]), "objective: found ['paper']"),
    "integer gates in words": (lambda: cn.Paper(integer="no"), "integer: found 'no'. Accepted: True, False"),
    "binary by a number": (lambda: cn.Exact(binary=1), "binary: found 1"),
    "unknown bounds": (lambda: cn.Paper(bounds="crown"), "'interval', 'backward', or Bounds of your own"),
    "bounds of another type": (lambda: cn.Exact(bounds=np.ones(3)), "bounds: found array"),
    "no budget": (lambda: cn.Budget(), "budget: found none. Accepted: one of units, params, macs and latency"),
    "two budgets": (lambda: cn.Budget(units=0.5, macs=0.5), "budget: found units, macs"),
    "budget above one": (lambda: cn.Budget(params=1.5), "params: found 1.5. Accepted: a share above 0 and up to 1"),
    "true budget": (lambda: cn.Budget(macs=True), "macs: found True"),
    "scope": (lambda: cn.Budget(units=0.5, scope="block"), "scope: found 'block'"),
    "scope of multiply-adds": (lambda: cn.Budget(macs=0.5, scope="global"), "scope: says how units are counted"),
    "budget as a mapping": (
        lambda: check_together(cn.Paper(), {"units": 0.5}, WHOLE),
        "budget: found {'units': 0.5}",
    ),
    "budget and bisection": (
        lambda: check_together(cn.Paper(loss_weight=cn.Bisection(0.5)), HALF, WHOLE),
        "takes the place of the sparsity term; leave out loss_weight",
    ),
    "budget and lagrangian": (
        lambda: check_together(cn.Exact(loss_weight=cn.Lagrangian(0.1)), HALF, WHOLE),
        "leave out loss_weight",
    ),
    "budget and sparsity": (
        lambda: check_together(cn.Linearised(objective="paper", rescale=1.0), HALF, WHOLE),
        "leave out objective, rescale",
    ),
    "exact with a stop": (lambda: check_together(cn.Exact(), None, Span(stop="body")), "stop: the exact formulation"),
    "solver of another type": (lambda: as_solver(3), "solver: found 3"),
    "solver without a name": (lambda: cn.Solver(None), "solver: found None"),
    "options in words": (lambda: cn.Solver(options="fast"), "options: found 'fast'"),
    "workers by a number": (lambda: cn.ByClass(workers=2), "workers: found 2"),
    "incumbent between 0 and 1": (lambda: cn.Exact(incumbent=draw_scores("mlp")), "binary=True"),
    "incumbent and lagrangian": (
        lambda: cn.Exact(binary=True, incumbent=draw_scores("mlp"), loss_weight=cn.Lagrangian(0.1)),
        "incumbent: judged at one loss weight",
    ),
    "incumbent of every class": (
        lambda: cn.ByClass(cn.Exact(binary=True, incumbent=draw_scores("mlp"))),
        "incumbent: goes with a single program",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_cannot_be_is_refused_at_once(case):
    build, message = ILLEGAL[case]
    with pytest.raises(InvalidSettingError) as caught:
        build()
    assert message in str(caught.value)


def test_data_of_another_kind():
    with pytest.raises(InvalidInputError, match="earlier: found int"):
        cn.ByClass(earlier=3)
    with pytest.raises(InvalidInputError, match="incumbent: found str"):
        cn.Exact(binary=True, incumbent="plan.json")


def test_a_name_stands_for_the_defaults():
    assert [as_formulation(name) for name in FORMULATIONS] == [cn.Paper(), cn.Exact(), cn.Linearised()]
    assert as_solver("highs") == cn.Solver("highs")
    assert cn.ByClass("exact").formulation == cn.Exact()


def test_numbers_become_those_of_python():
    weight = cn.Paper(loss_weight=np.float32(2.0)).loss_weight
    seed = cn.Solver(seed=np.int64(3)).seed
    assert (type(weight), type(seed)) == (float, int)


def test_an_incumbent_is_no_part_of_what_is_recorded():
    scores = draw_scores("mlp")
    exact = cn.Exact(binary=True, rescale=1.0, incumbent=scores)
    assert exact.without_data().incumbent is None
    assert exact.without_data() == replace(exact, incumbent=None)
    assert "incumbent" not in exact.to_dict()


def test_shares_by_what_they_are_of():
    assert (HALF.measure, HALF.share, HALF.by_layer) == ("units", 0.5, True)
    assert not cn.Budget(units=0.5, scope="global").by_layer
    assert not cn.Budget(macs=0.5).by_layer
    assert cn.Budget(units=0.5, scope="global").with_share(0.7) == cn.Budget(units=0.7, scope="global")

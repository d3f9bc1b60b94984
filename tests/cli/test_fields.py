"""Options of commands are the fields of the settings' types: none missing, none twice, none of another default."""

from __future__ import annotations

import pytest
import typer.main

import critical_neurons as cn
from critical_neurons.cli.commands import app
from critical_neurons.cli.fields import takes_settings
from critical_neurons.core.budget import Budget
from critical_neurons.core.formulation import Formulation
from critical_neurons.core.settings import list_settings
from critical_neurons.core.solver import Solver
from critical_neurons.errors import InvalidSettingError

WITHIN = (cn.Bisection, cn.Lagrangian)
"""They take the place of a loss weight."""


def find_options(command):
    return {option.name: option for option in typer.main.get_command(app).commands[command].params}


def name_option(field):
    return field.metadata["option"] or field.name


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *(("score", kind) for kind in (cn.Paper, cn.Exact, cn.Linearised, *WITHIN, cn.Budget, cn.Solver)),
        ("compress", cn.Solver),
    ],
)
def test_every_field_has_its_option(command, kind):
    options = find_options(command)
    for field in list_settings(kind):
        option = options[name_option(field)]
        assert option.help.startswith(field.metadata["help"])
        if kind not in WITHIN and field.name != "options":
            assert option.default == field.default


def test_and_there_are_no_others():
    """But for what has no type: data, files, workers and the span."""
    kinds = (cn.Paper, cn.Exact, cn.Linearised, *WITHIN, cn.Budget, cn.Solver)
    fields = {name_option(field) for kind in kinds for field in list_settings(kind)}
    data = {"model", "data", "weights", "per_class", "split", "mean", "std", "resize", "channels"}
    files = {"output", "table", "earlier", "incumbent", "as_json"}
    shown = {"quiet", "verbose"}
    others = {"formulation", "by_class", "jobs", "backend", "scheduler", "ignore", "start", "stop"}
    assert set(find_options("score")) == fields | data | files | shown | others


def test_options_of_some_formulations_name_them():
    options = find_options("score")
    assert options["binary"].help.endswith("With --formulation exact.")
    assert options["bounds"].help.endswith("With --formulation paper or exact.")
    assert "With" not in options["rescale"].help


def build(**given):
    """What the command is called with, where these options are given."""
    found = {}

    @takes_settings
    def command(*, formulation: Formulation, budget: Budget | None, solver: Solver):
        found.update(formulation=formulation, budget=budget, solver=solver)

    defaults = {name: parameter.default for name, parameter in command.__signature__.parameters.items()}
    assert set(given) <= set(defaults)
    command(**{**defaults, **given})
    return found


def test_without_options_everything_is_at_its_default():
    assert build() == {"formulation": cn.Paper(), "budget": None, "solver": cn.Solver()}


def test_what_is_given_arrives():
    found = build(
        formulation="exact", binary=True, integer=False, loss_increase=0.1, units=0.5, scope="global", solver="highs"
    )
    exact = cn.Exact(binary=True, integer=False, loss_weight=cn.Lagrangian(0.1))
    assert found["formulation"] == exact
    assert found["budget"] == cn.Budget(units=0.5, scope="global")
    assert found["solver"] == cn.Solver("highs")
    assert build(mean_score=0.5)["formulation"] == cn.Paper(loss_weight=cn.Bisection(0.5))
    assert build(solver_option=["threads=2", "name=x"])["solver"] == cn.Solver(options={"threads": 2, "name": "x"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"binary": True}, "--binary: no setting of --formulation paper. It goes with --formulation exact."),
        ({"formulation": "linearised", "integer": False}, "It goes with --formulation paper or exact."),
        ({"loss_weight": 2.0, "mean_score": 0.5}, "--mean-score: takes the place of --loss-weight. Leave out one"),
        ({"mean_score": 0.5, "loss_increase": 0.1}, "--loss-increase: takes the place of --mean-score"),
        ({"solver_option": ["a=1", "a=2"]}, "--solver-option: a is given twice"),
    ],
)
def test_what_cannot_go_together(given, message):
    with pytest.raises(InvalidSettingError) as caught:
        build(**given)
    assert message in str(caught.value)

"""Settings of cells: what stored results are found by, as what `cn.score` takes today."""

from __future__ import annotations

import pytest

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError
from critical_neurons_reproduction.experiments.cells import TABLES, list_cells
from critical_neurons_reproduction.score_settings import read_score_settings

AUTHORS = {"input_radius": 1e-5, "integer": False, "objective": "authors", "gap": 1e-3, "time_limit": 60}


def test_all_that_a_cell_tells_arrives():
    assert read_score_settings({**AUTHORS, "loss_weight": 1, "rescale": 0}) == {
        "formulation": cn.Paper(loss_weight=1, rescale=0, input_radius=1e-5, integer=False, objective="authors"),
        "budget": None,
        "solver": cn.Solver(gap=1e-3, time_limit=60, threads=1),
    }
    by_class = read_score_settings({"by_class": True, "threads": 2, "solver": "highs"})
    assert by_class["formulation"] == cn.ByClass(cn.Paper())
    assert by_class["solver"] == cn.Solver("highs", threads=2)


def test_what_a_formulation_does_not_have_is_left_out():
    read = read_score_settings({**AUTHORS, "formulation": "linearised", "loss_weight": 2}, threads=None)
    assert read["formulation"] == cn.Linearised(loss_weight=2, objective="authors")
    assert read["solver"].threads is None
    budget = read_score_settings({"formulation": "linearised", "budget": {"macs": 0.5}})["budget"]
    assert budget == cn.Budget(macs=0.5)


def test_what_nothing_has_is_refused():
    with pytest.raises(InvalidSettingError, match="score: unknown: colour"):
        read_score_settings({"colour": 1})


@pytest.mark.parametrize("table", [each for each in TABLES if each != "replay"])
def test_every_cell_can_be_read(table):
    found = [cell.settings["score"] for cell in list_cells(table, seeds=[0]) if "score" in cell.settings]
    assert found
    for settings in found:
        read = read_score_settings(settings)
        program = read["formulation"]
        program = program.formulation if isinstance(program, cn.ByClass) else program
        assert program.name == settings.get("formulation", "paper")
        assert (program.loss_weight, program.objective) == (settings["loss_weight"], settings["objective"])

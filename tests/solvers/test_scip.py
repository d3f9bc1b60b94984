"""SCIP: what only this solver has to get right. What every solver has to is in test_solving.py."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pyscipopt
import pytest
from scipy import sparse

from critical_neurons.core.program import Rows
from critical_neurons.errors import MissingExtraError, SolverError
from critical_neurons.solvers import Capability, Limits, find_solver, ignore_progress, scip
from critical_neurons.solvers.lp_engine import Outcome
from critical_neurons.solvers.scip import _Scip
from tests.solvers.test_solvers import INFINITE, LIMITS, knapsack, linear, make_program

EXACT = 1e-9


def watch_nothing(bound, point):
    pass


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    with pytest.raises(MissingExtraError, match=r"pyscipopt is not installed.*critical_neurons\[scip\]"):
        find_solver("scip")


def test_capabilities():
    assert find_solver("scip").capabilities == {Capability.INTEGER, Capability.SOURCES}


def test_rows_bounds_and_cost_change_between_solves():
    engine = _Scip(linear(), LIMITS)
    assert engine.solve(9.0).point == pytest.approx([1.6, 1.2], abs=EXACT)
    engine.add_rows(Rows(sparse.csr_array([[1.0, 0.0]]), np.array([-INFINITE]), np.array([1.0])))
    assert engine.solve(9.0).point == pytest.approx([1.0, 1.5], abs=EXACT)
    engine.change_bounds(np.array([1]), np.array([0.25]), np.array([0.25]))
    assert engine.solve(9.0).point == pytest.approx([1.0, 0.25], abs=EXACT)
    engine.change_bounds(np.array([1]), np.array([0.0]), np.array([INFINITE]))
    engine.change_cost(np.array([-1.0, 0.1]))
    result = engine.solve(9.0)
    assert result.point == pytest.approx([1.0, 0.0], abs=EXACT)
    assert result.bound == pytest.approx(-1.0, abs=EXACT)


def test_an_integer_solve_sees_the_same_changes():
    engine = _Scip(knapsack(), LIMITS)
    result = engine.solve_integer(9.0, 0.0, None, watch_nothing)
    assert result.outcome is Outcome.OPTIMAL
    assert result.bound == pytest.approx(-21.0)
    engine.change_bounds(np.array([1]), np.zeros(1), np.zeros(1))
    engine.add_rows(Rows(sparse.csr_array([[1.0, 0.0, 1.0, 1.0]]), np.array([-INFINITE]), np.array([2.0])))
    result = engine.solve_integer(9.0, 0.0, None, watch_nothing)
    assert result.point == pytest.approx([1, 0, 1, 0])
    assert engine.solve(9.0).bound == pytest.approx(-14.0)  # integral as it stands


def test_the_start_is_given_to_scip(monkeypatch):
    given = []
    original = pyscipopt.Model.addSol

    class Model(pyscipopt.Model):
        def addSol(self, solution, free=True):  # noqa: N802
            stored = original(self, solution, free)
            given.append(stored)
            return stored

    monkeypatch.setattr(pyscipopt, "Model", Model)
    engine = _Scip(knapsack(), LIMITS)
    engine.solve_integer(9.0, 0.0, np.array([0.0, 1.0, 1.0, 1.0]), watch_nothing)
    assert given == [True]


def test_time_runs_out_in_the_simplex():
    generator = np.random.default_rng(0)
    rows = [(row, -INFINITE, 1.0) for row in generator.uniform(size=(400, 400))]
    engine = _Scip(make_program(-generator.uniform(size=400), [0] * 400, [9] * 400, rows=rows), LIMITS)
    assert engine.solve(0.001).outcome is Outcome.STOPPED
    assert engine.solve(60.0).outcome is Outcome.OPTIMAL


def test_in_slices_or_at_once_the_optimum_is_the_same(monkeypatch):
    generator = np.random.default_rng(0)
    rows = [(row, -INFINITE, 1.0) for row in generator.uniform(size=(300, 300))]
    program = make_program(-generator.uniform(size=300), [0] * 300, [9] * 300, rows=rows)
    once = _Scip(program, LIMITS).solve(60.0)
    monkeypatch.setattr(scip, "LOOK_SECONDS", 0.005)
    sliced = _Scip(program, LIMITS).solve(60.0)
    assert sliced.bound == pytest.approx(once.bound, abs=EXACT)


def test_failures_of_scip_are_named(monkeypatch):
    class Model(pyscipopt.Model):
        def optimizeNogil(self):  # noqa: N802
            raise Exception("SCIP: error in LP solver!")

    monkeypatch.setattr(pyscipopt, "Model", Model)
    with pytest.raises(SolverError, match="scip failed: SCIP: error in LP solver"):
        find_solver("scip").solve(knapsack(), LIMITS, ignore_progress)


def test_the_seed_and_the_options_reach_scip(monkeypatch):
    given = {}

    class Model(pyscipopt.Model):
        def setParam(self, name, value):  # noqa: N802
            given[name] = value
            super().setParam(name, value)

    monkeypatch.setattr(pyscipopt, "Model", Model)
    limits = replace(LIMITS, seed=7, options={"limits/nodes": 1000})
    find_solver("scip").solve(knapsack(), limits, ignore_progress)
    assert given["randomization/randomseedshift"] == 7
    assert given["limits/nodes"] == 1000
    assert given["misc/catchctrlc"] is False
    assert 0 < given["limits/time"] <= Limits().time_limit

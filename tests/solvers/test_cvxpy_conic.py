from __future__ import annotations

import sys
from dataclasses import replace

import cvxpy
import numpy as np
import pytest
from scipy import sparse

from critical_neurons.core.program import Rows, stack_rows
from critical_neurons.core.solution import Status
from critical_neurons.errors import InvalidSettingError, MissingExtraError, SolverError
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.solvers import Capability, Limits, cvxpy_conic, find_solver, ignore_progress
from critical_neurons.solvers.cvxpy_conic import ConicSolver
from tests.zoo import share_case

CLOSE = 1e-5
FIRST_ORDER = 1e-2
"""What to expect of SCS."""


def encode(name="mlp", *, integer=False, radius=0.05):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    return encode_paper(case.network, bounds, case.labels, Objective(), integer=integer)


def solve(program, name="CLARABEL", **limits):
    return ConicSolver(name).solve(program, Limits(**limits), ignore_progress)


def test_optimum_of_a_program_with_sources():
    program = encode()
    seen = []
    solution = ConicSolver("clarabel").solve(program, Limits(), seen.append)
    expected = find_solver("highs").solve(program, Limits(gap=0.1 * CLOSE), ignore_progress)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(expected.objective, rel=CLOSE, abs=CLOSE)
    assert solution.objective == program.value(solution.point)
    assert solution.bound is None
    assert solution.gap is None
    assert solution.history == tuple(seen)
    assert solution.sizes["columns"] == program.column_count
    assert set(solution.sizes) == {"columns", "rows", "rows_used", "gates", "cuts"}


def test_point_keeps_bounds_and_true_softmax():
    program = encode()
    point = solve(program).point
    assert np.all(program.lower <= point)
    assert np.all(point <= program.upper)
    assert np.array_equal(point[program.term.columns], program.term.values(point))


def test_scs_comes_close():
    program = encode()
    solution = solve(program, "SCS")
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert solution.objective == pytest.approx(solve(program).objective, abs=FIRST_ORDER)


def test_integer_columns_are_refused():
    with pytest.raises(SolverError, match="cvxpy:CLARABEL cannot solve programs with integer columns"):
        solve(encode(integer=True))
    assert Capability.INTEGER not in ConicSolver("CLARABEL").capabilities


@pytest.mark.parametrize("name", ["NOTHING", "HIGHS", "OSQP"])
def test_solvers_without_exponential_cones_are_refused(name):
    with pytest.raises(InvalidSettingError, match=rf"cvxpy:{name}.*CLARABEL.*All installed:.*OSQP"):
        find_solver(f"cvxpy:{name}")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(MissingExtraError, match=r"critical_neurons\[cvxpy\]"):
        ConicSolver("CLARABEL")


def test_fixed_columns_are_kept():
    program = encode()
    upper, lower = program.upper.copy(), program.lower.copy()
    lower[0] = upper[0] = 0.97
    solution = solve(replace(program, lower=lower, upper=upper))
    assert solution.point[0] == 0.97
    assert solution.objective >= solve(program).objective - CLOSE


def test_fixed_softmax_column_limits_the_loss():
    program = encode()
    free = solve(program)
    column = program.term.columns.start
    upper, lower = program.upper.copy(), program.lower.copy()
    lower[column] = upper[column] = free.point[column] + 0.5 * (program.start[column] - free.point[column])
    solution = solve(replace(program, lower=lower, upper=upper))
    assert solution.status is Status.OPTIMAL
    assert program.term.values(solution.point)[0] <= upper[column] + CLOSE


def test_equations_are_kept():
    program = encode()
    row = sparse.csr_array(program.tie_break[None])
    wanted = np.array([0.5 + 0.5 * program.start[program.blocks["score"]].sum()])
    equation = Rows(row, wanted, wanted)
    solution = solve(replace(program, rows=stack_rows([program.rows, equation], program.column_count)))
    assert row @ solution.point == pytest.approx(wanted, abs=CLOSE)


def test_infeasible_program():
    program = encode(radius=0.0)
    lower = program.lower.copy()
    lower[0] = 0.5
    impossible = Rows(sparse.csr_array(np.eye(1, program.column_count)), np.array([-np.inf]), np.array([0.2]))
    rows = stack_rows([program.rows, impossible], program.column_count)
    solution = solve(replace(program, rows=rows, lower=lower, start=None))
    assert solution.status is Status.INFEASIBLE
    assert solution.point is None
    assert solution.objective is None


def test_row_without_coefficients_can_be_infeasible():
    program = encode()
    impossible = Rows(sparse.csr_array((1, program.column_count)), np.array([1.0]), np.array([np.inf]))
    rows = stack_rows([program.rows, impossible], program.column_count)
    assert solve(replace(program, rows=rows, start=None)).status is Status.INFEASIBLE


def test_unbounded_program():
    program = encode()
    nothing = stack_rows([], program.column_count)
    assert solve(replace(program, rows=nothing, sources=())).status is Status.UNBOUNDED


def test_time_limit_leaves_the_start():
    program = encode("nest")
    solution = solve(program, time_limit=1e-9)
    assert solution.status is Status.FEASIBLE
    assert np.array_equal(solution.point, program.start)
    assert solve(replace(program, start=None), time_limit=1e-9).status is Status.TIMED_OUT


def test_solver_that_stops_early_leaves_the_start(monkeypatch):
    monkeypatch.setitem(cvxpy_conic._OPTIONS, "CLARABEL", lambda seconds, limits: {"max_iter": 2})
    program = encode("nest")
    solution = solve(program)
    assert solution.status is Status.FEASIBLE
    assert np.array_equal(solution.point, program.start)


def test_time_limit_reaches_the_solver(monkeypatch):
    given = {}
    original = cvxpy.Problem.solve

    def listen(self, **options):
        given.update(options)
        return original(self, **options)

    monkeypatch.setattr(cvxpy.Problem, "solve", listen)
    solve(encode(), time_limit=50.0, threads=1)
    assert 0 < given["time_limit"] < 50.0
    assert given["max_threads"] == 1


def test_interrupt_leaves_the_start(monkeypatch):
    def interrupt(self, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cvxpy.Problem, "solve", interrupt)
    program = encode()
    solution = solve(program)
    assert solution.interrupted
    assert solution.status is Status.FEASIBLE
    assert solution.objective == program.value(program.start)


def test_errors_of_cvxpy_name_the_solver(monkeypatch):
    def fail(self, **options):
        raise ValueError("no licence")

    monkeypatch.setattr(cvxpy.Problem, "solve", fail)
    with pytest.raises(SolverError, match=r"cvxpy:CLARABEL failed: no licence"):
        solve(encode())


def test_point_that_breaks_rows_is_not_believed(monkeypatch):
    original = cvxpy.Problem.solve

    def spoil(self, **options):
        original(self, **options)
        for variable in self.variables():
            variable.save_value(np.zeros(variable.shape))

    monkeypatch.setattr(cvxpy.Problem, "solve", spoil)
    program = encode()
    assert solve(replace(program, start=None)).status is Status.FAILED
    assert np.array_equal(solve(program).point, program.start)


def test_a_program_too_large_for_the_time_is_not_begun(monkeypatch):
    monkeypatch.setattr(cvxpy_conic, "SECONDS_PER_NUMBER", 1.0)
    monkeypatch.setattr(cvxpy.Problem, "solve", lambda *given, **named: pytest.fail("it was begun"))
    program = encode()
    solution = solve(program)
    assert solution.status is Status.FEASIBLE
    assert np.array_equal(solution.point, program.unpruned)
    assert "too large" in solution.note

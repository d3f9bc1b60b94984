"""HiGHS, the default solver: dual simplex and branch and bound, under the loop that adds rows and cuts."""

from __future__ import annotations

import math
from typing import Any

import highspy
import numpy as np

from critical_neurons.errors import SolverError
from critical_neurons.network import Floats, Ints
from critical_neurons.program import Program, Rows
from critical_neurons.solution import Solution
from critical_neurons.solving.base import Capability, Limits, Report
from critical_neurons.solving.cuts import CutLoop, LinearResult, Outcome

_OUTCOMES = {
    highspy.HighsModelStatus.kOptimal: Outcome.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: Outcome.INFEASIBLE,
    highspy.HighsModelStatus.kUnbounded: Outcome.UNBOUNDED,
    highspy.HighsModelStatus.kUnboundedOrInfeasible: Outcome.INFEASIBLE,
    highspy.HighsModelStatus.kTimeLimit: Outcome.STOPPED,
    highspy.HighsModelStatus.kInterrupt: Outcome.STOPPED,
}

FEASIBILITY = 1e-9
"""Tighter than HiGHS's own: below the least difference that calls for a new tangent."""


class HighsSolver:
    name = "highs"
    capabilities = frozenset({Capability.INTEGER, Capability.SOURCES})

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        return CutLoop(_Highs(program, limits), program, limits, report).run()


class _Highs:
    """The linear part of a program inside HiGHS; continuous except during `solve_integer`."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self._integers = np.flatnonzero(program.integer).astype(np.int32)
        self._highs = highspy.Highs()
        self._highs.HandleUserInterrupt = True
        self._set("output_flag", False)
        self._set("random_seed", limits.seed)
        self._set("primal_feasibility_tolerance", FEASIBILITY)
        if limits.threads is not None:
            self._set("threads", limits.threads)
        lp = highspy.HighsLp()
        lp.num_col_ = program.column_count
        lp.num_row_ = 0
        lp.col_cost_ = program.cost
        lp.col_lower_ = program.lower
        lp.col_upper_ = program.upper
        lp.a_matrix_.start_ = np.zeros(program.column_count + 1, dtype=np.int32)
        self._check(self._highs.passModel(lp), "load the program")
        self.add_rows(program.rows)

    def add_rows(self, rows: Rows) -> None:
        matrix = rows.matrix
        self._check(
            self._highs.addRows(
                len(rows),
                rows.lower,
                rows.upper,
                matrix.nnz,
                matrix.indptr[:-1].astype(np.int32),
                matrix.indices.astype(np.int32),
                matrix.data,
            ),
            "add rows",
        )

    def change_cost(self, cost: Floats) -> None:
        columns = np.arange(len(cost), dtype=np.int32)
        self._check(self._highs.changeColsCost(len(cost), columns, cost), "change the cost")

    def change_bounds(self, columns: Ints, lower: Floats, upper: Floats) -> None:
        self._check(
            self._highs.changeColsBounds(len(columns), columns.astype(np.int32), lower, upper), "change bounds"
        )

    def solve(self, seconds: float) -> LinearResult:
        """From the last basis; if that fails, once more from none.

        The clock of a linear program, unlike that of an integer one, goes on from run to run.
        """
        end = self._highs.getRunTime() + seconds
        self._run(end)
        if self._result().outcome is Outcome.FAILED:
            self._highs.clearSolver()
            self._run(end)
        return self._result(self._highs.getInfo().objective_function_value)

    def solve_integer(self, seconds: float, gap: float, start: Floats | None) -> LinearResult:
        self._set("mip_rel_gap", gap)
        self._set("mip_abs_gap", gap)
        self._change_kind(highspy.HighsVarType.kInteger)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = start
            self._highs.setSolution(solution)
        self._run(seconds)
        result = self._result(self._highs.getInfo().mip_dual_bound)
        self._change_kind(highspy.HighsVarType.kContinuous)
        return result

    def _change_kind(self, kind: Any) -> None:
        count = len(self._integers)
        self._check(
            self._highs.changeColsIntegrality(count, self._integers, np.full(count, kind)), "change integrality"
        )

    def _run(self, time_limit: float) -> None:
        """In a thread of its own, so that Ctrl-C can stop it."""
        self._set("time_limit", time_limit)
        self._highs.startSolve()
        try:
            while not self._highs.wait(0.1)[0]:
                pass
        except KeyboardInterrupt:
            self._highs.cancelSolve()
            while not self._highs.wait(0.1)[0]:
                pass
            raise

    def _result(self, bound: float = -math.inf) -> LinearResult:
        outcome = _OUTCOMES.get(self._highs.getModelStatus(), Outcome.FAILED)
        point = np.array(self._highs.getSolution().col_value) if outcome is Outcome.OPTIMAL else None
        return LinearResult(outcome, point, bound)

    def _set(self, option: str, value: Any) -> None:
        self._check(self._highs.setOptionValue(option, value), f"set {option} to {value}")

    @staticmethod
    def _check(status: Any, what: str) -> None:
        if status == highspy.HighsStatus.kError:
            raise SolverError(f"highs: could not {what}.")

"""HiGHS, the default solver: dual simplex and branch and bound, inside the cutting plane loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import highspy
import numpy as np

from critical_neurons.core.program import Program, Rows
from critical_neurons.core.solution import Solution
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import InvalidSettingError, SolverError
from critical_neurons.solvers.base import Capability, Limits, Report, refuse_settled
from critical_neurons.solvers.branch_and_bound import choose_loop
from critical_neurons.solvers.lp_engine import (
    FEASIBILITY,
    LOOK_SECONDS,
    LinearPart,
    LinearResult,
    Outcome,
    Watch,
    run_in_thread,
)

_OUTCOMES = {
    highspy.HighsModelStatus.kOptimal: Outcome.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: Outcome.INFEASIBLE,
    highspy.HighsModelStatus.kUnbounded: Outcome.UNBOUNDED,
    highspy.HighsModelStatus.kUnboundedOrInfeasible: Outcome.INFEASIBLE,
    highspy.HighsModelStatus.kTimeLimit: Outcome.STOPPED,
    highspy.HighsModelStatus.kInterrupt: Outcome.STOPPED,
    highspy.HighsModelStatus.kIterationLimit: Outcome.STOPPED,
    highspy.HighsModelStatus.kSolutionLimit: Outcome.STOPPED,
    highspy.HighsModelStatus.kMemoryLimit: Outcome.STOPPED,
    highspy.HighsModelStatus.kObjectiveBound: Outcome.STOPPED,
    highspy.HighsModelStatus.kObjectiveTarget: Outcome.STOPPED,
}

LARGEST_COEFFICIENT = 1e15
"""HiGHS refuses rows with larger ones."""

DELAY, LARGE = 1e-6, 10**6
"""Seconds for every row, column and coefficient that HiGHS may need at once, in presolve or after its time limit, as
measured on linear programs of millions; below that size it is not worth counting."""

_SETTLED = {
    "time_limit": "time_limit",
    "mip_rel_gap": "gap",
    "mip_abs_gap": "gap",
    "threads": "threads",
    "random_seed": "seed",
}


class HighsSolver:
    name = "highs"
    capabilities = frozenset({Capability.INTEGER, Capability.SOURCES})

    def check_options(self, options: Mapping[str, Any]) -> None:
        refuse_settled(self.name, options, _SETTLED)
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        for option, value in options.items():
            if highs.getOptionType(option)[0] == highspy.HighsStatus.kError:
                raise InvalidSettingError(
                    f"options: highs has no option {option!r}. See https://ergo-code.github.io/HiGHS/dev/options/definitions/."
                )
            try:
                accepted = highs.setOptionValue(option, value) != highspy.HighsStatus.kError
            except TypeError:
                accepted = False
            if not accepted:
                raise InvalidSettingError(f"options: highs does not take {option}={value!r}.")

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        return choose_loop(program)(HighsEngine, program, limits, report).run()


class HighsEngine:
    """The linear part of a program inside HiGHS; continuous except during `solve_integer`."""

    def __init__(self, program: LinearPart, limits: Limits) -> None:
        self._integers = np.flatnonzero(program.integer).astype(np.int32)
        self._highs = highspy.Highs()
        self._stop = False
        for called in (self._highs.cbSimplexInterrupt, self._highs.cbIpmInterrupt, self._highs.cbMipInterrupt):
            called += self._interrupt
        self._set("output_flag", False)
        self._set("random_seed", limits.seed)
        self._set("primal_feasibility_tolerance", FEASIBILITY)
        if limits.threads is not None:
            self._set("threads", limits.threads)
        for option, value in limits.options.items():
            self._set(option, value)
        lp = highspy.HighsLp()
        lp.num_col_ = len(program.cost)
        lp.num_row_ = 0
        lp.col_cost_ = program.cost
        lp.col_lower_ = program.lower
        lp.col_upper_ = program.upper
        lp.a_matrix_.start_ = np.zeros(len(program.cost) + 1, dtype=np.int32)
        self._check(self._highs.passModel(lp), "load the program")
        self.add_rows(program.rows)

    def add_rows(self, rows: Rows) -> None:
        matrix = rows.matrix
        largest = float(np.abs(rows.matrix.data).max(initial=0.0))
        if not largest <= LARGEST_COEFFICIENT:
            raise SolverError(
                f"highs: coefficients up to {largest:.3g} in the program. Accepted: {LARGEST_COEFFICIENT:.0e}. "
                "Scale the inputs, or the weights of the layers, to numbers of ordinary size."
            )
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
        """From the last basis; if that fails, once more without one.

        HiGHS counts the time of a linear program, unlike that of an integer one, from run to run.
        """
        seconds -= self._guess_delay()
        if seconds <= 0:
            return LinearResult(Outcome.STOPPED, None, -math.inf)
        end = self._highs.getRunTime() + seconds
        self._run(end)
        if self._find_outcome() is Outcome.FAILED:
            self._highs.clearSolver()
            self._run(end)
        return self._result(self._highs.getInfo().objective_function_value)

    def solve_integer(self, seconds: float, gap: float, start: Floats | None, watch: Watch) -> LinearResult:
        seconds -= self._guess_delay()
        if seconds <= 0:
            return LinearResult(Outcome.STOPPED, None, -math.inf)
        self._set("mip_rel_gap", gap)
        self._set("mip_abs_gap", gap)
        self._change_kind(highspy.HighsVarType.kInteger)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = start
            self._highs.setSolution(solution)
        messages = _Messages()
        self._highs.cbMipInterrupt += messages.receive
        self._highs.cbMipImprovingSolution += messages.receive
        try:
            self._run(seconds, lambda: messages.pass_on(watch))
            return self._integer_result()
        except KeyboardInterrupt:
            result = self._integer_result()
            watch(result.bound, result.point)
            raise
        finally:
            self._highs.cbMipInterrupt -= messages.receive
            self._highs.cbMipImprovingSolution -= messages.receive
            self._change_kind(highspy.HighsVarType.kContinuous)

    def _guess_delay(self) -> float:
        size: int = self._highs.getNumNz() + self._highs.getNumCol() + self._highs.getNumRow()
        return DELAY * size if size >= LARGE else 0.0

    def _change_kind(self, kind: Any) -> None:
        count = len(self._integers)
        self._check(
            self._highs.changeColsIntegrality(count, self._integers, np.full(count, kind)), "change integrality"
        )

    def _run(self, time_limit: float, look: Callable[[], None] = lambda: None) -> None:
        """In a separate thread, so that Ctrl-C can stop it. highspy's own thread is shared by the whole process."""
        self._set("time_limit", time_limit)
        self._stop = False
        ended = run_in_thread(self._run_here)
        try:
            while not ended.wait(LOOK_SECONDS):
                look()
        except BaseException:
            self._stop = True
            ended.wait()
            raise

    def _run_here(self) -> None:
        self._highs.run()
        highspy.Highs.resetGlobalScheduler(True)  # ends its threads

    def _interrupt(self, event: Any) -> None:
        if self._stop:
            event.interrupt()

    def _find_outcome(self) -> Outcome:
        return _OUTCOMES.get(self._highs.getModelStatus(), Outcome.FAILED)

    def _result(self, bound: float) -> LinearResult:
        outcome = self._find_outcome()
        if outcome is not Outcome.OPTIMAL:
            return LinearResult(outcome, None, bound)
        solution = self._highs.getSolution()
        return LinearResult(outcome, np.array(solution.col_value), bound, np.array(solution.row_dual))

    def _integer_result(self) -> LinearResult:
        info = self._highs.getInfo()
        result = self._result(info.mip_dual_bound)
        known = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if result.outcome is Outcome.STOPPED and known:
            return replace(result, point=np.array(self._highs.getSolution().col_value))
        return result

    def _set(self, option: str, value: Any) -> None:
        self._check(self._highs.setOptionValue(option, value), f"set {option} to {value}")

    @staticmethod
    def _check(status: Any, what: str) -> None:
        if status == highspy.HighsStatus.kError:
            raise SolverError(f"highs: could not {what}.")


class _Messages:
    """Passes bounds and points of a running integer program to the caller's thread."""

    def __init__(self) -> None:
        self._bound = -math.inf
        self._point: Floats | None = None

    def receive(self, event: Any) -> None:
        said = event.data_out
        self._bound = max(self._bound, said.mip_dual_bound)
        if event.callback_type == highspy.cb.HighsCallbackType.kCallbackMipImprovingSolution:
            self._point = np.array(said.mip_solution)

    def pass_on(self, watch: Watch) -> None:
        point, self._point = self._point, None
        watch(self._bound, point)

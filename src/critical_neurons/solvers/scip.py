"""SCIP, as `scip`: SoPlex for linear programs, warm-started from basis to basis, SCIP for integer ones.

Both inside the cutting plane loop. SCIP uses one thread whatever `threads` says; `options` are those of SCIP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from critical_neurons.core.program import Program, Rows, stack_rows
from critical_neurons.core.solution import Solution
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.errors import InvalidSettingError, MissingExtraError, SolverError
from critical_neurons.solvers.base import Capability, Limits, Report, refuse_settled
from critical_neurons.solvers.branch_and_bound import choose_loop
from critical_neurons.solvers.lp_engine import FEASIBILITY, LOOK_SECONDS, LinearResult, Outcome, Watch, run_in_thread

_OUTCOMES = {
    "optimal": Outcome.OPTIMAL,
    "gaplimit": Outcome.OPTIMAL,
    "infeasible": Outcome.INFEASIBLE,
    "unbounded": Outcome.UNBOUNDED,
    "inforunbd": Outcome.INFEASIBLE,
    "timelimit": Outcome.STOPPED,
    "userinterrupt": Outcome.STOPPED,
    "nodelimit": Outcome.STOPPED,
    "totalnodelimit": Outcome.STOPPED,
    "stallnodelimit": Outcome.STOPPED,
    "memlimit": Outcome.STOPPED,
    "sollimit": Outcome.STOPPED,
    "bestsollimit": Outcome.STOPPED,
    "restartlimit": Outcome.STOPPED,
    "primallimit": Outcome.STOPPED,
    "duallimit": Outcome.STOPPED,
}

_SETTLED = {
    "limits/time": "time_limit",
    "limits/gap": "gap",
    "limits/absgap": "gap",
    "randomization/randomseedshift": "seed",
    "misc/catchctrlc": None,
}


class ScipSolver:
    name = "scip"
    capabilities = frozenset({Capability.INTEGER, Capability.SOURCES})

    def __init__(self) -> None:
        _pyscipopt()

    def check_options(self, options: Mapping[str, Any]) -> None:
        refuse_settled(self.name, options, _SETTLED)
        model = _pyscipopt().Model()
        for option, value in options.items():
            try:
                model.setParam(option, value)
            except KeyError as error:
                raise InvalidSettingError(
                    f"options: scip has no parameter {option!r}. See https://scipopt.org/doc/html/PARAMETERS.php."
                ) from error
            except (TypeError, ValueError, LookupError, OverflowError) as error:
                raise InvalidSettingError(f"options: scip does not take {option}={value!r} ({error}).") from error

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        return choose_loop(program)(_Scip, program, limits, report).run()


class _Scip:
    """The linear part of a program: permanently in SoPlex, and in SCIP during an integer solve."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self._limits = limits
        self._integer = program.integer
        self._cost, self._lower, self._upper = program.cost, program.lower.copy(), program.upper.copy()
        self._rows: list[Rows] = []
        pyscipopt = _pyscipopt()
        self._parameter = pyscipopt.scip.PY_SCIP_LPPARAM
        self._lp = pyscipopt.LP()
        self._lp.setRealParam(self._parameter.FEASTOL, FEASIBILITY)
        self._lp.setIntParam(self._parameter.RANDOMSEED, limits.seed)
        self._lp.setIntParam(self._parameter.TIMING, 2)  # wall-clock time
        self._lp.setIntParam(self._parameter.PRESOLVING, 0)  # otherwise a solve that is stopped starts again
        self._lp.addCols(
            [[] for _ in self._cost], self._cost.tolist(), self._finite(self._lower), self._finite(self._upper)
        )
        self.add_rows(program.rows)

    def add_rows(self, rows: Rows) -> None:
        self._rows.append(rows)
        entries = [list(zip(*row, strict=True)) for row in _entries(rows)]
        if entries:
            self._lp.addRows(entries, self._finite(rows.lower), self._finite(rows.upper))

    def change_cost(self, cost: Floats) -> None:
        self._cost = cost
        for column, value in enumerate(cost.tolist()):
            self._lp.chgObj(column, value)

    def change_bounds(self, columns: Ints, lower: Floats, upper: Floats) -> None:
        self._lower[columns], self._upper[columns] = lower, upper
        for column, low, high in zip(columns.tolist(), self._finite(lower), self._finite(upper), strict=True):
            self._lp.chgBound(column, low, high)

    def solve(self, seconds: float) -> LinearResult:
        """From the last basis; if that fails, once more without one."""
        end = time.monotonic() + seconds
        outcome = self._solve_linear(end)
        if outcome is Outcome.FAILED:
            self._lp.setIntParam(self._parameter.FROMSCRATCH, 1)
            outcome = self._solve_linear(end, slices=False)
            self._lp.setIntParam(self._parameter.FROMSCRATCH, 0)
        if outcome is not Outcome.OPTIMAL:
            return LinearResult(outcome, None, -math.inf)
        return LinearResult(outcome, np.array(self._lp.getPrimal()), self._lp.getObjVal())

    def _solve_linear(self, end: float, *, slices: bool = True) -> Outcome:
        """In slices of time: SoPlex holds the interpreter lock, so Ctrl-C is noticed between two of them."""
        while True:
            now = time.monotonic()
            if now >= end:
                return Outcome.STOPPED
            seconds = min(LOOK_SECONDS, end - now) if slices else end - now
            self._lp.setRealParam(self._parameter.LPTILIM, seconds)
            try:
                self._lp.solve()
            except Exception:  # pyscipopt raises bare exceptions for SCIP's return codes
                return Outcome.FAILED
            if self._lp.isOptimal():
                return Outcome.OPTIMAL
            if self._lp.getDualRay() is not None:
                return Outcome.INFEASIBLE
            if self._lp.getPrimalRay() is not None:
                return Outcome.UNBOUNDED
            if time.monotonic() - now < 0.5 * seconds:
                return Outcome.FAILED

    def solve_integer(self, seconds: float, gap: float, start: Floats | None, watch: Watch) -> LinearResult:
        end = time.monotonic() + seconds
        search = _ScipSearch((self._cost, self._lower, self._upper, self._integer), self._limits, gap)
        search.add_rows(stack_rows(self._rows, len(self._cost)))
        if start is not None:
            search.suggest(start)
        return search.run(max(end - time.monotonic(), 0.0), watch)

    def _finite(self, values: Floats) -> list[float]:
        infinity = self._lp.infinity()
        finite: list[float] = np.clip(values, -infinity, infinity).tolist()
        return finite


class _ScipSearch:
    """One integer program inside SCIP."""

    def __init__(self, program: tuple[Floats, Floats, Floats, Bools], limits: Limits, gap: float) -> None:
        """`program`: cost, lower, upper, integer."""
        self._model = _pyscipopt().Model()
        self._model.hideOutput()
        settings = {
            "numerics/feastol": FEASIBILITY,
            "limits/gap": gap,
            "limits/absgap": gap,
            "randomization/randomseedshift": limits.seed,
            "misc/catchctrlc": False,  # Python catches it
            **limits.options,
        }
        for parameter, value in settings.items():
            self._model.setParam(parameter, value)
        self._columns = [
            self._model.addVar(
                vtype="I" if integer else "C",
                lb=low if math.isfinite(low) else None,
                ub=high if math.isfinite(high) else None,
                obj=cost,
            )
            for cost, low, high, integer in zip(*(part.tolist() for part in program), strict=True)
        ]

    def add_rows(self, rows: Rows) -> None:
        pyscipopt, infinity = _pyscipopt(), self._model.infinity()
        lower, upper = (np.clip(side, -infinity, infinity).tolist() for side in (rows.lower, rows.upper))
        for (columns, values), low, high in zip(_entries(rows), lower, upper, strict=True):
            row = self._model.addCons(pyscipopt.scip.ExprCons(pyscipopt.Expr(), low, high))
            for column, value in zip(columns, values, strict=True):
                self._model.addCoefLinear(row, self._columns[column], value)

    def suggest(self, start: Floats) -> None:
        """SCIP checks the point itself, and ignores it if it violates a row."""
        point = self._model.createSol()
        for column, value in zip(self._columns, start.tolist(), strict=True):
            self._model.setSolVal(point, column, value)
        self._model.addSol(point)

    def run(self, seconds: float, watch: Watch) -> LinearResult:
        """In a separate thread, so that Ctrl-C can stop it."""
        self._model.setParam("limits/time", seconds)
        failures: list[Exception] = []

        def optimise() -> None:
            try:
                self._model.optimizeNogil()
            except Exception as error:
                failures.append(error)

        ended = run_in_thread(optimise)
        try:
            while not ended.wait(LOOK_SECONDS):
                pass
        except KeyboardInterrupt:
            self._model.interruptSolve()
            ended.wait()
            result = self._result()
            watch(result.bound, result.point)
            raise
        if failures:
            raise SolverError(f"scip failed: {failures[0]}") from failures[0]
        return self._result()

    def _result(self) -> LinearResult:
        outcome = _OUTCOMES.get(self._model.getStatus(), Outcome.FAILED)
        point = None
        if outcome in (Outcome.OPTIMAL, Outcome.STOPPED) and self._model.getNSols() > 0:
            best = self._model.getBestSol()
            point = np.array([self._model.getSolVal(best, column) for column in self._columns])
        bound = self._model.getDualbound()
        return LinearResult(outcome, point, bound if abs(bound) < self._model.infinity() else -math.inf)


def _entries(rows: Rows) -> Iterator[tuple[list[int], list[float]]]:
    """The columns and coefficients of each row."""
    columns, values = rows.matrix.indices.tolist(), rows.matrix.data.tolist()
    for start, end in pairwise(rows.matrix.indptr.tolist()):
        yield columns[start:end], values[start:end]


def _pyscipopt() -> Any:
    try:
        import pyscipopt
    except ImportError as error:
        raise MissingExtraError("pyscipopt", "scip") from error
    return pyscipopt

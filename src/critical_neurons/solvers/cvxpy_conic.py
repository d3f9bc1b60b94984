"""Any CVXPY solver with exponential cones, as `cvxpy:NAME`: the whole program in one call, without lazy constraints.

Such a solver stops when its residuals and its duality gap are below its own tolerance. That is no proof, so there is
no `bound`. Its point is clipped to the column bounds, its convex term is set to the true value, and its rows are
checked. Ties are not broken: an interior point method ends in the middle of the optimal face.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

import numpy as np
from scipy import sparse

from critical_neurons.core.deadline import TimeIsUp, check_time, until
from critical_neurons.core.loss import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss
from critical_neurons.core.program import Program, Rows, place
from critical_neurons.core.solution import Solution, Status, Step
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import InvalidSettingError, MissingExtraError, SolverError
from critical_neurons.solvers.base import Capability, Limits, Report, refuse_settled
from critical_neurons.solvers.search_record import count_sizes

ROW_TOLERANCE = 1e-5
"""Largest violation of a row, relative to its largest coefficient, in a point that is called feasible."""

SECONDS_PER_NUMBER, FEWEST_STEPS = 3e-6, 10
"""What a step of Clarabel takes on one core for every number in the rows; translation takes less. No step can be
interrupted, and none but the last gives a point. So a program is begun only if this many steps fit into the time."""

TOO_LARGE = "time limit: the program as printed is too large for it. Allow more, or take another solver"

TRANSLATOR = "SCIPY"
"""Of CVXPY's, the faster one for few large matrices."""

_STATUSES = {
    "optimal": Status.OPTIMAL,
    "optimal_inaccurate": Status.FEASIBLE,
    "user_limit": Status.TIMED_OUT,
    "infeasible": Status.INFEASIBLE,
    "unbounded": Status.UNBOUNDED,
}
"""Every other status, the inaccurate verdicts among them, proves nothing: FAILED."""

_CAREFUL = {
    "max_step_fraction": 0.95,
    "iterative_refinement_reltol": 1e-14,
    "iterative_refinement_abstol": 1e-14,
    "iterative_refinement_max_iter": 30,
}
"""At radius 0 a feasible set has no interior, and without these Clarabel may stop short of its own tolerance."""

_OPTIONS: dict[str, Callable[[float, Limits], dict[str, Any]]] = {
    "CLARABEL": lambda seconds, limits: {"time_limit": seconds, "max_threads": limits.threads or 0, **_CAREFUL},
    "SCS": lambda seconds, limits: {"time_limit_secs": seconds},
    "MOSEK": lambda seconds, limits: {
        "mosek_params": {
            "MSK_DPAR_OPTIMIZER_MAX_TIME": seconds,
            "MSK_IPAR_NUM_THREADS": limits.threads or 0,
            "MSK_DPAR_MIO_TOL_REL_GAP": limits.gap,
        }
    },
}
"""Limits as options of each solver; one without an entry has none. 0 threads: the solver's choice."""

_SETTLED = {"solver": "solver", "time_limit": "time_limit", "time_limit_secs": "time_limit", "max_threads": "threads"}


class ConicSolver:
    def __init__(self, inner: str) -> None:
        """`inner` is CVXPY's name for a solver that is installed and knows exponential cones."""
        self._inner = inner.upper()
        found = _find_cone_solvers()
        if self._inner not in found:
            raise InvalidSettingError(
                f"solver: cvxpy:{inner} is not installed or has no exponential cones. "
                f"Installed, with exponential cones: {', '.join(found) or 'none'}. "
                f"All installed: {', '.join(_cvxpy().installed_solvers())}."
            )
        integer = {Capability.INTEGER} if found[self._inner] else set()
        self.capabilities = frozenset(integer)

    @property
    def name(self) -> str:
        return f"cvxpy:{self._inner}"

    def check_options(self, options: Mapping[str, Any]) -> None:
        """CVXPY keeps no list of them, so each is tried on a problem of one variable and one exponential cone."""
        refuse_settled(self.name, options, _SETTLED)
        cp = _cvxpy()
        x = cp.Variable()
        problem = cp.Problem(cp.Minimize(cp.exp(x)), [x >= 0])
        for option, value in options.items():
            try:
                self._call(problem, {option: value})
            except cp.error.SolverError:
                continue  # understood, and too strict to solve even this
            except Exception as error:
                raise InvalidSettingError(
                    f"options: {self.name} does not take {option}={value!r} ({error})."
                ) from error

    def solve(self, program: Program, limits: Limits, report: Report) -> Solution:
        self.check_options(limits.options)
        if program.integer.any() and Capability.INTEGER not in self.capabilities:
            raise SolverError(
                f"{self.name} cannot solve programs with integer columns. Use integer=False, or a solver that can."
            )
        started = time.monotonic()
        deadline, interrupted, note = started + limits.time_limit, False, ""
        try:
            with until(deadline):
                whole = program.write_out() if program.sources else program
                if time.monotonic() + FEWEST_STEPS * _guess_seconds(whole) > deadline:
                    raise TimeIsUp
                problem = _Problem(whole)
                status = self._run(problem.problem, deadline - _guess_seconds(whole), limits)
                status, point = _judge(whole, status, problem.point())
        except TimeIsUp:
            status, point, note = Status.TIMED_OUT, None, TOO_LARGE
        except KeyboardInterrupt:
            interrupted, status, point = True, Status.TIMED_OUT, None
        if point is None and status in (Status.TIMED_OUT, Status.FAILED) and program.known:
            status, point = Status.FEASIBLE, min(program.known, key=program.value)
        objective = None if point is None else program.value(point)
        step = Step(time.monotonic() - started, objective, None, program.row_count, 0)
        report(step)
        return Solution(
            status=status,
            point=point,
            objective=objective,
            bound=None,
            seconds=step.seconds,
            history=(step,),
            sizes={**count_sizes(program, program.row_count), "cuts": 0},
            interrupted=interrupted,
            note=note,
        )

    def _run(self, problem: Any, deadline: float, limits: Limits) -> Status:
        """CVXPY translates the problem first, and keeps what it makes; the solver gets the time that is left."""
        with _ignoring_warnings():
            problem.get_problem_data(self._inner, canon_backend=TRANSLATOR)
        check_time()
        seconds = deadline - time.monotonic()
        ours = _OPTIONS[self._inner](seconds, limits) if self._inner in _OPTIONS else {}
        try:
            self._call(problem, _merge(ours, limits.options))
        except Exception as error:
            raise SolverError(f"{self.name} failed: {error}") from error
        return _STATUSES.get(problem.status, Status.FAILED)

    def _call(self, problem: Any, options: Mapping[str, Any]) -> None:
        with _ignoring_warnings():
            problem.solve(solver=self._inner, canon_backend=TRANSLATOR, **options)


def _guess_seconds(program: Program) -> float:
    """For one step."""
    return SECONDS_PER_NUMBER * program.rows.matrix.nnz


@contextmanager
def _ignoring_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "may be inaccurate": the status says so
        yield


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options override ours; a dictionary in both, such as `mosek_params`, is merged."""
    both = {key: {**ours[key], **theirs[key]} for key in ours.keys() & theirs if isinstance(ours[key], dict)}
    return {**ours, **theirs, **both}


class _Problem:
    """A program as a CVXPY problem in one vector of free columns, with fixed columns substituted."""

    def __init__(self, program: Program) -> None:
        cp = _cvxpy()
        self._fixed_point = np.where(program.lower == program.upper, program.lower, 0.0)
        self._free = np.flatnonzero(program.lower < program.upper)
        lower, upper = program.lower[self._free], program.upper[self._free]
        self._variable = cp.Variable(len(self._free), **_integrality(program.integer[self._free]))
        x = self._variable

        bounded_below, bounded_above = np.flatnonzero(np.isfinite(lower)), np.flatnonzero(np.isfinite(upper))
        constraints = _constrain(x, program.rows, self._fixed_point, self._free)
        if len(bounded_below):
            constraints.append(x[bounded_below] >= lower[bounded_below])
        if len(bounded_above):
            constraints.append(x[bounded_above] <= upper[bounded_above])
        matrix, offset, loss = program.term.affine_forms()
        self._batch = len(loss)
        if len(loss):
            epigraph = place(1.0, np.arange(program.column_count)[program.term.columns], program.column_count)
            term = epigraph[:, self._free] @ x + epigraph @ self._fixed_point
            constraints.append(_write_loss(loss, matrix, offset, self._express) <= term)
        cost = program.cost[self._free] @ x + program.cost @ self._fixed_point
        self.problem = cp.Problem(cp.Minimize(cost), constraints)

    def _express(self, matrix: sparse.csr_array, offset: Floats) -> Any:
        """matrix · x + offset, rows (d, output), as an expression (outputs, batch)."""
        values = matrix[:, self._free] @ self._variable + (offset + matrix @ self._fixed_point)
        return _cvxpy().reshape(values, (len(offset) // self._batch, self._batch), order="F")

    def point(self) -> Floats | None:
        if self._variable.value is None or not np.all(np.isfinite(self._variable.value)):
            return None
        point = self._fixed_point.copy()
        point[self._free] = self._variable.value
        return point


def _judge(program: Program, status: Status, point: Floats | None) -> tuple[Status, Floats | None]:
    """The point clipped to its bounds, with its true convex term; none if it violates rows or there is none."""
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        return status, None
    if point is None:
        return Status.FAILED, None
    inside = np.clip(np.where(program.integer, np.round(point), point), program.lower, program.upper)
    raised = program.raise_term(inside)
    return (status, raised) if _violation(program.rows, raised) <= ROW_TOLERANCE else (Status.FAILED, None)


def _violation(rows: Rows, point: Floats) -> float:
    if len(rows) == 0:
        return 0.0
    values = rows.matrix @ point
    scale = np.maximum(abs(rows.matrix).max(axis=1).toarray().reshape(-1), 1.0)
    return float((np.maximum(rows.lower - values, values - rows.upper) / scale).max())


def _constrain(x: Any, rows: Rows, fixed_point: Floats, free: Ints) -> list[Any]:
    """Up to three matrix constraints on the free columns: equal, at least, at most.

    Rows without coefficients that always hold are left out: their large sides spoil the scaling.
    """
    matrix, moved = rows.matrix[:, free], rows.matrix @ fixed_point
    lower, upper = rows.lower - moved, rows.upper - moved
    empty = abs(matrix).sum(axis=1) == 0
    says = ~(empty & (lower <= ROW_TOLERANCE) & (upper >= -ROW_TOLERANCE))
    both = rows.lower == rows.upper
    equal = np.flatnonzero(says & both)
    at_least = np.flatnonzero(says & ~both & np.isfinite(lower))
    at_most = np.flatnonzero(says & ~both & np.isfinite(upper))
    constraints = []
    if len(equal):
        constraints.append(matrix[equal] @ x == lower[equal])
    if len(at_least):
        constraints.append(matrix[at_least] @ x >= lower[at_least])
    if len(at_most):
        constraints.append(matrix[at_most] @ x <= upper[at_most])
    return constraints


def _write_loss(loss: Loss, matrix: sparse.csr_array, offset: Floats, express: Callable[..., Any]) -> Any:
    """One convex expression per data point. `express` makes an expression (outputs, batch) of rows and offsets."""
    cp, batch = _cvxpy(), len(loss)
    match loss:
        case SoftmaxLoss():
            # log sum exp(h_c) - h_label = log sum exp(h_c - h_label), without the large numbers
            own = np.repeat(np.arange(batch) * (len(offset) // batch) + loss.labels, len(offset) // batch)
            return cp.log_sum_exp(express(sparse.csr_array(matrix - matrix[own]), offset - offset[own]), axis=0)
        case LogisticLoss():
            sign = 1.0 - 2.0 * loss.labels
            return cp.logistic(express(sparse.csr_array(sparse.diags_array(sign) @ matrix), sign * offset))[0]
        case SquaredLoss():
            missed = express(matrix, offset - loss.targets.reshape(-1))
            return cp.sum(cp.square(missed), axis=0) / loss.targets.shape[1]
        case _:
            assert_never(loss)


def _integrality(integer: Any) -> dict[str, Any]:
    return {"integer": [(index,) for index in np.flatnonzero(integer).tolist()]} if integer.any() else {}


def _find_cone_solvers() -> dict[str, bool]:
    """The installed solvers with exponential cones, and whether they also support integer columns."""
    cp = _cvxpy()
    from cvxpy.reductions.solvers.defines import SOLVER_MAP_CONIC

    cone = cp.constraints.ExpCone
    solvers: dict[str, Any] = {name: SOLVER_MAP_CONIC.get(name) for name in cp.installed_solvers()}
    return {
        name: solver.MIP_CAPABLE and cone in solver.MI_SUPPORTED_CONSTRAINTS
        for name, solver in solvers.items()
        if solver is not None and cone in solver.SUPPORTED_CONSTRAINTS
    }


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise MissingExtraError("cvxpy", "cvxpy") from error
    return cvxpy

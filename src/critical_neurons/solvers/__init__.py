"""Solvers: program to solution. One file per solver; this one finds them by name."""

from critical_neurons.errors import InvalidSettingError
from critical_neurons.solvers.base import Backend, Capability, Limits, Report, ignore_progress
from critical_neurons.solvers.lagrangian_dual import maximise_dual

__all__ = ["Backend", "Capability", "Limits", "Report", "find_solver", "ignore_progress", "maximise_dual"]


def find_solver(name: str) -> Backend:
    """`auto`, `highs`, `barrier`, `first-order`, `scip`, or `cvxpy:NAME` for any solver of CVXPY."""
    if name == "auto":
        from critical_neurons.solvers.auto import AutoSolver

        return AutoSolver()
    if name == "barrier":
        from critical_neurons.solvers.interior_point import BarrierSolver

        return BarrierSolver()
    if name == "first-order":
        from critical_neurons.solvers.first_order import FirstOrderSolver

        return FirstOrderSolver()
    if name == "highs":
        from critical_neurons.solvers.highs import HighsSolver

        return HighsSolver()
    if name == "scip":
        from critical_neurons.solvers.scip import ScipSolver

        return ScipSolver()
    family, _, inner = name.partition(":")
    if family == "cvxpy" and inner:
        from critical_neurons.solvers.cvxpy_conic import ConicSolver

        return ConicSolver(inner)
    raise InvalidSettingError(
        f"solver: found {name!r}. Accepted: 'auto', 'highs', 'barrier', 'first-order', 'scip', or 'cvxpy:NAME' "
        "such as 'cvxpy:CLARABEL'."
    )

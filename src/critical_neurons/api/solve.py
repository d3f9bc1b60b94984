"""The public `solve`: a program to its solution."""

from __future__ import annotations

from collections.abc import Callable

from critical_neurons.core.program import Program
from critical_neurons.core.solution import Solution, Step
from critical_neurons.core.solver import Solver, as_solver
from critical_neurons.readers import isolated
from critical_neurons.solvers import Limits, find_solver, ignore_progress


@isolated
def solve(
    program: Program, solver: Solver | str = "auto", *, progress: Callable[[Step], None] | None = None
) -> Solution:
    """Solve a program of `encode`. `solver` and `progress` as for `score`.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs[:3].double().numpy())
    >>> program = cn.encode(network, bounds, labels[:3].numpy(), cn.Objective(loss_weight=5.0))
    >>> solution = cn.solve(program, cn.Solver(gap=1e-6))
    >>> solution.status
    <Status.OPTIMAL: 'optimal'>
    """
    chosen = as_solver(solver)
    backend = find_solver(chosen.name)
    backend.check_options(chosen.options)
    limits = Limits(chosen.time_limit, chosen.gap, chosen.threads, chosen.seed, chosen.options)
    return backend.solve(program, limits, progress or ignore_progress)

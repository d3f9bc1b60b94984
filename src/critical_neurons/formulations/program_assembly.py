"""Program assembly: columns, objective and start, which all encodings of equation 2 share.

The blocks, in order: scores; explicit activations of units and max pools; gates of units and choices of max pools;
the sparsity term; one softmax value per data point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import numpy as np
from scipy import sparse

from critical_neurons.core.network import Network
from critical_neurons.core.program import Program, Rows, RowSource, lay_out, stack_rows, widen
from critical_neurons.core.structure import Bools, Floats
from critical_neurons.formulations.loss_term import LossTerm
from critical_neurons.formulations.objective import BudgetRows, Goal, Objective, encode_sparsity


def lay_out_columns(unit_count: int, activation_count: int, gate_count: int, batch_size: int) -> dict[str, slice]:
    return lay_out(
        score=unit_count,
        activation=activation_count,
        gate=gate_count,
        sparsity=1,
        softmax=batch_size,
    )


def assemble_program(
    blocks: Mapping[str, slice],
    goal: Goal,
    network: Network,
    term: LossTerm,
    *,
    rows: Rows,
    sources: tuple[RowSource, ...],
    activations: Floats,
    gates: Bools,
    integer: Bools | bool,
    highest_activation: float = np.inf,
) -> Program:
    """Minimise the goal over 0 <= s, z <= 1 and 0 <= h <= `highest_activation`, under the given rows and sources.

    `activations` and `gates` are those of the unpruned network, one per column of their blocks. With all scores at 1
    they are the start, unless a budget excludes it. `integer` marks the gates that must be 0 or 1.
    """
    column_count = blocks["softmax"].stop
    sparsity = blocks["sparsity"].start
    cost = np.zeros(column_count)
    lower = np.zeros(column_count)
    upper = np.full(column_count, np.inf)
    upper[blocks["score"]] = upper[blocks["gate"]] = 1.0
    upper[blocks["activation"]] = highest_activation
    start = np.zeros(column_count)
    start[blocks["score"]] = 1.0
    start[blocks["activation"]] = activations
    start[blocks["gate"]] = gates
    match goal:
        case Objective():
            goal_rows = encode_sparsity(goal, network, sparsity, column_count)
            start[sparsity] = (goal_rows.lower - goal_rows.matrix @ start).max()
            cost[sparsity], lower[sparsity] = 1.0, -np.inf
            cost[blocks["softmax"]] = goal.softmax_weight(len(term.loss))
        case BudgetRows():
            weights = widen(sparse.csr_array(goal.weights), column_count)
            goal_rows = Rows(weights, np.full(len(goal.limits), -np.inf), goal.limits)
            upper[sparsity] = 0.0
            cost[blocks["softmax"]] = 1.0 / len(term.loss)
        case _:
            assert_never(goal)
    integral = np.zeros(column_count, dtype=bool)
    integral[blocks["gate"]] = integer
    start[blocks["softmax"]] = term.values(start)
    met = bool(np.all(goal_rows.matrix @ start <= goal_rows.upper))
    return Program(
        blocks=blocks,
        cost=cost,
        lower=lower,
        upper=upper,
        integer=integral,
        rows=stack_rows([goal_rows, rows], column_count),
        sources=sources,
        term=term,
        start=start if met else None,
        unpruned=start,
        tie_break=(np.arange(column_count) < blocks["score"].stop).astype(np.float64),
    )

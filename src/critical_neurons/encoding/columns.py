"""Columns: what every encoding of equation 2 shares, whatever rows it writes.

The blocks, in order: the scores; the activations of units and max pools that keep one; the gates of the units and the
choices of the max pools; the sparsity term; one softmax value per data point.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from critical_neurons.encoding.objective import Objective, encode_sparsity
from critical_neurons.encoding.softmax import SoftmaxTerm
from critical_neurons.network import Bools, Floats
from critical_neurons.program import Program, Rows, RowSource, lay_out, stack_rows


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
    objective: Objective,
    sizes: tuple[int, ...],
    term: SoftmaxTerm,
    *,
    rows: Rows,
    sources: tuple[RowSource, ...],
    activations: Floats,
    gates: Bools,
    integer: Bools | bool,
) -> Program:
    """Minimise sparsity + weight · softmax over 0 <= s, z <= 1 and 0 <= h, under the given rows and sources.

    `activations` are those of the unpruned network, one per column of their block: with every score at 1 they
    are the start, `gates` among them. `integer` says which gates must be 0 or 1.
    """
    column_count = blocks["softmax"].stop
    sparsity = blocks["sparsity"].start

    cost = np.zeros(column_count)
    cost[sparsity] = 1.0
    cost[blocks["softmax"]] = objective.softmax_weight(len(term.labels))
    lower = np.zeros(column_count)
    lower[sparsity] = -np.inf
    upper = np.full(column_count, np.inf)
    upper[blocks["score"]] = upper[blocks["gate"]] = 1.0
    integral = np.zeros(column_count, dtype=bool)
    integral[blocks["gate"]] = integer

    sparsity_rows = encode_sparsity(objective, sizes, sparsity, column_count)
    start = np.zeros(column_count)
    start[blocks["score"]] = 1.0
    start[blocks["activation"]] = activations
    start[blocks["gate"]] = gates
    start[sparsity] = (sparsity_rows.lower - sparsity_rows.matrix @ start).max()
    start[blocks["softmax"]] = term.values(start)
    return Program(
        blocks=blocks,
        cost=cost,
        lower=lower,
        upper=upper,
        integer=integral,
        rows=stack_rows([sparsity_rows, rows], column_count),
        sources=sources,
        term=term,
        start=start,
        tie_break=(np.arange(column_count) < blocks["score"].stop).astype(np.float64),
    )

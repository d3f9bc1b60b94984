"""Reduced space: the program after exact elimination, with few columns and lazy constraints (method.md, section 3).

Columns: the scores; values of undecided ReLUs and max pools, with their gates and choices; the sparsity term; one
softmax value per data point. The formulation determines what is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from critical_neurons.core.bounds import Bounds
from critical_neurons.core.branching import Branching
from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.loss import Loss, as_loss
from critical_neurons.core.network import Network
from critical_neurons.core.program import SHARED, Origins, Program, Rows, stack_rows
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints
from critical_neurons.formulations.affine import AffineNetwork
from critical_neurons.formulations.convex_hull import MOST_NUMBERS, HullRows, count_numbers
from critical_neurons.formulations.first_layer import find_least_scores
from critical_neurons.formulations.gates import Formulation
from critical_neurons.formulations.lazy_rows import ReluRows, SumRows
from critical_neurons.formulations.local_search import MaskSearch
from critical_neurons.formulations.loss_term import LossTerm, follow
from critical_neurons.formulations.objective import Goal
from critical_neurons.formulations.pool_rows import PoolRows, RelaxedPoolRows
from critical_neurons.formulations.program_assembly import assemble_program, lay_out_columns
from critical_neurons.formulations.relaxed_points import Favour, Repair, fit_sparsity
from critical_neurons.formulations.saddle_point import find_saddle
from critical_neurons.formulations.score_dual_steps import build_bounds

CLOSED = 1e-9
"""Activations below this share of their bound are rounding errors: with p = U and score 0, p - U is not exactly 0."""


def encode_eliminated(
    network: Network,
    bounds: Bounds,
    labels: Ints | Loss,
    goal: Goal,
    formulation: Formulation,
    *,
    integer: bool,
    binary: bool = False,
    has_rows: bool = True,
    tail: Tail | None = None,
) -> Program:
    """`binary`: scores are 0 or 1. `tail`: the rest of the model behind a span."""
    affine = AffineNetwork(network, bounds, formulation, summed=not integer and not formulation.completes)
    counts = {index: len(gate.explicit) if integer else 0 for index, gate in affine.gates.items()}
    counts |= {index: len(pool.rivals) if integer else 0 for index, pool in affine.pools.items()}
    explicit = affine.column_count - affine.unit_count
    blocks = lay_out_columns(affine.unit_count, explicit, sum(counts.values()), affine.batch_size)
    gate_columns = _deal_out(counts, blocks["gate"].start)
    if not integer:  # z = y, its smallest feasible value, is optimal
        gate_columns |= {index: gate.columns for index, gate in affine.gates.items()}
    column_count = blocks["softmax"].stop
    values = dict(enumerate(network.evaluate(bounds.inputs))) if explicit or integer else {}
    columns = affine.columns_of(values) if values else np.ones(affine.column_count)
    sources = (
        ReluRows(affine, gate_columns, column_count),
        PoolRows(affine, gate_columns, column_count) if integer else RelaxedPoolRows(affine, column_count),
        SumRows(affine.sums, column_count),
    )
    program = assemble_program(
        blocks,
        goal,
        network,
        LossTerm(follow(affine, tail), as_loss(labels), blocks["softmax"], column_count),
        rows=stack_rows(_encode_choices(affine, gate_columns, column_count, integer=integer), column_count),
        sources=tuple(source for source in sources if has_rows and source.count),
        activations=columns[blocks["activation"]],
        gates=_start_gates(affine, columns, values, network) if integer else np.zeros(0, dtype=bool),
        integer=integer,
        highest_activation=1.0,
    )
    lower, upper = _bound_columns(affine, program, integer, has_rows)
    program = replace(program, lower=lower, upper=upper)
    if not integer:
        implicit = [len(gate.explicit) for gate in affine.gates.values()]
        implicit += [len(sums.elements) for sums in affine.sums.values()]
        implicit += [len(pool.rivals) for pool in affine.pools.values()]
        program = replace(program, implicit_gates=sum(implicit), origins=_find_origins(affine, blocks))
    if not integer and not formulation.completes and program.sources:
        program = replace(program, propose=Favour(Repair(affine, program), as_loss(labels), tail))
        program = replace(program, saddle=find_saddle(affine, program) if tail is None else None)
    if binary:
        integral = program.integer | (np.arange(column_count) < affine.unit_count)
        program = replace(program, integer=integral)
    if formulation.completes:
        completion = Completion(network, affine, program, binary, integer)
        search = MaskSearch(network, bounds.inputs, as_loss(labels), goal)
        program = replace(program, complete=completion, improve=MaskImprovement(completion, search))
    if formulation.completes and binary and integer:
        small = count_numbers(affine) <= MOST_NUMBERS
        hulls = HullRows(affine, gate_columns, column_count) if small else None
        depths = np.repeat(np.arange(len(network.group_sizes)), network.group_sizes)
        nodes = build_bounds(network, affine, program, goal) if tail is None else None
        program = replace(program, branching=Branching(blocks["score"], depths, hulls, nodes))
    return program


@dataclass(frozen=True)
class Completion:
    """The feasible point of the exact program with given scores, by a forward pass.

    `binary`: the scores are rounded first. `integer`: gates have columns.
    """

    network: Network
    affine: AffineNetwork
    program: Program
    binary: bool
    integer: bool

    def __call__(self, point: Floats) -> Floats:
        given = point.copy()
        score = self.program.blocks["score"]
        given[score] = np.round(given[score]) if self.binary else np.clip(given[score], 0.0, 1.0)
        columns, values = self.affine.complete(given)
        completed = np.zeros(self.program.column_count)
        completed[: len(columns)] = columns
        if self.integer:
            completed[self.program.blocks["gate"]] = _start_gates(self.affine, columns, values, self.network)
        return fit_sparsity(self.program, completed)


@dataclass(frozen=True)
class MaskImprovement:
    """A better mask by local search from the rounded scores of a point."""

    completion: Completion
    search: MaskSearch

    def __call__(self, point: Floats, *, seconds: float, seed: int) -> Floats:
        score = self.completion.program.blocks["score"]
        better = point.copy()
        better[score] = self.search.improve(np.round(point[score]), seconds, seed)
        return self.completion(better)


def _find_origins(affine: AffineNetwork, blocks: Mapping[str, slice]) -> Origins:
    points, depths = np.full((2, blocks["softmax"].stop), SHARED)
    for index, part in affine.parts.items():
        points[part.columns] = part.explicit // affine.sizes[index]
        depths[part.columns] = index
    points[blocks["softmax"]] = np.arange(affine.batch_size)
    return Origins(points, depths)


def _deal_out(counts: Mapping[int, int], first: int) -> dict[int, slice]:
    """Consecutive columns for each op."""
    ends = first + np.cumsum(list(counts.values()))
    return {index: slice(int(end) - counts[index], int(end)) for index, end in zip(counts, ends, strict=True)}


def _bound_columns(affine: AffineNetwork, program: Program, integer: bool, has_rows: bool) -> tuple[Floats, Floats]:
    """Bounds of columns that replace rows: of the scores, and of activations whose gates have no column."""
    lower, upper = program.lower.copy(), program.upper.copy()
    if has_rows:
        lower[program.blocks["score"]] = find_least_scores(affine)
    if not integer:
        for columns in affine.activation_columns:
            upper[columns] = 1.0
    return lower, upper


def _start_gates(affine: AffineNetwork, columns: Floats, values: Mapping[int, Floats], network: Network) -> Bools:
    """The gates and choices that belong to the values."""
    parts = [columns[gate.columns] > CLOSED for gate in affine.gates.values()]
    for index, pool in affine.pools.items():
        read = values[network.ops[index].sources[0]].reshape(-1)[pool.rivals]
        best_first = np.lexsort((-read, pool.rivalries))
        _, firsts = np.unique(pool.rivalries[best_first], return_index=True)
        chosen = np.zeros(len(pool.rivals), dtype=bool)
        chosen[best_first[firsts]] = True
        parts.append(chosen)
    return np.concatenate([np.zeros(0, dtype=bool), *parts])


def _encode_choices(
    affine: AffineNetwork, gate_columns: Mapping[int, slice], column_count: int, *, integer: bool
) -> list[Rows]:
    """y <= z for every explicit activation, z <= s if gates follow scores, sum of m = 1 in every window."""
    parts = []
    for index, gate in affine.gates.items():
        if gate_columns[index] != gate.columns:
            numbers = np.arange(len(gate.explicit))
            parts.append(_order(gate.first + numbers, gate_columns[index].start + numbers, column_count))
        if gate.follow_scores:
            scored = np.flatnonzero(gate.explicit_units != NO_UNIT)
            parts.append(_order(gate_columns[index].start + scored, gate.explicit_units[scored], column_count))
    for index, pool in affine.pools.items() if integer else ():
        places = gate_columns[index].start + np.arange(len(pool.rivals))
        matrix = sparse.csr_array(
            (np.ones(len(places)), (pool.rivalries, places)), shape=(len(pool.explicit), column_count)
        )
        one = np.ones(len(pool.explicit))
        parts.append(Rows(matrix, one, one))
    return parts


def _order(smaller: Ints, larger: Ints, column_count: int) -> Rows:
    """x[smaller] <= x[larger], one by one."""
    count = len(smaller)
    entries = (np.repeat([1.0, -1.0], count), (np.tile(np.arange(count), 2), np.concatenate([smaller, larger])))
    matrix = sparse.csr_array(entries, shape=(count, column_count))
    return Rows(matrix, np.full(count, -np.inf), np.zeros(count))

"""Coefficients of a network's values over the columns of a program, by backward passes.

Once every gate and every pooling window is decided or has a column, all values are affine in the columns: the scores,
then the explicit values. One backward pass gives the coefficients of one value; no matrix is formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TypeAlias, assert_never

import numpy as np
from scipy import sparse

from critical_neurons.core.network import Affine, Concat, Input, MaxPool, Op, Relu, Sum, pull_linear
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints
from critical_neurons.formulations.gates import Gate
from critical_neurons.formulations.max_pooling import Pool
from critical_neurons.formulations.pooled_columns import Sums

CHUNK_BYTES = 16 * 2**20
"""Largest array of a backward pass; more rows take several passes."""

Part: TypeAlias = Gate | Pool | Sums
"""Everything that has explicit values."""


class ResolvedNetwork:
    """Ops with their decided gates, pools and sums, by op index; `depends`: which values depend on the columns."""

    def __init__(self, ops: tuple[Op, ...], unit_count: int) -> None:
        self.ops = ops
        self.unit_count = self.column_count = unit_count
        self.gates: dict[int, Gate] = {}
        self.pools: dict[int, Pool] = {}
        self.sums: dict[int, Sums] = {}
        self.depends = find_dependent(ops)

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers in the value of each op, on one data point."""
        return [int(np.prod(op.shape)) for op in self.ops]

    @cached_property
    def size(self) -> int:
        """Numbers in one forward pass of one data point."""
        return sum(self.sizes)

    @property
    def parts(self) -> dict[int, Part]:
        """Everything with explicit values, by op index."""
        return {**self.gates, **self.pools, **self.sums}

    def find_loose(self, index: int, count: int) -> Bools:
        """Where a value of `count` data points may leave its bounds while gates are relaxed: behind an undecided clip
        (ReLU6)."""
        op = self.ops[index]
        loose = np.zeros((count, *op.shape), dtype=bool)
        match op:
            case Affine():
                loose = op.map.apply_absolute(self.find_loose(op.source, count).astype(np.float64)) > 0
            case Sum() if op.ceiling is not None:
                (above,) = self.ops[op.sources[1]].sources
                loose.reshape(-1)[self.gates[above].explicit] = True
            case Sum():
                loose = np.logical_or.reduce([self.find_loose(source, count) for source in op.sources])
            case Concat():
                loose = np.concatenate([self.find_loose(source, count) for source in op.sources], axis=1)
            case Input() | Relu() | MaxPool():
                pass
            case _:
                assert_never(op)
        return loose

    def differentiate(self, index: int, elements: Ints, own: Floats | None = None) -> sparse.csr_array:
        """Coefficients of a value at flat indices (batch, *shape), one row each. `own`: see `pull_back`."""
        shape = self.ops[index].shape
        samples, positions = np.divmod(elements, int(np.prod(shape)))
        parts = []
        for chunk in self._chunks(len(elements)):
            seeds = np.zeros((len(elements[chunk]), int(np.prod(shape))))
            seeds[np.arange(len(seeds)), positions[chunk]] = 1.0
            more = None if own is None else own[chunk]
            parts.append(self.pull_back(index, seeds.reshape(-1, *shape), samples[chunk], own=more))
        return self._stack(parts)

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        """Coefficients of `seeds[r] · logits[samples[r]]`, one row each; seeds is (rows, classes).

        For a span of a model, its flattened last value takes the place of the logits.
        """
        shaped = seeds.reshape(len(seeds), *self.ops[-1].shape)
        return self.pull_back_in_pieces(len(self.ops) - 1, shaped, samples)

    def differentiate_shrunk(self, index: int, elements: Ints) -> sparse.csr_array:
        """Coefficients of `shrunk[index]` at flat indices (batch, *shape), one row each."""
        op, gate = self.ops[index], self.gates[index]
        assert isinstance(op, Relu)
        own_units = np.broadcast_to(gate.units, op.shape).reshape(-1)[elements % int(np.prod(op.shape))]
        scored = np.flatnonzero(own_units != NO_UNIT)
        own = np.zeros((len(elements), self.unit_count))
        own[scored, own_units[scored]] = gate.shrink.reshape(-1)[elements[scored]]
        return self.differentiate(op.source, elements, own)

    def differentiate_pooled(self, index: int, elements: Ints) -> sparse.csr_array:
        """Coefficients of `pooled[index]` at flat indices of the max pool's input, one row each."""
        return self.differentiate(self.ops[index].sources[0], elements)

    def differentiate_pairs(self, op: MaxPool, pool: Pool) -> sparse.csr_array:
        """Coefficients of winner minus rival, for every rival in an undecided window."""
        winners, rivals = pool.pairs
        return sparse.csr_array(self.differentiate(op.source, winners) - self.differentiate(op.source, rivals))

    def _chunks(self, rows: int) -> Iterator[slice]:
        widest = max(int(np.prod(op.shape)) for op in self.ops)
        step = max(1, CHUNK_BYTES // (8 * widest))
        return (slice(at, at + step) for at in range(0, rows, step))

    def pull_back_in_pieces(self, index: int, seeds: Floats, samples: Ints) -> sparse.csr_array:
        parts = [self.pull_back(index, seeds[rows], samples[rows]) for rows in self._chunks(len(samples))]
        return self._stack(parts)

    def _stack(self, parts: list[sparse.csr_array]) -> sparse.csr_array:
        if len(parts) == 1:
            return parts[0]
        return sparse.csr_array(sparse.vstack([sparse.csr_array((0, self.column_count)), *parts], format="csr"))

    def pull_back(
        self,
        index: int,
        seeds: Floats,
        samples: Ints,
        slopes: Mapping[int, tuple[Floats, Floats]] | None = None,
        own: Floats | None = None,
    ) -> sparse.csr_array:
        """One backward pass: rows of coefficients over the columns. Row r belongs to data point samples[r].

        With `slopes`, for which samples must be all data points in order, the pass continues through explicit
        activations, with the first slope of their ReLU where the coefficient is negative and else the second, and
        through undecided windows, evenly to all elements. `own`: further coefficients over the scores, to be added.
        """
        rows = len(samples)
        scores = np.zeros((rows, self.unit_count)) if own is None else own.copy()
        explicit: list[tuple[Ints, Ints, Floats]] = []
        adjoints: dict[int, Floats] = {index: seeds}
        for at in range(index, -1, -1):
            adjoint = adjoints.pop(at, None)
            if adjoint is None or not self.depends[at]:
                continue
            op = self.ops[at]
            match op:
                case Affine() | Sum() | Concat():
                    if at in self.sums:
                        explicit.append(_explicit_entries(self.sums[at], adjoint, samples))
                    for source, part in pull_linear(self.ops, op, adjoint):
                        add_adjoint(adjoints, source, part)
                case Relu():
                    gate = self.gates[at]
                    through = np.where(gate.live[samples], adjoint, 0.0)
                    lost = (through * gate.shrink[samples]).reshape(rows, gate.scatter.shape[0], -1).sum(axis=2)
                    scores += lost @ gate.scatter
                    explicit.append(_explicit_entries(gate, adjoint, samples))
                    if slopes is not None:
                        onward = adjoint.reshape(-1)[gate.explicit]
                        through.reshape(-1)[gate.explicit] = onward * np.where(onward < 0, *slopes[at])
                    if self.depends[op.source]:
                        add_adjoint(adjoints, op.source, through)
                case MaxPool():
                    pool = self.pools[at]
                    explicit.append(_explicit_entries(pool, adjoint, samples))
                    below = pool.adjoint(adjoint, samples).reshape(rows, *self.ops[op.source].shape)
                    if slopes is not None:
                        onward = adjoint.reshape(-1)[pool.explicit] / pool.rival_counts
                        np.add.at(below.reshape(-1), pool.rivals, onward[pool.rivalries])
                    add_adjoint(adjoints, op.source, below)
                case Input():
                    continue
                case _:
                    assert_never(op)
        return _assemble(scores, explicit, self.column_count)


def find_dependent(ops: tuple[Op, ...]) -> list[bool]:
    """Which values depend on the columns: ReLUs, and everything behind one."""
    dependent: list[bool] = []
    for op in ops:
        dependent.append(isinstance(op, Relu) or any(dependent[source] for source in op.sources))
    return dependent


def add_adjoint(adjoints: dict[int, Floats], index: int, adjoint: Floats) -> None:
    adjoints[index] = adjoints[index] + adjoint if index in adjoints else adjoint


def _explicit_entries(part: Part, adjoint: Floats, samples: Ints) -> tuple[Ints, Ints, Floats]:
    """Coefficients on the explicit values of each row's data point."""
    size = adjoint[0].size
    firsts = np.searchsorted(part.explicit, samples * size)
    ends = np.searchsorted(part.explicit, (samples + 1) * size)
    counts = ends - firsts
    rows = np.repeat(np.arange(len(samples)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.repeat(firsts, counts) + within
    adjoints = adjoint.reshape(len(samples), size)[rows, part.explicit[numbers] % size]
    read = np.flatnonzero(adjoints)
    return rows[read], part.first + numbers[read], part.tops[numbers[read]] * adjoints[read]


def _assemble(scores: Floats, explicit: list[tuple[Ints, Ints, Floats]], width: int) -> sparse.csr_array:
    rows, columns = np.nonzero(scores)
    entries = [(rows, columns, scores[rows, columns]), *explicit]
    all_rows, all_columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return sparse.csr_array((values, (all_rows, all_columns)), shape=(len(scores), width))

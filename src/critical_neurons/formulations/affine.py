"""The network as an affine function of the scores, once its stable gates are fixed (docs/method.md, section 3).

A unit whose gate is decided on a data point needs no variable of its own: its activation is 0 if it is dead and
p - (1 - s) U if it is live. The same holds for a max pool with a known winner. Only undecided activations and pools
keep an explicit value, divided by its upper bound so that it lies in [0, 1] like the scores. All values are therefore
affine in the *columns*: the scores, then the explicit values. Evaluating them at a point is one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, assert_never

import numpy as np

from critical_neurons.core.bounds import Bounds
from critical_neurons.core.network import (
    Affine,
    Concat,
    Input,
    MaxPool,
    Network,
    Op,
    Relu,
    Sum,
    add_up,
    join_channels,
    pool_maximum,
    rectify,
)
from critical_neurons.core.structure import Floats
from critical_neurons.formulations.coefficients import Part, ResolvedNetwork
from critical_neurons.formulations.first_layer import find_settled
from critical_neurons.formulations.gates import Formulation, Gate, GateDecision, make_gate
from critical_neurons.formulations.max_pooling import Pool, resolve_windows, winners_are_safe
from critical_neurons.formulations.pooled_columns import find_deal, sum_up

BLOCK_ELEMENTS = 2**20
"""Numbers in a forward pass over one block of data points."""

LEAST_BLOCK = 16
"""Data points in a block, at least."""

Choice: TypeAlias = Callable[[Part, Floats, Op, Floats], Floats]
"""The new columns of a part, from its op's input (shrunk, for a ReLU), the op, and all columns, of which those of
earlier ops are final. It may change the scores of its own units in place."""


@dataclass(frozen=True)
class Evaluation:
    """By op: `shrunk`, which is p - (1 - s) shrink at every ReLU, and `pooled`, the input of every max pool."""

    shrunk: dict[int, Floats]
    pooled: dict[int, Floats]
    logits: Floats


class AffineNetwork(ResolvedNetwork):
    def __init__(self, network: Network, bounds: Bounds, formulation: Formulation, *, summed: bool = False) -> None:
        """`summed`: undecided activations share a column if the network only reads their sum."""
        super().__init__(network.ops, network.unit_count)
        self.batch_size = len(bounds.inputs)
        self._summed = summed
        self._constants: dict[int, Floats] = {}
        self._last: tuple[Floats, Evaluation] | None = None
        self._logits: tuple[Floats, Floats] | None = None
        self._is_block = False
        self._resolve(bounds, formulation, formulation.shrinks(network, bounds))

    def _resolve(self, bounds: Bounds, formulation: Formulation, shrinks: dict[int, Floats]) -> None:
        """Decide gates and windows op by op, and evaluate the network with all columns at 0."""
        values: dict[int, Floats] = {}
        middle: dict[int, Floats] = {}  # with all columns at 0.5; only for max pools that are compared
        shrunk: dict[int, Floats] = {}
        last_reader = {source: index for index, op in enumerate(self.ops) for source in op.sources}
        read_by_pools = {op.source for op in self.ops if isinstance(op, MaxPool)}
        compares = not formulation.fixes_windows and any(isinstance(op, MaxPool) for op in self.ops)
        for index, op in enumerate(self.ops):
            match op:
                case Relu():
                    interval, shrink = bounds.before_relu[index], shrinks[index]
                    decision = formulation.decide(op, interval, shrink, fixed=not self.depends[op.source])
                    decision = self._sum_up(index, op, decision, values[op.source], shrink)
                    gate = make_gate(op, interval, shrink, decision, self.column_count, self.unit_count)
                    self.gates[index] = gate
                    self.column_count += len(gate.explicit)
                case MaxPool():
                    upper = bounds.before_pool[index].upper
                    if op.source in self.gates:
                        upper = np.where(self.gates[op.source].dead, 0.0, upper)
                    ranks, loose = middle[op.source] if compares else upper, self.find_loose(op.source, len(upper))
                    pool = resolve_windows(op, upper, ranks, loose, self.column_count)
                    safe = np.ones(len(pool.explicit), dtype=bool)
                    if compares:
                        differences = self.differentiate_pairs(op, pool)
                        safe = winners_are_safe(pool, loose, values[op.source], differences)
                    self.pools[index] = pool.settle(safe)
                    self.column_count += len(self.pools[index].explicit)
                case Affine():
                    if index in self.sums:
                        self.sums[index] = replace(self.sums[index], first=self.column_count)
                        self.column_count += len(self.sums[index].explicit)
                case Input() | Sum() | Concat():
                    pass
                case _:
                    assert_never(op)
            values[index] = self._step(index, op, values, shrunk, np.zeros(self.column_count), bounds.inputs)
            if index in self.gates and np.array_equal(shrunk[index], self.gates[index].floor):
                self.gates[index] = replace(self.gates[index], floor=shrunk[index])  # one copy saves memory
            if compares:
                middle[index] = self._step(index, op, middle, {}, np.full(self.column_count, 0.5), bounds.inputs)
            for source in set(op.sources):  # what nothing reads any more is not kept
                if last_reader[source] == index and self.depends[source] and source not in read_by_pools:
                    del values[source]
        read = {source for index, op in enumerate(self.ops) if self.depends[index] for source in op.sources}
        self._constants = {index: values[index] for index in read if not self.depends[index]}
        pooled = {index: values[self.ops[index].sources[0]] for index in self.pools}
        self.at_zero = Evaluation(shrunk, pooled, values[len(self.ops) - 1])

    def _sum_up(self, index: int, op: Relu, decision: GateDecision, read: Floats, shrink: Floats) -> GateDecision:
        """Sum up the undecided activations if possible; returns what remains to be decided. `read` is p with all
        columns at 0."""
        deal = find_deal(self.ops, index) if self._summed and not self.depends[op.source] else None
        sums = None if deal is None else sum_up(deal, op, decision, read - shrink, shrink, relu=index)
        if deal is None or sums is None:
            return decision
        self.sums[deal.index] = sums
        return replace(decision, dead=~decision.live)

    @property
    def activation_columns(self) -> list[slice]:
        """The columns of undecided ReLUs, single or summed up."""
        return [gate.columns for gate in self.gates.values()] + [sums.columns for sums in self.sums.values()]

    def evaluate(self, point: Floats) -> Evaluation:
        """One forward pass. The last result is cached, since rows and cuts need the same one."""
        columns = point[: self.column_count]
        if self._last is None or not np.array_equal(self._last[0], columns):
            self._last = columns.copy(), self._forward(columns)
            if self._is_block:  # rows of settled ReLUs are not searched
                for index in self.settled:
                    del self._last[1].shrunk[index]
        return self._last[1]

    def _forward(self, columns: Floats) -> Evaluation:
        values: dict[int, Floats] = dict(self._constants)
        shrunk: dict[int, Floats] = {}
        for index, op in enumerate(self.ops):
            if self.depends[index]:
                values[index] = self._step(index, op, values, shrunk, columns, None)
        pooled = {index: values[self.ops[index].sources[0]] for index in self.pools}
        return Evaluation(shrunk, pooled, values[len(self.ops) - 1])

    def _step(
        self,
        index: int,
        op: Op,
        values: dict[int, Floats],
        shrunk: dict[int, Floats],
        columns: Floats,
        inputs: Floats | None,
    ) -> Floats:
        """The value of one op; for a ReLU its shrunk input is stored in `shrunk`."""
        match op:
            case Input():
                assert inputs is not None
                return inputs
            case Affine():
                value = op.map.apply(values[op.source])
                return self.sums[index].add(value, columns) if index in self.sums else value
            case Relu():
                gate = self.gates[index]
                loss = np.append(1.0 - columns[: self.unit_count], 0.0)  # the last entry stands for NO_UNIT
                shrunk[index] = values[op.source] - loss[gate.units] * gate.shrink
                activation = np.ascontiguousarray(np.where(gate.live, shrunk[index], 0.0))  # for flat indexing
                activation.reshape(-1)[gate.explicit] = gate.tops * columns[gate.columns]
                return activation
            case MaxPool():
                return self.pools[index].apply(values[op.source], columns).reshape(-1, *op.shape)
            case Sum():
                return add_up(*(values[source] for source in op.sources))
            case Concat():
                return join_channels(*(values[source] for source in op.sources))
            case _:
                assert_never(op)

    @cached_property
    def settled(self) -> set[int]:
        """ReLUs of the first layer whose rows always hold."""
        return find_settled(self)

    @cached_property
    def blocks(self) -> list[AffineNetwork]:
        """The network on a few data points at a time, if no value is explicit: a pass then needs little memory."""
        if self.column_count > self.unit_count:
            return [self]
        size = sum(size for size, depends in zip(self.sizes, self.depends, strict=True) if depends)
        count = max(LEAST_BLOCK, BLOCK_ELEMENTS // size)
        if count >= self.batch_size:
            return [self]
        return [self._restrict(slice(at, at + count)) for at in range(0, self.batch_size, count)]

    @property
    def pieces(self) -> list[slice]:
        """Some data points at a time, so that little memory is needed."""
        return [slice(at, at + LEAST_BLOCK) for at in range(0, self.batch_size, LEAST_BLOCK)]

    def _restrict(self, samples: slice) -> AffineNetwork:
        """On some of the data points; nothing is copied."""
        settled, part = self.settled, copy(self)
        assert part.settled is settled  # found once, for all data points
        part.batch_size = len(range(self.batch_size)[samples])
        part._constants = {index: value[samples] for index, value in self._constants.items()}
        part._last, part._logits, part._is_block = None, None, True
        part.gates = {index: gate.at(samples) for index, gate in self.gates.items()}
        part.pools = {index: pool.at(samples) for index, pool in self.pools.items()}
        at_zero = self.at_zero
        part.at_zero = Evaluation(
            {index: value[samples] for index, value in at_zero.shrunk.items()},
            {index: value[samples] for index, value in at_zero.pooled.items()},
            at_zero.logits[samples],
        )
        return part

    def logits(self, point: Floats) -> Floats:
        columns = point[: self.column_count]
        if len(self.blocks) == 1 or (self._last is not None and np.array_equal(self._last[0], columns)):
            return self.evaluate(point).logits
        if self._logits is None or not np.array_equal(self._logits[0], columns):
            self._logits = columns.copy(), np.concatenate([block.evaluate(point).logits for block in self.blocks])
        return self._logits[1]

    def columns_of(self, values: Mapping[int, Floats]) -> Floats:
        """The columns at the given values of the network, with every score at 1."""
        columns = np.ones(self.column_count)
        parts: dict[int, Gate | Pool] = {**self.gates, **self.pools}
        for index, part in parts.items():
            columns[part.columns] = values[index].reshape(-1)[part.explicit] / part.tops
        for sums in self.sums.values():
            columns[sums.columns] = sums.gather(values[sums.relu])
        return columns

    def complete(self, columns: Floats) -> tuple[Floats, dict[int, Floats]]:
        """The columns with the same scores and the explicit values h = max(q, 0) of a forward pass, and the values of
        that pass."""

        def compute(part: Part, read: Floats, op: Op, given: Floats) -> Floats:
            true = pool_maximum(op, read) if isinstance(op, MaxPool) else rectify(read)
            return true.reshape(-1)[part.explicit] / part.tops

        return self.revise(columns, compute)

    def revise(
        self, columns: Floats, choose: Choice, *, moves_scores: bool = False
    ) -> tuple[Floats, dict[int, Floats]]:
        """The columns with new explicit values, chosen op by op, and the values of that pass. The scores stay the
        same unless the choice moves them; then it is asked even where no value is explicit."""
        revised = columns[: self.column_count].copy()
        values: dict[int, Floats] = dict(self._constants)
        shrunk: dict[int, Floats] = {}
        for index, op in enumerate(self.ops):
            if not self.depends[index]:
                continue
            part = self.parts.get(index)
            values[index] = self._step(index, op, values, shrunk, revised, None)
            if part is not None and (moves_scores or len(part.explicit)):
                read = shrunk[index] if index in shrunk else values[op.sources[0]]
                revised[part.columns] = choose(part, read, op, revised)
                values[index] = self._step(index, op, values, shrunk, revised, None)
        return revised, values

    def differentiate_along_limits(self, seeds: Floats, point: Floats) -> Floats:
        """The gradient of the sum of seeds[d] · logits[d] with respect to every explicit value, if later explicit
        values move along their limits (equation 9a): along the upper one where that lowers the sum, else along the
        lower one. seeds is (batch, classes)."""
        shrunk = self.evaluate(point).shrunk
        slopes = {}
        for index, gate in self.gates.items():
            q, lower = (values.reshape(-1)[gate.explicit] for values in (shrunk[index], gate.floor))
            slopes[index] = gate.tops / (gate.tops - lower), (q > 0).astype(np.float64)
        shaped = seeds.reshape(len(seeds), *self.ops[-1].shape)
        forms = self.pull_back(len(self.ops) - 1, shaped, np.arange(len(seeds)), slopes)
        return np.asarray(forms.sum(axis=0), dtype=np.float64).reshape(-1)

"""Relaxation: the part of the network below a value, on one box, as a linear program.

    columns   the inputs x, and for every ReLU that may be on or off a pair h = max(p, 0), d = max(-p, 0)
    rows      h - d = p(x, h of earlier ReLUs),   h / U + d / -L <= 1     (the triangle over [L, U])

ReLUs known to be on or off need no columns. d = 0 means that a ReLU is on and h = 0 that it is off, so that branching
changes only upper bounds of columns. A maximum is max(a, b) = a + max(b - a, 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

import numpy as np
from scipy import sparse

from critical_neurons.core.bounds import Interval
from critical_neurons.core.deadline import check_time
from critical_neurons.core.network import NO_POSITION, Affine, Concat, Input, LinearMap, MaxPool, Network, Relu, Sum
from critical_neurons.core.program import Rows, place, stack_rows, widen
from critical_neurons.core.structure import Floats, Ints

MOST_NUMBERS = 3 * 10**8
"""Limit on elements times columns of an affine map: beyond it a program would take hours."""

CHUNK_NUMBERS = 4 * 10**6


class TooLarge(Exception):
    """A program that is too large to be solved."""


@dataclass(frozen=True)
class Form:
    """Elements of a value as matrix · columns + constant."""

    matrix: sparse.csr_array
    constant: Floats

    def take(self, elements: Ints) -> Form:
        return Form(self.matrix[elements], self.constant[elements])

    def at(self, columns: Floats) -> Floats:
        values: Floats = self.matrix @ columns + self.constant
        return values


@dataclass(frozen=True)
class Pairs:
    """Several ReLUs: p, its bounds, and the first column, from which all h follow, then all d."""

    before: Form
    lower: Floats
    upper: Floats
    first: int

    def __len__(self) -> int:
        return len(self.lower)


@dataclass(frozen=True)
class Relaxation:
    """`wanted` are the elements in question; the first columns are the inputs."""

    box: Interval
    pairs: tuple[Pairs, ...]
    wanted: Form

    @property
    def column_count(self) -> int:
        return int(self.wanted.matrix.shape[1])

    @cached_property
    def on_columns(self) -> Ints:
        """The column h of every pair."""
        return np.concatenate([np.arange(p.first, p.first + len(p)) for p in self.pairs] or [np.zeros(0, np.int64)])

    @cached_property
    def off_columns(self) -> Ints:
        """The column d of every pair."""
        sizes = [np.full(len(p), len(p)) for p in self.pairs] or [np.zeros(0, np.int64)]
        shifted: Ints = self.on_columns + np.concatenate(sizes)
        return shifted

    @cached_property
    def ends(self) -> Interval:
        """Bounds of every column."""
        lower, upper = np.zeros(self.column_count), np.zeros(self.column_count)
        size = self.box.lower.size
        lower[:size], upper[:size] = self.box.lower.reshape(-1), self.box.upper.reshape(-1)
        for pairs in self.pairs:
            upper[pairs.first : pairs.first + 2 * len(pairs)] = np.concatenate([pairs.upper, -pairs.lower])
        return Interval(lower, upper)

    @cached_property
    def rows(self) -> Rows:
        parts = []
        for pairs in self.pairs:
            on = np.arange(pairs.first, pairs.first + len(pairs))
            h, d = (place(1.0, columns, self.column_count) for columns in (on, on + len(pairs)))
            equal = sparse.csr_array(h - d - widen(pairs.before.matrix, self.column_count))
            parts.append(Rows(equal, pairs.before.constant, pairs.before.constant))
        for pairs in self.pairs:
            on = np.arange(pairs.first, pairs.first + len(pairs))
            h = place(1.0 / pairs.upper, on, self.column_count)
            d = place(-1.0 / pairs.lower, on + len(pairs), self.column_count)
            parts.append(Rows(sparse.csr_array(h + d), np.full(len(pairs), -np.inf), np.ones(len(pairs))))
        return stack_rows(parts, self.column_count)

    def complete(self, inputs: Floats) -> Floats:
        """All columns for inputs (size,) of the box, by a forward pass."""
        columns = np.zeros(self.column_count)
        columns[: inputs.size] = inputs
        for pairs in self.pairs:
            before = pairs.before.at(columns[: pairs.before.matrix.shape[1]])
            columns[pairs.first : pairs.first + len(pairs)] = np.maximum(before, 0.0)
            columns[pairs.first + len(pairs) : pairs.first + 2 * len(pairs)] = np.maximum(-before, 0.0)
        return columns


def relax(network: Network, index: int, elements: Ints, box: Interval, values: Mapping[int, Interval]) -> Relaxation:
    """The relaxation below `elements` of value `index`, given the `box` and intervals `values` (*shape) on it."""
    needed = _find_needed(network, index)
    builder = _Builder(box)
    forms: dict[int, Form] = {}
    for at in needed:
        check_time()
        op = network.ops[at]
        match op:
            case Input():
                size = int(np.prod(op.shape))
                forms[at] = Form(sparse.csr_array(sparse.eye_array(size, format="csr")), np.zeros(size))
            case Affine():
                forms[at] = _push(forms[op.source], op.map, network.ops[op.source].shape)
            case Relu():
                interval = values[op.source]
                forms[at] = builder.rectify(forms[op.source], interval.lower.reshape(-1), interval.upper.reshape(-1))
            case MaxPool():
                forms[at] = builder.pool(op, forms[op.source], values[op.source])
            case Sum():
                forms[at] = builder.add([forms[source] for source in op.sources])
            case Concat():
                forms[at] = builder.join([forms[source] for source in op.sources])
            case _:
                assert_never(op)
    return Relaxation(box, tuple(builder.pairs), builder.align(forms[index].take(elements)))


def _find_needed(network: Network, index: int) -> list[int]:
    needed, waiting = {index}, [index]
    while waiting:
        sources = [source for source in network.ops[waiting.pop()].sources if source not in needed]
        needed.update(sources)
        waiting += sources
    return sorted(needed)


class _Builder:
    def __init__(self, box: Interval) -> None:
        self.pairs: list[Pairs] = []
        self._columns = box.lower.size

    def align(self, form: Form) -> Form:
        """The same form over all columns so far."""
        return Form(widen(form.matrix, self._columns), form.constant)

    def rectify(self, before: Form, lower: Floats, upper: Floats) -> Form:
        """The positive part of a value with these bounds."""
        undecided = np.flatnonzero((lower < 0) & (upper > 0))
        own = before.take(undecided)
        self.pairs.append(Pairs(own, lower[undecided], upper[undecided], self._columns))
        new = self._columns + np.arange(len(undecided))
        self._columns += 2 * len(undecided)
        if self._columns * len(lower) > MOST_NUMBERS:
            raise TooLarge
        on = sparse.diags_array((lower >= 0).astype(np.float64), format="csr")
        entries = (np.ones(len(new)), (undecided, new))
        activation = sparse.csr_array(entries, shape=(len(lower), self._columns))
        passed = sparse.csr_array(on @ widen(before.matrix, self._columns))
        return Form(sparse.csr_array(passed + activation), np.where(lower >= 0, before.constant, 0.0))

    def add(self, forms: list[Form]) -> Form:
        aligned = [self.align(form) for form in forms]
        matrix = sum((form.matrix for form in aligned[1:]), aligned[0].matrix)
        constant: Floats = np.sum([form.constant for form in aligned], axis=0)
        return Form(sparse.csr_array(matrix), constant)

    def join(self, forms: list[Form]) -> Form:
        matrix = sparse.csr_array(sparse.vstack([self.align(form).matrix for form in forms], format="csr"))
        return Form(matrix, np.concatenate([form.constant for form in forms]))

    def pool(self, op: MaxPool, before: Form, interval: Interval) -> Form:
        """The maximum of each window, element by element, for all windows together."""
        channels, size = op.shape[0], interval.lower[0].size
        elements = np.arange(channels)[:, None, None] * size + op.windows  # (channels, positions, window)
        inside = np.broadcast_to(op.windows != NO_POSITION, elements.shape).reshape(-1, op.windows.shape[1])
        order = np.argsort(~inside, axis=1, kind="stable")  # padding last
        elements = np.take_along_axis(elements.reshape(inside.shape), order, axis=1)
        inside = np.take_along_axis(inside, order, axis=1)
        lower, upper = interval.lower.reshape(-1), interval.upper.reshape(-1)
        highest, low, high = before.take(elements[:, 0]), lower[elements[:, 0]], upper[elements[:, 0]]
        for place_in_window in range(1, elements.shape[1]):
            here = np.where(inside[:, place_in_window], elements[:, place_in_window], elements[:, 0])
            rival, rival_low, rival_high = before.take(here), lower[here], upper[here]
            over = self.add([rival, Form(-highest.matrix, -highest.constant)])
            padded = ~inside[:, place_in_window]
            gain = self.rectify(
                over, np.where(padded, -1.0, rival_low - high), np.where(padded, 0.0, rival_high - low)
            )
            highest = self.add([highest, gain])
            low = np.where(padded, low, np.maximum(low, rival_low))
            high = np.where(padded, high, np.maximum(high, rival_high))
        return highest


def _push(form: Form, linear: LinearMap, shape: tuple[int, ...]) -> Form:
    """Apply an affine map, a few columns at a time."""
    columns = form.matrix.T.tocsr()
    constant = linear.apply(form.constant.reshape(1, *shape))[0].reshape(-1)
    if columns.shape[0] * max(len(constant), columns.shape[1]) > MOST_NUMBERS:
        raise TooLarge
    step = max(1, CHUNK_NUMBERS // max(columns.shape[1], len(constant)))
    parts = []
    for first in range(0, columns.shape[0], step):
        check_time()
        chunk = columns[first : first + step].toarray()
        pushed = linear.apply_linear(chunk.reshape(len(chunk), *shape)).reshape(len(chunk), -1)
        parts.append(sparse.csr_array(pushed))
    stacked = sparse.vstack(parts, format="csr") if parts else sparse.csr_array((0, len(constant)))
    return Form(sparse.csr_array(stacked.T.tocsr()), constant)

"""Program: arrays, sources of lazy constraints, and a convex term.

    minimise    cost · x
    subject to  lower <= x <= upper,   rows,   every row of every source,
                x[i] integer where integer[i],   x[term.columns] >= term(x)

A solver without lazy constraints and convex terms is wrapped by a loop that adds rows and tangents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy import sparse

from critical_neurons.core.branching import Branching, Improvement
from critical_neurons.core.deadline import check_time
from critical_neurons.core.files import write_atomically
from critical_neurons.core.loss import Loss
from critical_neurons.core.lp import format_lp
from critical_neurons.core.mps import format_mps
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.errors import OutputError

FORMATS = {".mps": format_mps, ".lp": format_lp}
"""By the ending of a file."""

SHARED = -1
"""Instead of a data point: a column shared by all of them."""


@dataclass(frozen=True)
class Rows:
    """lower <= matrix · x <= upper."""

    matrix: sparse.csr_array
    lower: Floats
    upper: Floats

    def __len__(self) -> int:
        return len(self.lower)


def stack_rows(parts: list[Rows], column_count: int) -> Rows:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Rows(sparse.csr_array((0, column_count)), np.zeros(0), np.zeros(0))
    return Rows(
        sparse.csr_array(sparse.vstack([part.matrix for part in parts], format="csr")),
        np.concatenate([part.lower for part in parts]),
        np.concatenate([part.upper for part in parts]),
    )


def widen(matrix: sparse.csr_array, column_count: int) -> sparse.csr_array:
    """The same rows over more columns."""
    return sparse.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=(matrix.shape[0], column_count))


def place(values: Floats | float, columns: Ints, column_count: int) -> sparse.csr_array:
    """One row per given column, with a single value there."""
    filled = np.broadcast_to(np.asarray(values, dtype=np.float64), columns.shape)
    return sparse.csr_array((filled, columns, np.arange(len(columns) + 1)), shape=(len(columns), column_count))


def lay_out(**sizes: int) -> dict[str, slice]:
    """Consecutive named blocks of columns."""
    ends = np.cumsum(list(sizes.values()))
    return {name: slice(int(end) - size, int(end)) for (name, size), end in zip(sizes.items(), ends, strict=True)}


class RowSource(Protocol):
    """Lazy constraints: rows numbered `0 … count - 1`, all checked at once, built on request."""

    @property
    def count(self) -> int: ...

    @property
    def row_count(self) -> int:
        """The number of rows; one number may stand for several."""

    @property
    def ends(self) -> Ints:
        """The numbers at which the rows of each part of the network end, in the order of its layers."""

    @property
    def defining(self) -> Ints:
        """The numbers of rows that tie explicit columns to the others, which nearly all solutions need."""

    @property
    def rows_at_once(self) -> int:
        """How many rows to build between two checks of the deadline."""

    @property
    def block_count(self) -> int:
        """Blocks of data points, of which one at a time can be searched."""

    def violations(self, point: Floats) -> Floats:
        """The violation of each row at the point, relative to its scale; zero or less if satisfied."""

    def find_violated(self, point: Floats, block: int, least: float) -> tuple[Ints, Floats]:
        """The rows of a block that are violated by more than `least`, and their violations. The point is within the
        bounds of the program's columns; rows that these imply are left out."""

    def label(self, numbers: Ints) -> Ints:
        """The same number for rows of the same unit, which are often alike."""

    def build(self, numbers: Ints) -> Rows:
        """The rows with these numbers. One number may stand for more than one row."""


class ConvexTerm(Protocol):
    """Convex functions f_d of the point, one for each of the epigraph `columns`: x[columns] >= f(x)."""

    @property
    def columns(self) -> slice: ...

    @property
    def loss(self) -> Loss:
        """The f_d as functions of the logits."""

    def logits(self, point: Floats) -> Floats:
        """(batch, classes): the arguments of the f_d."""

    def values(self, point: Floats) -> Floats:
        """f_d at the point."""

    def cuts(self, point: Floats, which: Ints) -> Rows:
        """The tangents of the chosen f_d at the point, as rows."""

    def affine_forms(self) -> tuple[sparse.csr_array, Floats, Loss]:
        """Matrix and offset of the logits (d, class) as functions of the point, and the loss applied to them."""


class Saddle(Protocol):
    """All rows of a program and its logits as affine functions of the columns before those of the convex term, for
    methods that need only products. Constraints that `project` ensures have no rows. No column has a cost: what a
    program minimises besides the loss is the largest weighted mean of the forms in some rows."""

    @property
    def limits(self) -> tuple[Floats, Floats]:
        """Of the rows; those of `shares` may be outside."""

    @property
    def shares(self) -> Ints:
        """The rows of these forms. Their multipliers are minus the weights, which add up to a constant."""

    def project_multipliers(self, multipliers: Floats, strides: Floats) -> Floats:
        """The multipliers of a dual step, from those moved along the rows: the y for which
        h(y) + (y - multipliers)² / (2 strides) is least, h(y) the largest y · v with v within the limits, and the
        multipliers of `shares` minus weights. The strides of `shares` must be equal."""

    def project(self, columns: Floats, strides: Floats, lower: Floats, upper: Floats) -> Floats:
        """The nearest columns within the bounds; the squared distance of each counts with 1 / stride."""

    def apply(self, columns: Floats) -> tuple[Floats, Floats]:
        """The values of the rows, and the logits (batch, classes)."""

    def adjoint(self, multipliers: Floats, gradients: Floats) -> Floats:
        """The coefficients of multipliers · rows + the sum of gradients · logits."""

    def bound(self, multipliers: Floats, gradients: Floats, lower: Floats, upper: Floats) -> float:
        """A lower bound of the cost without the loss, plus the sum of gradients · logits, over all feasible x within
        the bounds, for any multipliers."""

    def repair(self, point: Floats) -> Floats:
        """A point near the given one, with other scores if necessary, that is feasible or nearly so."""


class Separator(Protocol):
    """Valid cuts, too many to number, found at a point."""

    def separate(self, point: Floats) -> Rows:
        """The cuts that the point violates most, if any."""


@dataclass(frozen=True)
class Origins:
    """The data point of each column, or `SHARED`, and its depth in the network.

    No row and no function of the convex term has columns of two data points.
    """

    points: Ints
    depths: Ints

    def at(self, columns: Ints) -> Origins:
        return Origins(self.points[columns], self.depths[columns])


@dataclass(frozen=True)
class Program:
    """`start` is a feasible point, if one is known: all scores at 1 and the network's forward pass.

    Among points of the same cost, those with the smaller `tie_break` · x are better.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs[:3].double().numpy())
    >>> program = cn.encode(network, bounds, labels[:3].numpy())
    >>> program.column_names()[:3]
    ['score[0]', 'score[1]', 'score[2]']
    >>> program.write("program.mps")
    """

    blocks: Mapping[str, slice]
    cost: Floats
    lower: Floats
    upper: Floats
    integer: Bools
    rows: Rows
    sources: tuple[RowSource, ...]
    term: ConvexTerm
    start: Floats | None = None
    given: Floats | None = None
    """A feasible point for a warm start: the search for better ones begins around it."""
    tie_break: Floats | None = None
    unpruned: Floats | None = None
    """The point of the unpruned network, feasible or not."""
    complete: Callable[[Floats], Floats] | None = None
    """The point with the scores of a given one that is feasible for all sources, if the formulation has one."""
    propose: Callable[[Floats], Iterator[Floats]] | None = None
    """Points with the scores of a given one, feasible for all sources if any are: first near it, then others."""
    improve: Improvement | None = None
    branching: Branching | None = None
    saddle: Saddle | None = None
    implicit_gates: int = 0
    """Relaxed gates and choices that need no column."""
    origins: Origins | None = None

    @property
    def column_count(self) -> int:
        return len(self.cost)

    @property
    def row_count(self) -> int:
        return len(self.rows) + sum(source.row_count for source in self.sources)

    @property
    def gate_count(self) -> int:
        """Undecided gates and choices, integer or relaxed, including those without a column."""
        gates = self.blocks.get("gate", slice(0, 0))
        return int(gates.stop - gates.start) + self.implicit_gates

    @property
    def known(self) -> list[Floats]:
        """The feasible points known before the search."""
        return [point for point in (self.start, self.given) if point is not None]

    def raise_term(self, point: Floats) -> Floats:
        """The point with its epigraph columns set to the true values of the convex term."""
        raised = point.copy()
        raised[self.term.columns] = self.term.values(point)
        return raised

    def value(self, point: Floats) -> float:
        return float(self.cost @ point)

    def write_out(self) -> Program:
        """The same program with all rows of all sources written out, for solvers without lazy constraints."""
        built = []
        for source in self.sources:
            for first in range(0, source.count, source.rows_at_once):
                check_time()
                built.append(source.build(np.arange(first, min(first + source.rows_at_once, source.count))))
        rows = stack_rows([self.rows, *built], self.column_count)
        return replace(self, rows=rows, sources=())

    def column_names(self) -> list[str]:
        """`score[0]`, `score[1]`, … by block; `column[7]` outside all blocks."""
        names = [f"column[{column}]" for column in range(self.column_count)]
        for block, columns in self.blocks.items():
            names[columns] = [f"{block}[{index}]" for index in range(columns.stop - columns.start)]
        return names

    def write(self, path: str | os.PathLike[str], rows: Rows | None = None) -> None:
        """Write the linear part to a file in free MPS format (`.mps`) or LP format (`.lp`, with parentheses in
        names): columns, fixed rows (`row[…]`), integrality.

        The convex term and the sources are not included. Rows and tangents that a solve has added,
        `solution.learnt`, can be given as `rows` (`learnt[…]`): the optimum of the file is then the lower bound of
        that solve, except for the first-order method, which adds none. `program.write_out().write(path)` writes every
        row of every source.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in FORMATS:
            raise OutputError(f"{path}: programs are written as {' or '.join(FORMATS)}, by the ending of the file.")
        more = stack_rows([] if rows is None else [rows], self.column_count)
        whole = stack_rows([self.rows, more], self.column_count)
        row_names = [f"row[{row}]" for row in range(len(self.rows))] + [f"learnt[{row}]" for row in range(len(more))]
        text = FORMATS[suffix](
            (self.column_names(), self.cost, self.lower, self.upper, self.integer),
            (row_names, whole.matrix, whole.lower, whole.upper),
        )
        write_atomically(path, text.encode())

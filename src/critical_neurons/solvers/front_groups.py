"""Front groups: the columns of a data point that are coupled only by columns of later layers."""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from critical_neurons.core.deadline import check_time
from critical_neurons.core.structure import Ints


def split_point(own: Ints, depths: Ints, pattern: sparse.csr_array) -> tuple[list[Ints], Ints]:
    """The columns of a data point as uncoupled groups, and the rest: those behind a depth, chosen to minimise the
    work, the sum of the cubes of all sizes."""
    check_time()
    rows = pattern[:, own]
    rows = rows[np.flatnonzero(np.diff(rows.indptr))]
    best = float(len(own)) ** 3
    chosen: tuple[list[Ints], Ints] = [], own
    for depth in np.unique(depths[own])[:-1]:
        front = np.flatnonzero(depths[own] <= depth)
        entries = sparse.coo_array(rows[:, front])
        size = sum(entries.shape)  # rows and columns are the nodes of a graph, coefficients its edges
        edges = (np.ones(entries.nnz), (entries.coords[0], entries.shape[0] + entries.coords[1]))
        graph = sparse.csr_array(edges, shape=(size, size))
        labels = csgraph.connected_components(graph, directed=False)[1][entries.shape[0] :]
        sizes = np.unique(labels, return_counts=True)[1].astype(np.float64)
        work = (sizes**3).sum() + float(len(own) - len(front)) ** 3
        if work < best:
            order = np.argsort(labels, kind="stable")
            groups = np.split(own[front][order], np.cumsum(sizes.astype(np.int64))[:-1])
            best, chosen = work, (groups, np.setdiff1d(own, own[front]))
    return chosen[0], _order_by_group(*chosen, pattern)


def _order_by_group(groups: list[Ints], rest: Ints, pattern: sparse.csr_array) -> Ints:
    """The rest sorted by the first group that each column is coupled to, so that updates are contiguous."""
    labels = np.full(pattern.shape[1], len(groups))
    for number, group in enumerate(groups):
        labels[group] = number
    entries = sparse.coo_array(pattern)
    first = np.full(pattern.shape[0], len(groups))
    np.minimum.at(first, entries.coords[0], labels[entries.coords[1]])
    meets = np.full(pattern.shape[1], len(groups))
    np.minimum.at(meets, entries.coords[1], first[entries.coords[0]])
    return rest[np.argsort(meets[rest], kind="stable")]

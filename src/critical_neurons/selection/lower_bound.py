"""Lower bound: an error that no choice of the same number of units can fall below.

Notation as in `elimination`. Let D <= G be block-diagonal with one block per unit. The quadratic form of G - D is
bounded below by its tangent at any X, and that of D separates into units. So for every X, with Q = (G - D) X, the
error of a choice is at least

    sum over removed units of tr (W_u' D_u W_u + 2 W_u' Q_u) - sum over kept units of tr Q_u' D_u⁻¹ Q_u
        - tr X' Q,

and sorting finds the minimum over all choices. A good X is W - V with V from the perspective relaxation, in which a
share z_u of every unit is kept:

    min over V and z of tr (V' (G - D) V - 2 V' G W) + sum of tr V_u' D_u V_u / z_u,

solved for V and z in alternation. A poor X weakens the bound but keeps it valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from critical_neurons.selection.elimination import Consumer
from critical_neurons.selection.factorisation import factorise

MOST_COLUMNS = 1024
"""Over all consumers together. With more columns the bound would take longer than the choice."""

TURNS = 60
NEAR = 0.99
"""Stop once the bound reaches this share of the relaxation's value."""

ROUNDING = 1e-9
"""Safety margin for rounding: D is shrunk and the bound lowered by this share."""


def is_bounded(column_count: int) -> bool:
    """Whether there is a bound for so many columns of all consumers together."""
    return column_count <= MOST_COLUMNS


def bound_error(consumers: Sequence[Consumer], unit_count: int, count: int, blocks: int = 1) -> float | None:
    """A lower bound on the error of any choice of `count` units, equally many per block; None if too expensive."""
    if not is_bounded(sum(len(consumer.units) for consumer in consumers)):
        return None
    if count == unit_count:
        return 0.0
    kept, best = count // blocks, 0.0
    forms = [_Form(consumer) for consumer in consumers]
    margin = ROUNDING * sum(form.size for form in forms)
    shares = torch.full((unit_count,), count / unit_count, dtype=torch.float64)
    for _ in range(TURNS):
        sizes, gone, stays = torch.zeros(3, unit_count, dtype=torch.float64)
        common, ceiling = 0.0, 0.0
        for form in forms:
            fitted = form.fit(shares)
            common += form.add_terms(gone, stays, fitted)
            ceiling += form.measure(fitted)
            form.add_sizes(sizes, fitted)
        spared = (gone + stays).reshape(blocks, -1).topk(kept, dim=1).values
        best = max(best, float(gone.sum() - spared.sum()) - common - margin)
        if best >= NEAR * ceiling:
            break
        shares = _share(sizes.sqrt().reshape(blocks, -1), kept).flatten()
    return best


class _Form:
    """G - D and W of a consumer, with H⁻¹ for G, in coordinates in which the diagonal blocks of H are
    identities. D is then the largest multiple of the identity for which G - D is positive semidefinite."""

    def __init__(self, consumer: Consumer) -> None:
        self._units, inverse, weight = consumer.units, consumer.inverse, consumer.weight
        scale = factorise(torch.where(self._units[:, None] == self._units, inverse, 0.0))
        self._weight = torch.linalg.solve_triangular(scale, weight, upper=False)
        half = torch.linalg.solve_triangular(scale, inverse, upper=False)
        even = torch.linalg.solve_triangular(scale, half.T, upper=False)
        self._own = (1 - ROUNDING) / torch.linalg.eigvalsh(even)[-1]
        self._rest = torch.cholesky_inverse(factorise(even))
        self._products = self._rest @ self._weight
        self.size = float((self._weight * self._products).sum())
        self._rest.diagonal().sub_(self._own)

    def fit(self, shares: Tensor) -> Tensor:
        """V for the shares z."""
        root = shares[self._units].sqrt()[:, None]
        squares = root * self._rest * root.T
        squares.diagonal().add_(self._own)
        return root * torch.cholesky_solve(root * self._products, factorise(squares))

    def add_terms(self, gone: Tensor, stays: Tensor, fitted: Tensor) -> float:
        """Add the terms of removed and of kept units; return the term tr X' Q that every choice has."""
        missing = self._weight - fitted
        pull = self._rest @ missing
        gone.index_add_(0, self._units, (self._own * self._weight.square() + 2 * self._weight * pull).sum(1))
        stays.index_add_(0, self._units, pull.square().sum(1) / self._own)
        return float((missing * pull).sum())

    def measure(self, fitted: Tensor) -> float:
        """The value of the relaxation at V."""
        return self.size - float((fitted * self._products).sum())

    def add_sizes(self, sizes: Tensor, fitted: Tensor) -> None:
        """tr V_u' D_u V_u."""
        sizes.index_add_(0, self._units, self._own * fitted.square().sum(1))


def _share(roots: Tensor, count: int) -> Tensor:
    """The z <= 1 of sum `count` per row that minimise the sum of roots² / z: proportional to the roots, clipped."""
    roots = roots.clamp(min=torch.finfo(roots.dtype).tiny)
    full = torch.zeros_like(roots, dtype=torch.bool)
    while True:
        open_roots = roots.masked_fill(full, 0.0)
        shares = open_roots * ((count - full.sum(1)) / open_roots.sum(1))[:, None]
        above = shares > 1
        if not above.any():
            return shares.masked_fill(full, 1.0)
        full |= above

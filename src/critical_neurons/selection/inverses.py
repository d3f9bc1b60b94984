"""Inverses of the covariances that the consumers of the original model read, held as far as memory allows, and
refitting with them. Notation as in `elimination`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from critical_neurons.removal.refit.ridge import add_ridge
from critical_neurons.selection.factorisation import factorise
from critical_neurons.selection.statistics import Moments

MOST_HELD = 2**30
"""Bytes of inverses that are held: those used last."""


class Inverses:
    def __init__(self, moments: Mapping[str, Sequence[Moments]]) -> None:
        self._moments = moments
        self._held: dict[tuple[str, int], Tensor] = {}  # in the order of their last use

    def find(self, module: str, part: int) -> Tensor:
        """H of this part of a module, in double precision."""
        key = module, part
        found = self._held.pop(key, None)
        self._held[key] = invert(self._moments[module][part].covariance) if found is None else found
        while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > MOST_HELD:
            del self._held[next(iter(self._held))]
        return self._held[key]

    def refit(self, module: str, part: int, weight: Tensor, gone: Tensor) -> Tensor:
        """The weights of this part without some columns, by the cheaper of two ways."""
        if 2 * int(gone.sum()) > len(gone):
            return refit(regularise(self._moments[module][part].covariance), weight, gone)
        return refit_by_inverse(self.find(module, part), weight, gone)


def invert(covariance: Tensor) -> Tensor:
    """H = G⁻¹, in double precision."""
    inverse: Tensor = torch.cholesky_inverse(factorise(regularise(covariance)))
    return inverse


def regularise(covariance: Tensor) -> Tensor:
    """G: the covariance plus a ridge, in double precision."""
    return add_ridge(covariance.to(torch.float64, copy=True))


def refit(squares: Tensor, weight: Tensor, gone: Tensor) -> Tensor:
    """V (columns, outputs): the weights with the least error, zero for the columns that are gone. From G, which costs
    less the fewer stay."""
    left, removed = (~gone).nonzero().flatten(), gone.nonzero().flatten()
    fitted, moved = torch.zeros_like(weight), squares[left[:, None], removed] @ weight[removed]
    fitted[left] = weight[left] + torch.cholesky_solve(moved, factorise(squares[left[:, None], left]))
    return fitted


def refit_by_inverse(inverse: Tensor, weight: Tensor, gone: Tensor) -> Tensor:
    """The same from H, which costs less the fewer go."""
    left, removed = (~gone).nonzero().flatten(), gone.nonzero().flatten()
    fitted, factor = torch.zeros_like(weight), factorise(inverse[removed[:, None], removed])
    fitted[left] = weight[left] - inverse[left[:, None], removed] @ torch.cholesky_solve(weight[removed], factor)
    return fitted

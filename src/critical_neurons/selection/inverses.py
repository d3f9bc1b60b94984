"""Inverses of the covariances that the consumers of the original model read, held as far as memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from critical_neurons.removal.refit.ridge import add_ridge
from critical_neurons.selection.factorisation import factorise
from critical_neurons.selection.statistics import Moments

MOST_HELD = 2**30
"""Bytes of inverses that are held. Those of a ResNet-50 take 450 MB."""


class Inverses:
    def __init__(self, moments: Mapping[str, Sequence[Moments]]) -> None:
        self._moments = moments
        self._held: dict[tuple[str, int], Tensor] = {}  # in the order of their last use

    def find(self, module: str, part: int) -> Tensor:
        """(G + ridge)⁻¹ of this part of a module, in double precision."""
        key = module, part
        found = self._held.pop(key, None)
        self._held[key] = invert(self._moments[module][part].covariance) if found is None else found
        while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > MOST_HELD:
            del self._held[next(iter(self._held))]
        return self._held[key]


def invert(covariance: Tensor) -> Tensor:
    """(G + ridge)⁻¹ in double precision."""
    inverse: Tensor = torch.cholesky_inverse(factorise(regularise(covariance)))
    return inverse


def regularise(covariance: Tensor) -> Tensor:
    """G + ridge in double precision."""
    return add_ridge(covariance.to(torch.float64, copy=True))

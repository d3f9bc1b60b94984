"""Inverses of the covariances that consumers read, held as far as memory allows, and refitting with them. Notation as
in `elimination`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from critical_neurons.parallel import Executor, run_in_order
from critical_neurons.removal.refit.ridge import add_ridge
from critical_neurons.removal.refit.symmetric import invert_cholesky, solve_cholesky
from critical_neurons.selection.factorisation import factorise

MOST_HELD = 2**30
"""Memory for inverses, in bytes; those used last are kept."""

MOST_KEPT = 2**29
"""The same for drafts: most of theirs are used once, and lie beside what is needed to refit the next one."""


class Inverses:
    """H of the parts of modules, in double precision."""

    def __init__(self, covariances: Mapping[str, Sequence[Tensor]], most: int = MOST_HELD) -> None:
        self._covariances, self._most = covariances, most
        self._held: dict[tuple[str, int], Tensor] = {}  # in the order of their last use

    def find(self, module: str, part: int) -> Tensor:
        found = self._held.pop((module, part), None)
        return self._hold(module, part, invert(self._covariances[module][part]) if found is None else found)

    def prepare(self, executor: Executor) -> None:
        """Invert on the workers as many as can be held."""
        keys, left = list[tuple[str, int]](), self._most - sum(each.nbytes for each in self._held.values())
        for module, covariances in self._covariances.items():
            for part, covariance in enumerate(covariances):
                size = covariance.numel() * torch.float64.itemsize
                if (module, part) not in self._held and size <= left:
                    keys.append((module, part))
                    left -= size
        calls = (partial(invert, self._covariances[module][part]) for module, part in keys)
        for key, found in zip(keys, run_in_order(executor, calls), strict=True):
            self._hold(*key, found)

    def release(self, most: int = 0) -> None:
        """Hold at most this many bytes."""
        while sum(each.nbytes for each in self._held.values()) > most:
            del self._held[next(iter(self._held))]

    def _hold(self, module: str, part: int, inverse: Tensor) -> Tensor:
        self._held[module, part] = inverse
        self.release(self._most)
        return inverse

    def refit(self, module: str, part: int, weight: Tensor, gone: Tensor) -> Tensor:
        """The weights of this part without some columns, by the cheaper of two ways."""
        if 2 * int(gone.sum()) > len(gone):
            return refit(regularise(self._covariances[module][part]), weight, gone)
        return refit_by_inverse(self.find(module, part), weight, gone)


def invert(covariance: Tensor) -> Tensor:
    """H = G⁻¹, in double precision."""
    return invert_cholesky(factorise(regularise(covariance)))


def regularise(covariance: Tensor) -> Tensor:
    """G: the covariance plus a ridge, in double precision."""
    return add_ridge(covariance.to(torch.float64, copy=True))


def refit(squares: Tensor, weight: Tensor, gone: Tensor) -> Tensor:
    """V (columns, outputs): the weights with the least error, zero for the columns that are gone. From G, which costs
    less the fewer stay."""
    left, removed = (~gone).nonzero().flatten(), gone.nonzero().flatten()
    fitted, moved = torch.zeros_like(weight), squares[left[:, None], removed] @ weight[removed]
    fitted[left] = weight[left] + solve_cholesky(factorise(squares[left[:, None], left]), moved)
    return fitted


def refit_by_inverse(inverse: Tensor, weight: Tensor, gone: Tensor) -> Tensor:
    """The same from H, which costs less the fewer go."""
    left, removed = (~gone).nonzero().flatten(), gone.nonzero().flatten()
    fitted, factor = torch.zeros_like(weight), factorise(inverse[removed[:, None], removed])
    fitted[left] = weight[left] - inverse[left[:, None], removed] @ solve_cholesky(factor, weight[removed])
    return fitted

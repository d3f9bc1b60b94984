"""Factorisation: Cholesky factors of symmetric matrices, with fallbacks where rounding made them singular."""

from __future__ import annotations

import torch
from scipy.linalg import lapack
from torch import Tensor

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.refit.symmetric import factorise_cholesky

LIFTS = tuple(10.0**power for power in range(-12, 1))
"""Tried in turn on the diagonal, relative to its largest entry, until the matrix is positive definite."""


def factorise(matrix: Tensor) -> Tensor:
    """The Cholesky factor, with the smallest of `LIFTS` added to the diagonal that makes it exist."""
    if len(matrix) == 1 and matrix > 0:  # the units of linear layers, one by one
        return matrix.sqrt()
    factor, failed = factorise_cholesky(matrix)
    if not failed:
        return factor
    unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    size = matrix.diagonal().abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)
    for lift in LIFTS:
        factor, failed = factorise_cholesky(matrix + lift * size * unit)
        if not failed:
            return factor
    raise InvalidInputError(
        "inputs: the covariance of a layer's inputs is singular even in double precision. Are they scaled right?"
    )


def take_root(matrix: Tensor) -> Tensor:
    """L (size, rank) with L L' the positive semidefinite matrix, by Cholesky with pivots: the lower the rank, the
    cheaper. Pivots at rounding level are left out."""
    packed, order, rank, _ = lapack.dpstrf(matrix.cpu().numpy().T, lower=1)
    root = torch.zeros(len(matrix), int(rank), dtype=matrix.dtype)
    root[torch.from_numpy(order).long() - 1] = torch.from_numpy(packed[:, :rank]).tril()
    return root.to(matrix.device)

"""Factorisation: Cholesky and eigenvalues of symmetric matrices, with fallbacks where rounding made them singular."""

from __future__ import annotations

import torch
from scipy import linalg
from torch import Tensor

from critical_neurons.errors import InvalidInputError

LIFTS = tuple(10.0**power for power in range(-12, 1))
"""Tried in turn on the diagonal, relative to its largest entry, until the matrix is positive definite."""


def factorise(matrix: Tensor) -> Tensor:
    """The Cholesky factor, with the smallest of `LIFTS` added to the diagonal that makes it exist."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return factor
    unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    size = matrix.diagonal().abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)
    for lift in LIFTS:
        factor, failed = torch.linalg.cholesky_ex(matrix + lift * size * unit)
        if not failed:
            return factor
    raise InvalidInputError(
        "inputs: the covariance of a layer's inputs is singular even in double precision. Are they scaled right?"
    )


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order, and eigenvectors as columns."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # divide and conquer may not converge where QR iteration does
        found = linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(each).to(matrix) for each in found)
    return values, vectors

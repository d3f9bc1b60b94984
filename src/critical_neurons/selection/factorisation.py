"""Factorisation: of symmetric matrices that rounding made singular, or that LAPACK's fastest driver does not take."""

from __future__ import annotations

import torch
from scipy import linalg
from torch import Tensor

from critical_neurons.errors import InvalidInputError

LIFTS = tuple(10.0**power for power in range(-12, 1))
"""Added to the diagonal, relative to its largest entry, as long as the matrix is not positive definite."""


def factorise(matrix: Tensor) -> Tensor:
    """L, lower triangular, with M = L L'. Where M is not positive definite, of the next matrix that is."""
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
        "inputs: what layers read of them cannot be told from noise in double precision. Are they scaled right?"
    )


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order, and eigenvectors as columns."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # divide and conquer may not converge where QR iteration does
        found = linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(each).to(matrix) for each in found)
    return values, vectors

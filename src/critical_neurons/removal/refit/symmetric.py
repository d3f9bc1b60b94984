"""Symmetric: products, Cholesky factors and inverses of large matrices, on the CPU by SciPy's BLAS and LAPACK.

They compute one triangle only, and take about half as long as torch's. Small matrices and other devices are left to
torch. SciPy reads a transposed matrix without a copy, so that torch's lower triangle is its upper one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from scipy.linalg import blas, lapack
from torch import Tensor

LEAST = 128
"""Columns from which SciPy is called."""

TILE = 256
"""Columns of a block that is transposed at once."""

MULTIPLY: dict[torch.dtype, Any] = {torch.float32: blas.ssyrk, torch.float64: blas.dsyrk}
FACTORISE = {torch.float32: lapack.spotrf, torch.float64: lapack.dpotrf}
SOLVE = {torch.float32: lapack.spotrs, torch.float64: lapack.dpotrs}
INVERT = {torch.float32: lapack.spotri, torch.float64: lapack.dpotri}


def multiply_columns(rows: Tensor) -> Tensor:
    """rows' rows: (..., rows, columns) to (..., columns, columns)."""
    return mirror(multiply_lower(rows))


def multiply_lower(rows: Tensor) -> Tensor:
    """As `multiply_columns`, but only the lower triangles are right: those of a sum need to be mirrored once only."""
    return _map(_multiply, rows) if _is_large(rows) else rows.mT @ rows


def mirror(matrix: Tensor) -> Tensor:
    """Fill upper triangles (..., columns, columns) from the lower ones, in place."""
    for first in range(0, matrix.shape[-1], TILE):
        inside, last = slice(first, first + TILE), first + TILE
        matrix[..., inside, last:] = matrix[..., last:, inside].mT
        block = matrix[..., inside, inside]
        block.copy_(block.tril() + block.tril(-1).mT)
    return matrix


def factorise_cholesky(matrix: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.cholesky_ex`: the lower factor, and for each matrix whether there is none. `overwrite`: the
    matrix is not needed any more, and the factor may take its place."""
    if not _is_large(matrix):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return factor, failed != 0
    factor = _map(lambda each: _factorise(each, overwrite=overwrite), matrix)
    return factor, ~torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all(-1)


def solve_cholesky(factor: Tensor, given: Tensor) -> Tensor:
    """As `torch.cholesky_solve(given, factor)`."""
    if not _is_large(factor):
        return torch.cholesky_solve(given, factor)
    return _map(
        lambda one, other: torch.from_numpy(SOLVE[one.dtype](one.numpy().T, other.numpy(), lower=0)[0]), factor, given
    )


def invert_cholesky(factor: Tensor) -> Tensor:
    """The inverse of the matrix (columns, columns) with this factor."""
    if not _is_large(factor):
        return torch.cholesky_inverse(factor)
    return mirror(torch.from_numpy(INVERT[factor.dtype](factor.numpy().T, lower=0)[0].T))


def _is_large(values: Tensor) -> bool:
    return (
        values.device.type == "cpu" and values.dtype in MULTIPLY and values.shape[-1] >= LEAST and values.numel() > 0
    )


def _multiply(rows: Tensor) -> Tensor:
    return torch.from_numpy(MULTIPLY[rows.dtype](1.0, rows.numpy().T).T)


def _factorise(matrix: Tensor, *, overwrite: bool) -> Tensor:
    factor, failed = FACTORISE[matrix.dtype](matrix.numpy().T, lower=0, overwrite_a=overwrite)
    return torch.full_like(matrix, torch.nan) if failed else torch.from_numpy(factor.T)


def _map(call: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """The call for every matrix of (..., rows, columns), or for the only one without copying its result."""
    if values[0].ndim == 2:
        return call(*values)
    found = [_map(call, *each) for each in zip(*values, strict=True)]
    return torch.stack(found) if len(found) > 1 else found[0][None]

"""Products, factors and inverses of symmetric matrices, large and small: those of torch."""

from __future__ import annotations

import pytest
import torch

from critical_neurons.removal.refit import symmetric
from critical_neurons.removal.refit.symmetric import (
    factorise_cholesky,
    invert_cholesky,
    multiply_columns,
    solve_cholesky,
)

ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-12}

EVERY = pytest.mark.parametrize("dtype", ROUNDING)
SHAPES = pytest.mark.parametrize("shape", [(30, 11), (1, 30, 11), (3, 30, 11), (2, 2, 5, 11)])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(symmetric, "LEAST", 11)
    monkeypatch.setattr(symmetric, "TILE", 4)


def draw(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def draw_regular(shape, dtype):
    rows = draw(shape, dtype)
    return rows.mT @ rows + torch.eye(shape[-1], dtype=dtype)


@EVERY
@SHAPES
def test_products_of_columns(shape, dtype):
    rows = draw(shape, dtype)
    for each in (rows, rows.mT.contiguous().mT):
        product = multiply_columns(each)
        assert torch.equal(product, product.mT)
        assert torch.allclose(product, rows.mT @ rows, atol=ROUNDING[dtype])


@EVERY
@SHAPES
def test_factors_solve_and_invert(shape, dtype):
    regular = draw_regular(shape, dtype)
    before = regular.clone()
    factor, failed = factorise_cholesky(regular)
    assert failed.shape == shape[:-2]
    assert not failed.any()
    assert torch.allclose(factor, torch.linalg.cholesky(regular), atol=ROUNDING[dtype])
    given = draw((*regular.shape[:-1], 3), dtype)
    assert torch.allclose(regular @ solve_cholesky(factor, given), given, atol=10 * ROUNDING[dtype])
    assert torch.equal(regular, before)
    assert torch.equal(factorise_cholesky(before.clone(), overwrite=True)[0], factor)
    if regular.ndim == 2:
        assert torch.allclose(invert_cholesky(factor), torch.linalg.inv(regular), atol=ROUNDING[dtype])


@pytest.mark.parametrize("wrong", [-1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 7, 10])
def test_matrices_without_a_factor(wrong, place):
    regular = draw_regular((3, 30, 11), torch.float64)
    regular[1, place, place] = wrong
    assert factorise_cholesky(regular)[1].tolist() == [False, True, False]


@pytest.mark.parametrize("columns", [10, 0])
def test_small_matrices_are_left_to_torch(columns, monkeypatch):
    monkeypatch.setattr(symmetric, "MULTIPLY", dict.fromkeys(ROUNDING))
    rows = draw((30, columns), torch.float64)
    assert torch.equal(multiply_columns(rows), rows.mT @ rows)


def test_no_rows():
    assert not multiply_columns(torch.zeros(2, 0, 11)).any()

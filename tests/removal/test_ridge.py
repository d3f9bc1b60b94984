"""Regression through sums over rows and through products of rows: the same result, and finite whatever comes."""

from __future__ import annotations

import pytest
import torch

from critical_neurons.errors import PruningError
from critical_neurons.removal.refit import ridge, row_products
from critical_neurons.removal.refit.ridge import NormalEquations
from critical_neurons.removal.refit.row_products import RowProducts

SAME = 1e-7


def draw(groups=2, rows=40, columns=12, outputs=3, *, seed=0, dtype=torch.float64):
    """Parts of 1/4 each, the last to be held out; errors that the columns explain but for a little."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(groups, rows, columns, generator=generator, dtype=torch.float64) + 3
    weights = torch.randn(groups, columns, outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(groups, rows, outputs, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), (inputs @ weights + 0.1 * noise + 1).to(dtype)


def regress(kind, inputs, errors, held_out=(False, False, False, True)):
    groups, _, columns = inputs.shape
    regression = (
        RowProducts() if kind is RowProducts else NormalEquations(groups, columns, errors.shape[2], inputs.device)
    )
    parts = zip(inputs.chunk(len(held_out), 1), errors.chunk(len(held_out), 1), held_out, strict=True)
    for rows, missing, apart in parts:
        regression.add(rows, missing, held_out=apart)
    return regression.solve()


@pytest.mark.parametrize("kept", [(12, 12), (5, 5), (1, 8)])
def test_columns_that_do_not_stay_are_as_if_never_read(kept):
    inputs, errors = draw()
    generator = torch.Generator().manual_seed(0)
    stays = torch.stack([torch.randperm(12, generator=generator) < count for count in kept])
    regression = NormalEquations(2, 12, 3, inputs.device, stays)
    for rows, missing, apart in zip(inputs.chunk(4, 1), errors.chunk(4, 1), (False,) * 3 + (True,), strict=True):
        regression.add(rows, missing, held_out=apart)
    added, shift = regression.solve()
    assert not added[~stays].any()
    if kept[0] == kept[1]:
        read = torch.stack([rows[:, columns] for rows, columns in zip(inputs, stays, strict=True)])
        alone, moved = regress(NormalEquations, read, errors)
        assert torch.allclose(added[stays].reshape(alone.shape), alone, rtol=SAME)
        assert torch.allclose(shift, moved, rtol=SAME)
    left = errors - inputs @ added - shift[:, None]
    assert left.square().sum() < (errors - errors.mean(1, keepdim=True)).square().sum()


BOTH = pytest.mark.parametrize("kind", [NormalEquations, RowProducts])


@pytest.mark.parametrize("columns", [5, 12, 100])
def test_both_ways_lead_to_the_same(columns, monkeypatch):
    monkeypatch.setattr(row_products, "COLUMNS_AT_ONCE", 7)
    inputs, errors = draw(columns=columns)
    (one, shift), (other, moved) = (regress(kind, inputs, errors) for kind in (NormalEquations, RowProducts))
    assert one.abs().max() > 0.1
    assert (one - other).norm() <= SAME * one.norm()
    assert (shift - moved).norm() <= SAME * shift.norm()
    rounded, _ = regress(RowProducts, inputs.float(), errors.float())
    assert (rounded - other).norm() <= 1e-3 * other.norm()


@BOTH
def test_the_ridge_is_that_of_the_least_error_on_what_is_held_out(kind):
    inputs, errors = draw(groups=1, rows=60, columns=30)
    errors = errors + 4 * torch.randn(errors.shape, generator=torch.Generator().manual_seed(1))
    added, shift = regress(kind, inputs, errors)

    def solve(rows, missing, share):
        rows, missing = rows - rows.mean(1, keepdim=True), missing - missing.mean(1, keepdim=True)
        squares = rows.mT @ rows
        level = share * squares.diagonal(dim1=1, dim2=2).mean()
        return torch.linalg.solve(squares + level * torch.eye(30), rows.mT @ missing)

    def judge(share):
        rows, missing = (values - values.mean(1, keepdim=True) for values in (inputs[:, 45:], errors[:, 45:]))
        return (missing - rows @ solve(inputs[:, :45], errors[:, :45], share)).square().sum()

    best = min(ridge.RIDGES, key=judge)
    assert best not in (ridge.RIDGES[0], ridge.RIDGES[-1])
    assert (added - solve(inputs, errors, best)).norm() <= 1e-5 * added.norm()
    assert torch.allclose((inputs @ added + shift[:, None]).mean(1), errors.mean(1))


AWKWARD = {
    "zero": lambda x: 0 * x,
    "constant": lambda x: 0 * x + 7,
    "repeated columns": lambda x: x[..., :1].expand_as(x).clone(),
    "repeated rows": lambda x: x[:, :1].expand_as(x).clone(),
    "dead columns": lambda x: x * (torch.arange(x.shape[2]) % 2),
    "one dead group": lambda x: x * torch.arange(2)[:, None, None],
    "tiny": lambda x: 1e-25 * x,
    "large": lambda x: 1e15 * x,
    "very unlike": lambda x: x * 10.0 ** torch.linspace(-15, 15, x.shape[2]),
    "far from zero": lambda x: 1e-3 * x + 1e4,
}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_inputs_give_finite_results_that_do_no_harm(name, dtype, kind):
    inputs, errors = draw(dtype=dtype)
    inputs = AWKWARD[name](inputs).to(dtype)
    added, shift = regress(kind, inputs, errors)
    assert torch.isfinite(added).all()
    assert torch.isfinite(shift).all()
    left = errors - inputs.double() @ added.double() - shift[:, None]
    around = errors - errors.mean(1, keepdim=True)
    assert left.square().sum() <= 1.001 * around.square().sum()


@BOTH
def test_what_cannot_be_factorised_stays_as_it_is(kind, monkeypatch):
    """Here by a ridge below zero, for a group that needs it more than the other."""
    inputs, errors = draw()
    monkeypatch.setattr(ridge, "RIDGES", (-0.5,))
    inputs[0] = inputs[0, :, :1]  # nearly all squares are zero along most directions
    added, shift = regress(kind, inputs, errors)
    assert torch.equal(added[0], torch.zeros_like(added[0]))
    assert torch.isfinite(added).all()
    assert torch.allclose(shift[0], errors[0].mean(0))


@BOTH
@pytest.mark.parametrize("held_out", [(False, False), (True, True)])
def test_without_anything_held_out_or_fitted_the_mean_alone_is_kept(kind, held_out):
    inputs, errors = draw()
    added, shift = regress(kind, inputs, errors, held_out)
    assert not added.any()
    assert torch.allclose(shift, errors.mean(1))


@BOTH
def test_numbers_beyond_single_precision_are_refused(kind):
    inputs, errors = draw(dtype=torch.float32)
    inputs[0, 3, 3] = torch.inf
    with pytest.raises(PruningError, match="NaN or infinite weights"):
        regress(kind, inputs, errors)


@pytest.mark.parametrize("best", range(len(ridge.RIDGES)))
def test_the_best_ridge_is_found_wherever_it_is(best):
    tried = []

    def judge(share):
        place = ridge.RIDGES.index(share)
        tried.append(place)
        return abs(place - best) - 10.0, float(best - place)

    assert ridge.choose_ridge(judge) == ridge.RIDGES[best]
    assert tried == list(range(3, best + 1)) or tried == list(range(3, best - 1, -1))


@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_a_neighbouring_ridge_that_is_worse_is_not_taken(slope):
    assert ridge.choose_ridge(lambda share: (-1.0 if share == 1e-3 else 0.0, slope)) == 1e-3


@pytest.mark.parametrize("value", [0.0, 1.0, float("inf")])
def test_a_ridge_that_reduces_no_error_is_not_taken(value):
    assert ridge.choose_ridge(lambda share: (value, 1.0)) is None

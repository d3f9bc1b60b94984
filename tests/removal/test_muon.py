"""Muon: orthogonal steps for matrices, those of Adam for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from critical_neurons.removal import muon as muon_module
from critical_neurons.removal.muon import STEP_SIZE, Muon, orthogonalise


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 7)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    matrix = torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    assert sizes[-1] / matrix.norm() > 0.01
    turned = torch.diagonal(left.T @ orthogonalise(matrix) @ right.T)
    assert ((turned > 0.6) & (turned < 1.3)).all()
    torch.testing.assert_close(left @ torch.diag(turned) @ right, orthogonalise(matrix))


def test_a_zero_gradient_changes_nothing():
    assert torch.equal(orthogonalise(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_entries_of_a_step_have_the_size_of_the_rate():
    kernel = nn.Parameter(torch.zeros(8, 4, 3, 3))
    kernel.grad = torch.randn(kernel.shape, generator=torch.Generator().manual_seed(0))
    Muon([kernel]).step(1e-2)
    assert float(kernel.detach().square().mean().sqrt()) == pytest.approx(1e-2 * STEP_SIZE, rel=0.3)
    assert float((kernel.detach() * kernel.grad).sum()) < 0


def test_vectors_and_wide_matrices_take_steps_of_adam(monkeypatch):
    monkeypatch.setattr(muon_module, "WIDEST", 3)
    weights = [nn.Parameter(torch.zeros(shape)) for shape in ((5,), (4, 4), (), (2, 4))]
    unused = nn.Parameter(torch.zeros(2, 2))
    for each in weights:
        each.grad = torch.ones_like(each)
    Muon([*weights, unused]).step(1e-2)
    for each in weights[:3]:
        torch.testing.assert_close(each.detach(), torch.full_like(each, -1e-2))
    assert not torch.allclose(weights[3].detach(), torch.full((2, 4), -1e-2))
    assert torch.equal(unused.detach(), torch.zeros(2, 2))


def test_gradients_that_vanish_leave_the_weights_finite():
    """The momentum decays to numbers whose squares are zero."""
    weight = nn.Parameter(torch.ones(4, 5))
    optimiser, generator = Muon([weight]), torch.Generator().manual_seed(0)
    weight.grad = 1e-3 * torch.randn(weight.shape, generator=generator)
    optimiser.step(1e-2)
    moved = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    for _ in range(1000):
        optimiser.step(1e-2)
    assert torch.equal(weight, moved)
    for scale in (1e-24, 1e-36):
        turned = orthogonalise(scale * torch.randn(4, 5, generator=generator))
        assert turned.isfinite().all()
        assert turned.norm() > 1

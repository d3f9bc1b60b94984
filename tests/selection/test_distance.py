"""Distance: which suits which outputs, and that its probes have its curvature for their mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.selection import distance
from critical_neurons.selection.distance import Distance, choose_distance, list_outputs

ROUNDING = 1e-9
DRAWS, SAMPLED = 2000, 0.15
"""Probes, and how far the mean of so many may be from what it is on average, relative to the largest."""

LOGITS = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OTHERS = LOGITS + 0.3 * torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_outputs_in_any_nesting():
    one, other, label = torch.rand(2, 3), torch.rand(2), torch.tensor([1, 0])
    found = list_outputs({"a": (one, [label]), "b": {"c": other}, "d": None})
    assert [each is given for each, given in zip(found, (one, other), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("outputs", "size", "divergence"),
    [
        ([LOGITS], 1, True),
        ([torch.rand(4, 11)], 22, True),
        ([torch.rand(4, 11)], 21, False),
        ([LOGITS[:, :1]], 100, False),
        ([LOGITS, LOGITS], 100, False),
        ([LOGITS[:, :, None]], 100, False),
    ],
    ids=["few classes", "half as many numbers as an input", "more", "one number", "two outputs", "positions"],
)
def test_auto_takes_the_divergence_for_class_scores_alone(outputs, size, divergence):
    assert choose_distance(outputs, "auto", size).divergence is divergence
    assert choose_distance(outputs, "squares", size).divergence is False


def test_the_divergence_is_that_of_probabilities_however_they_are_given():
    expected = functional.kl_div(OTHERS.log_softmax(1), LOGITS.softmax(1), reduction="batchmean")
    for outputs, others in ((LOGITS, OTHERS), (LOGITS.softmax(1), OTHERS.softmax(1))):
        found = choose_distance([outputs], "divergence", 6)
        assert float(found.measure([others], [outputs])) == pytest.approx(float(expected), abs=ROUNDING)
    assert choose_distance([LOGITS.softmax(1)], "divergence", 6).logarithms
    assert not choose_distance([LOGITS], "divergence", 6).logarithms


def test_squares_are_relative_to_the_variance_and_summed():
    found = choose_distance([LOGITS, 100 * LOGITS], "squares", 6)
    mean = LOGITS.mean().expand_as(LOGITS)
    assert float(found.measure([mean, 100 * mean], [LOGITS, 100 * LOGITS])) == pytest.approx(2.0)
    assert found.miss([mean, 100 * LOGITS], [LOGITS, 100 * LOGITS]) == pytest.approx(1.0)


def test_a_constant_output_is_compared_all_the_same():
    constant = torch.ones(4, 2)
    assert float(choose_distance([constant], "squares", 9).measure([constant + 1], [constant])) == 1.0


def test_misses_are_decisions_that_change_but_for_near_ones(monkeypatch):
    found, share = Distance(divergence=True), float((LOGITS.argmax(1) != OTHERS.argmax(1)).double().mean())
    assert share > 0
    assert found.miss([LOGITS + 0.01 * (OTHERS - LOGITS)], [LOGITS]) < found.miss([OTHERS], [LOGITS])
    monkeypatch.setattr(distance, "SOFTENING", 1e-6)
    assert found.miss([OTHERS], [LOGITS]) == pytest.approx(share)


@pytest.mark.parametrize(
    ("found", "temperature"),
    [
        (Distance(divergence=True), 1.0),
        (Distance(divergence=True), 2.0),
        (choose_distance([LOGITS], "squares", 9), 1.0),
        (choose_distance([LOGITS], lambda found, wanted: (found[0] - wanted[0]).square().sum(1), 9), 1.0),
        (choose_distance([LOGITS], lambda found, wanted: (found[0] - wanted[0]).cosh().mean(), 9), 1.0),
    ],
)
def test_probes_have_the_curvature_of_the_distance_for_their_mean(found, temperature):
    """At the outputs themselves; a probe is a sum over inputs, the distance their mean."""
    outputs = LOGITS[:4].clone().requires_grad_()
    total, generator = np.zeros((12, 12)), torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        (slope,) = torch.autograd.grad(found.probe([outputs], temperature, generator), outputs)
        total += np.outer(slope, slope) / DRAWS
    curvature = torch.autograd.functional.hessian(
        lambda outputs: 4 * found.measure([outputs], [LOGITS[:4]], temperature), LOGITS[:4]
    )
    assert np.abs(total - curvature.reshape(12, 12).numpy()).max() <= SAMPLED * np.abs(total).max()


@pytest.mark.parametrize("outputs", [[], [torch.tensor([[1.0, torch.nan]])], [torch.tensor([[1.0, torch.inf]])]])
def test_outputs_that_are_no_numbers_are_refused(outputs):
    with pytest.raises(InvalidInputError, match="NaN or infinite"):
        choose_distance(outputs, "auto", 9)


def test_other_names_and_outputs_are_refused():
    with pytest.raises(
        InvalidSettingError, match=r"distance: found 'cosine'\. Accepted: 'auto', 'divergence', 'squares'"
    ):
        choose_distance([LOGITS], "cosine", 9)
    with pytest.raises(InvalidSettingError, match=r"'divergence' is for one output .*\(50, 3\), \(50, 3\)"):
        choose_distance([LOGITS, LOGITS], "divergence", 9)


@dataclass
class Parts:
    one: torch.Tensor
    count: torch.Tensor
    two: tuple[torch.Tensor, ...]


def test_a_function_is_given_outputs_as_the_model_gives_them():
    def compare(found, wanted):
        assert found.count is None
        return (found.one - wanted.one).abs().mean() + (found.two[0] - wanted.two[0]).abs().mean()

    like = Parts(LOGITS[:2], torch.ones(2, dtype=torch.int64), (LOGITS[:2],))
    found = choose_distance(like, compare, 9)
    assert float(found.measure([LOGITS, LOGITS], [LOGITS + 1, LOGITS + 2])) == pytest.approx(3.0)
    outputs = [LOGITS.clone().requires_grad_() for _ in range(2)]
    slopes = torch.autograd.grad(found.probe(outputs, 1.0, torch.Generator().manual_seed(0)), outputs)
    assert all(bool((slope.abs() == 1).all()) for slope in slopes)  # no curvature: all count alike


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda found, wanted: 1.0, "the function gives float"),
        (lambda found, wanted: found[0] - wanted[0], r"the function gives shape \(50, 3\)"),
        (lambda found, wanted: found["boxes"], "the function fails on the outputs: list indices"),
    ],
)
def test_a_function_that_gives_no_distance(function, said):
    with pytest.raises(InvalidSettingError, match=said):
        choose_distance([LOGITS], function, 9)


def test_a_norm_has_no_curvature_where_outputs_are_equal():
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    distance = choose_distance(outputs, lambda found, wanted: (found - wanted).norm(dim=1), 10)
    probed = distance.probe([outputs], 1.0, torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(probed, outputs)
    assert torch.equal(slope.abs(), torch.ones_like(slope))

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.differences import compare_outputs
from critical_neurons.removal.rows import find_tensors
from tests.any_models import ANY, build_any, make_inputs, run

TOLERANCE = 1e-6

ROWS = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))


class Give(nn.Module):
    """Whatever a function makes of the inputs."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@dataclass
class Pair:
    one: Tensor
    other: Tensor


def compare(make, other, inputs=ROWS, **settings):
    return compare_outputs(Give(make), Give(other), inputs, **settings)


@pytest.mark.parametrize("batch_size", [1, 3, 512])
def test_difference_by_hand(batch_size):
    """Far from zero, so that a sum of squares without the mean would lose all digits."""
    found = compare(lambda x: x + 1e6, lambda x: x + 1e6 + 0.5, ROWS.double(), batch_size=batch_size)
    exact = ROWS.double() + 1e6
    assert found.difference == pytest.approx(0.5 / float(exact.std(correction=0)), rel=TOLERANCE)


@pytest.mark.parametrize("wrap", [lambda *each: each, lambda *each: {"a": [each[0]], "b": each[1]}, Pair])
def test_several_outputs_count_together_each_about_its_own_mean(wrap):
    found = compare(lambda x: wrap(x, 3 * x + 5), lambda x: wrap(x, 3 * x + 6))
    spread = (1 + 9) * float(ROWS.var(correction=0))
    assert found.difference == pytest.approx((1 / spread) ** 0.5, rel=TOLERANCE)
    assert found.predictions is None


@pytest.mark.parametrize("name", ANY)
def test_any_model(name):
    model, inputs = build_any(name), make_inputs(name)
    assert compare_outputs(model, model, inputs, batch_size=4).difference == 0
    other = build_any(name, seed=1)
    found = compare_outputs(model, other, inputs, batch_size=4)
    one, two = (list(find_tensors(run(each, inputs))) for each in (model, other))
    squares = sum(float((b - a).double().square().sum()) for a, b in zip(one, two, strict=True))
    spread = sum(float((a - a.mean()).double().square().sum()) for a in one)
    assert found.difference == pytest.approx((squares / spread) ** 0.5, rel=1e-4)
    assert (found.predictions is not None) == (name in ("two inputs", "grouped"))


def test_predictions_need_one_output_of_several_classes():
    found = compare(lambda x: x, lambda x: {"logits": -x})
    assert [each.tolist() for each in found.predictions] == [ROWS.argmax(1).tolist(), ROWS.argmin(1).tolist()]
    assert compare(lambda x: x[:, :1], lambda x: x[:, :1]).predictions is None
    assert compare(lambda x: x.mT, lambda x: x.mT).predictions is None  # not one row for every input


def test_random_numbers_are_the_same():
    before = torch.random.get_rng_state()
    noisy = Give(lambda x: x + torch.randn_like(x))
    assert compare_outputs(noisy, noisy, ROWS).difference == 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "other", "reason"),
    [
        (lambda x: x[x[:, 0] > 0], lambda x: x[x[:, 0] > 1], "different numbers of results"),
        (lambda x: x.argmax(1), lambda x: x.argmin(1), "hold no floating-point numbers"),
        (lambda x: 0 * x, lambda x: x, "all alike, or not finite"),
        (lambda x: x, lambda x: x / 0, "all alike, or not finite"),
    ],
)
def test_what_cannot_be_compared_is_said(make, other, reason):
    found = compare(make, other)
    assert found.difference is None
    assert reason in found.reason


def test_models_that_do_not_match():
    with pytest.raises(InvalidInputError, match=r"smaller: it gives outputs \(7, 2\), the model \(7, 4\)"):
        compare(lambda x: x, lambda x: x[:, :2])
    with pytest.raises(InvalidInputError, match=r"smaller: it gives outputs no tensor, the model \(7, 4\)"):
        compare(lambda x: x, lambda x: None)


def test_models_stay_as_they_are():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    assert compare_outputs(model, model, ROWS).difference == 0
    assert model[0].training
    assert int(model[1].num_batches_tracked) == 0

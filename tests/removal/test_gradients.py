"""Models that change in place what their gradient needs are searched like others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import critical_neurons as cn
from critical_neurons.removal.gradients import differentiate


class InPlace(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.inplace = inplace

    def forward(self, x):
        x = F.relu(F.relu(self.first(x)), inplace=self.inplace)
        return self.last(F.relu(F.relu(self.second(x)), inplace=self.inplace))


@pytest.mark.parametrize("effort", ["quick", "standard"])
def test_scores_are_those_of_the_same_model_out_of_place(effort):
    inputs = torch.rand(16, 4)
    one, other = (cn.search(InPlace(each), inputs, units=0.5, effort=effort) for each in (True, False))
    assert (one.per_unit == other.per_unit).all()


def test_distillation_trains_it():
    inputs = torch.rand(16, 4)
    plan = cn.plan(cn.search(InPlace(), inputs, units=0.5, effort="quick"))
    way = cn.Distillation(steps=3, learning_rate=1e-3)
    one, other = (cn.prune(InPlace(each), plan, inputs, compensate=way) for each in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_other_errors_are_not_hidden():
    def fail():
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        differentiate(fail)

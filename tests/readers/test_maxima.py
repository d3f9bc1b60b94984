"""Maxima: pools of values of any sign, and comparisons, written with ReLUs, are what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from critical_neurons.core.network import MaxPool
from critical_neurons.readers import read_network

ROUNDING = 1e-12

POOLS = {
    "pairs": nn.MaxPool2d(2),
    "three by three, padded": nn.MaxPool2d(3, stride=1, padding=1),
    "five elements, rounded up": nn.MaxPool2d((5, 1), stride=2, ceil_mode=True),
    "of all": nn.AdaptiveMaxPool2d(1),
    "of one element": nn.MaxPool2d(1, stride=2),
}


@pytest.mark.parametrize("name", POOLS)
def test_max_pools_of_values_of_any_sign(name):
    torch.manual_seed(0)
    inputs = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    features = POOLS[name](torch.zeros(1, 2, 4, 4)).numel()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), POOLS[name], nn.Flatten(), nn.Linear(features, 2)).double()
    nn.init.constant_(model[0].bias, -1.5)  # most windows hold negative numbers alone
    network = read_network(model, inputs)
    assert not any(isinstance(op, MaxPool) for op in network.ops)
    with torch.no_grad():
        assert model[:2](inputs).min() < 0
        assert np.abs(network.forward(inputs.numpy()) - model(inputs).numpy()).max() <= ROUNDING


class Bent(nn.Module):
    def __init__(self, function, features=4):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(features, 2)
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.one(x), self.other(x)))


FUNCTIONS = {
    "maximum": torch.maximum,
    "minimum": lambda a, b: a.minimum(b),
    "max of two": lambda a, b: torch.max(a, b),
    "difference": lambda a, b: a - b,
    "maximum with zeros": lambda a, b: torch.maximum(torch.zeros_like(a), a) + b,
    "leaky relu": lambda a, b: F.leaky_relu(a, 0.3) + b,
    "prelu": lambda a, b: F.prelu(a, torch.tensor([0.1, -0.2, 2.0, 1.0], dtype=torch.float64)) + b,
    "absolute value": lambda a, b: torch.abs(a) + b,
    "hardtanh": lambda a, b: F.hardtanh(a, -0.2, 0.4) + b,
    "clamp from above": lambda a, b: a.clamp(max=0.1) + b,
    "clamp from below": lambda a, b: a.clamp(min=-0.1) + b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_piecewise_linear_functions(name):
    torch.manual_seed(0)
    inputs = torch.randn(20, 3, dtype=torch.float64)
    model = Bent(FUNCTIONS[name]).double().eval()
    network = read_network(model, inputs)
    with torch.no_grad():
        assert np.abs(network.forward(inputs.numpy()) - model(inputs).numpy()).max() <= ROUNDING

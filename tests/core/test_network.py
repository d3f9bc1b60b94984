"""Network: the sizes of kernels that a group is known by."""

from __future__ import annotations

import torch
from torch import nn

from critical_neurons.readers import read_network


def test_kernels_of_groups():
    """A linear layer has 1, and so has a convolution with a single output position."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, (3, 2)), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    )
    network = read_network(model, torch.rand(2, 1, 4, 3))
    assert network.group_sizes == (2, 3, 4)
    assert network.kernels == (6, 1, 1)

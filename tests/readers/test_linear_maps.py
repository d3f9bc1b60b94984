"""Linear maps: what does not depend on how a batch is cut."""

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.readers import linear_maps, read_network


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_convolution_of_many_data_points_in_pieces(count, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4)).double()
    inputs = torch.rand(5, 2, 6, 6, dtype=torch.float64)
    network = read_network(model, inputs)
    given = inputs[:count].numpy().copy()
    whole = network.forward(given)
    monkeypatch.setattr(linear_maps, "AT_ONCE", 2)
    assert np.allclose(network.forward(given), whole, rtol=1e-12)
    assert np.allclose(whole, model(inputs[:count]).detach().numpy(), rtol=1e-12)
    assert np.array_equal(given, inputs[:count].numpy())

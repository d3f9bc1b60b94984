"""Unusual wirings: how much can be removed, and that the smaller network gives what the masked one does."""

from __future__ import annotations

import pytest
import torch

from tests.structure.checks import inspect_twice, train_looks
from tests.structure.odd_networks import NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_odd_network(name):
    build, inputs, units = NETWORKS[name]
    torch.manual_seed(0)
    structure = inspect_twice(train_looks(build()), inputs, seeds=2)
    assert structure.unit_count == units, str(structure)

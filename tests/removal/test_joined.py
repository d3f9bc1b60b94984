"""Tensors that are joined in memory or in a file, and those that cannot be."""

from __future__ import annotations

import pytest
import torch

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal import joined

PARTS = [torch.arange(6.0).reshape(3, 2), torch.ones(1, 2), torch.zeros(2, 2)]


def join(parts):
    all_of_them = joined.Joined()
    for part in parts:
        all_of_them.add(part)
    return all_of_them.finish()


@pytest.mark.parametrize("most", [joined.MOST_BYTES, 30, 0])
def test_the_same_wherever_they_are_kept(most, monkeypatch):
    monkeypatch.setattr(joined, "MOST_BYTES", most)
    assert torch.equal(join(PARTS), torch.cat(PARTS))


def test_batches_of_two_types():
    with pytest.raises(InvalidInputError, match=r"found batches of torch\.float32 and torch\.int64"):
        join([PARTS[0], PARTS[1].long()])

"""Runs draw the same random numbers every time, and what comes after them is as if they had not been."""

import torch
from torch import nn

from critical_neurons.removal.seeding import seeded


def test_the_same_numbers_and_none_taken():
    model = nn.Linear(2, 2)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    drawn = []
    for _ in range(2):
        with seeded(0, model):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(torch.rand(3), wanted)


def test_generators_of_gpus_without_the_model_are_left_alone(monkeypatch):
    def fail(*_):
        raise AssertionError("all GPUs are seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    with seeded(0, nn.Linear(2, 2)):
        pass

import torch
from torch import nn

import critical_neurons as cn


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ).eval()


torch.manual_seed(0)
model = make_model()  # stands for a trained network
inputs, labels = torch.rand(60, 1, 6, 6), torch.arange(60) % 3
test_inputs, test_labels = torch.rand(60, 1, 6, 6), torch.arange(60) % 3

plan = cn.plan(cn.search(model, inputs, units=0.5, effort="quick"))
smaller = cn.prune(model, plan, inputs, compensate="least_squares")

"""Measuring: how large a model is and how often it is right."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def measure_accuracy(model: nn.Module, inputs: Tensor, labels: Tensor, *, batch_size: int = 512) -> float:
    """Share of data points whose highest output is their label, in evaluation mode. The mode is put back."""
    parameter = next(model.parameters(), inputs)
    inputs, labels = inputs.to(parameter), labels.to(parameter.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            right = sum(
                int((model(inputs[at : at + batch_size]).argmax(dim=1) == labels[at : at + batch_size]).sum())
                for at in range(0, len(inputs), batch_size)
            )
    finally:
        for module, training in modes.items():
            module.training = training
    return right / len(inputs)

"""Rows times the matrix of a module's weights are what the module itself gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from critical_neurons.removal.refit.im2col import (
    by_group,
    channels_first,
    count_groups,
    from_matrix,
    to_matrix,
    unroll,
)

SAME = 1e-12

MODULES = {
    "linear": (lambda: nn.Linear(6, 5), (6,)),
    "linear on three axes": (lambda: nn.Linear(6, 5), (4, 6)),
    "linear on four axes, no bias": (lambda: nn.Linear(6, 5, bias=False), (3, 4, 6)),
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (4, 11)),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (4, 8, 7)),
    "3d": (lambda: nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 2)), (4, 4, 6, 5)),
    "same": (lambda: nn.Conv2d(4, 6, (2, 3), dilation=(3, 1), padding="same"), (4, 8, 7)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (4, 8, 7)),
    "reflected": (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"), (4, 8, 7)),
    "replicated, 3d": (lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="replicate"), (4, 4, 5, 3)),
    "circular, same": (lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="circular"), (4, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, stride=2), (4, 7, 6)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 4, stride=3, padding=2, output_padding=1), (4, 5)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(0, 1), output_padding=(1, 2)),
        (4, 5, 4),
    ),
    "transposed, dilated": (lambda: nn.ConvTranspose2d(4, 6, 3, dilation=(2, 1), stride=2, bias=False), (4, 3, 4)),
    "transposed, padded beyond the kernel": (lambda: nn.ConvTranspose1d(4, 6, 2, stride=2, padding=3), (4, 7)),
    "transposed, grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 3, 4)),
    "transposed, depthwise": (lambda: nn.ConvTranspose1d(4, 8, 3, stride=2, groups=4), (4, 6)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 6, (2, 3, 2), stride=2, padding=1), (4, 3, 4, 3)),
}


def multiply(module, inputs, outputs, sizes=None):
    """The output at some of the positions, out of order, as (groups, rows, outputs); and the same by rows."""
    groups, wanted = count_groups(module), channels_first(module, outputs)
    positions = torch.randperm(wanted.shape[2])[: max(1, wanted.shape[2] // 2)]
    rows = by_group(unroll(module, inputs, positions, sizes), groups)
    bias = 0.0 if module.bias is None else module.bias.reshape(groups, 1, -1)
    return by_group(wanted[:, :, None, positions], groups), rows @ to_matrix(module, module.weight) + bias


@pytest.mark.parametrize("name", MODULES)
def test_rows_times_weights_are_the_output(name):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, inputs = make().double().requires_grad_(False), torch.randn(3, *shape, dtype=torch.float64)
    wanted, found = multiply(module, inputs, module(inputs))
    assert wanted.numel()
    assert (wanted - found).abs().max() <= SAME
    assert torch.equal(from_matrix(module, to_matrix(module, module.weight)), module.weight)


@pytest.mark.parametrize("sizes", [(9, 12), (10, 13), (10, 14)], ids=str)
def test_a_transposed_convolution_may_be_asked_for_a_size(sizes):
    module = nn.ConvTranspose2d(2, 3, 3, stride=(2, 3)).double().requires_grad_(False)
    inputs = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    wanted, found = multiply(module, inputs, module(inputs, output_size=sizes), sizes)
    assert (wanted - found).abs().max() <= SAME

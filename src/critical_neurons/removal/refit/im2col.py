"""What a linear layer or convolution multiplies with its weights, as rows of a matrix."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d


def unroll(module: nn.Linear | Convolution, inputs: Tensor, positions: Tensor) -> Tensor:
    """What the module multiplies with its weights: (batch, inputs, kernel, positions)."""
    if isinstance(module, nn.Linear):
        return inputs[:, :, None, None]
    padded = functional.pad(inputs, _padding(module)).contiguous()
    stride, dilation, kernel = module.stride, module.dilation, module.kernel_size
    counts = [
        (size - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis, size in enumerate(padded.shape[2:])
    ]
    steps = padded.stride()[2:]
    windows = padded.as_strided(
        (*padded.shape[:2], *kernel, *counts),
        (
            *padded.stride()[:2],
            *(step * each for step, each in zip(steps, dilation, strict=True)),
            *(step * each for step, each in zip(steps, stride, strict=True)),
        ),
    )
    index: tuple[Any, ...] = (..., *torch.unravel_index(positions, counts))
    return windows[index].flatten(2, -2)


def _padding(module: Convolution) -> list[int]:
    """Zeros at both ends of every axis of positions, the last axis first, as `pad` wants it."""
    if module.padding == "valid":
        return [0] * (2 * len(module.kernel_size))
    if module.padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
        ends = [(total // 2, total - total // 2) for total in totals]
    else:
        ends = [(int(size), int(size)) for size in module.padding]
    return [zeros for pair in reversed(ends) for zeros in pair]


def by_group(values: Tensor, groups: int) -> Tensor:
    """(batch, channels, kernel, positions) to (groups, batch * positions, channels of a group * kernel)."""
    batch, _, _, positions = values.shape
    dealt = values.reshape(batch, groups, -1, positions).permute(1, 0, 3, 2)
    return dealt.reshape(groups, batch * positions, -1)

"""im2col: the inputs of a linear layer or convolution as rows of a matrix that multiplies its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Weighted: TypeAlias = nn.Linear | Convolution | Transposed


def unroll(module: Weighted, inputs: Tensor, positions: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """The values under the kernel at some positions of the output: (batch, inputs, kernel, positions).

    `positions` are flat indices over the output's axes other than batch and channels. `sizes`: the output size of a
    transposed convolution, if the call asked for another than the default.
    """
    match module:
        case nn.Linear():
            count = math.prod(inputs.shape[1:-1])  # -1 would be ambiguous without features
            return inputs.reshape(len(inputs), count, inputs.shape[-1])[:, positions].mT[:, :, None]
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            values, stride = _insert_zeros(module, inputs, sizes), (1,) * len(module.kernel_size)
            return _take_windows(values, positions, module, stride, [0] * (2 * len(stride))).flip(2)
        case _:
            around = _padding(module)
            if module.padding_mode != "zeros":
                inputs, around = functional.pad(inputs, around, module.padding_mode), [0] * len(around)
            return _take_windows(inputs, positions, module, module.stride, around)


def _take_windows(
    values: Tensor, positions: Tensor, module: Convolution | Transposed, stride: Sequence[int], around: Sequence[int]
) -> Tensor:
    """Windows at some positions, as if the values were zero-padded. Padding explicitly would cost more, since usually
    only few positions are needed."""
    sizes, kernel, dilation = values.shape[2:], module.kernel_size, module.dilation
    before, ends = around[-2::-2], around[::-2]
    counts = [
        (size + first + last - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis, (size, first, last) in enumerate(zip(sizes, before, ends, strict=True))
    ]
    steps = _split_places(torch.arange(math.prod(kernel), device=positions.device), kernel)
    places = torch.zeros(math.prod(kernel), len(positions), dtype=torch.long, device=positions.device)
    inside = torch.ones_like(places, dtype=torch.bool)
    for axis, place in enumerate(_split_places(positions, counts)):
        at = steps[axis][:, None] * dilation[axis] + place * stride[axis] - before[axis]
        inside &= (at >= 0) & (at < sizes[axis])
        places = places * sizes[axis] + at
    rows = values.flatten(2).index_select(2, torch.where(inside, places, 0).flatten())
    return rows.reshape(*rows.shape[:2], *places.shape).masked_fill_(~inside, 0)


def _split_places(positions: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """`torch.unravel_index`, without its slow import of SymPy."""
    places: list[Tensor] = []
    for count in reversed(counts):
        places.insert(0, positions % count)
        positions = positions // count
    return places


def _padding(module: Convolution) -> list[int]:
    """The padding at both ends of every axis, in the order of `functional.pad`."""
    if module.padding == "valid":
        return [0] * (2 * len(module.kernel_size))
    if module.padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
        ends = [(total // 2, total - total // 2) for total in totals]
    else:
        ends = [(int(size), int(size)) for size in module.padding]
    return [width for pair in reversed(ends) for width in pair]


def _insert_zeros(module: Transposed, inputs: Tensor, sizes: Sequence[int] | None) -> Tensor:
    """Padded inputs on which the flipped kernel with stride 1 computes the transposed convolution.

    y[p] = Σ_k w[k] z[p + padding - dilation k], z the inputs with stride - 1 zeros between any two.
    """
    stride, reach = module.stride, [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    spread = inputs.new_zeros(
        *inputs.shape[:2], *((size - 1) * step + 1 for size, step in zip(inputs.shape[2:], stride, strict=True))
    )
    places: tuple[Any, ...] = (..., *(slice(None, None, step) for step in stride))
    spread[places] = inputs
    widths: list[int] = []
    for axis in reversed(range(len(stride))):
        before = reach[axis] - int(module.padding[axis])
        length = spread.shape[2 + axis]
        size = length + before - int(module.padding[axis]) + module.output_padding[axis]
        if sizes is not None:
            size = sizes[axis]
        widths += [before, size + reach[axis] - before - length]
    return functional.pad(spread, widths).contiguous()


def by_group(values: Tensor, groups: int) -> Tensor:
    """(batch, channels, kernel, positions) to (groups, batch * positions, channels of a group * kernel)."""
    batch, _, _, positions = values.shape
    dealt = values.reshape(batch, groups, -1, positions).permute(1, 0, 3, 2)
    return dealt.reshape(groups, batch * positions, -1)


def count_groups(module: Weighted) -> int:
    return 1 if isinstance(module, nn.Linear) else module.groups


def to_matrix(module: Weighted, weight: Tensor) -> Tensor:
    """A weight of the module to (groups, columns, outputs): rows of `by_group` times it are outputs without bias."""
    groups = count_groups(module)
    if isinstance(module, Transposed):  # (inputs, outputs of a group, ...)
        inputs, outputs = weight.shape[0] // groups, weight.shape[1]
        return weight.reshape(groups, inputs, outputs, -1).permute(0, 1, 3, 2).reshape(groups, -1, outputs)
    return weight.reshape(groups, weight.shape[0] // groups, -1).mT


def from_matrix(module: Weighted, matrix: Tensor) -> Tensor:
    """The inverse of `to_matrix`."""
    shape = module.weight.shape
    if isinstance(module, Transposed):
        groups, _, outputs = matrix.shape
        return matrix.reshape(groups, shape[0] // groups, -1, outputs).permute(0, 1, 3, 2).reshape(shape)
    return matrix.mT.reshape(shape)


def find_channel_axis(module: nn.Module, values: Tensor) -> int:
    """The channel axis of a module's input or output."""
    match module:
        case nn.Linear():
            return values.ndim - 1
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
            return 1
        case _:
            assert isinstance(module, Convolution | Transposed)
            return values.ndim - len(module.kernel_size) - 1


def add_batch_axis(module: nn.Module, values: Tensor) -> Tensor:
    """Add the batch axis that linear layers and convolutions allow to omit."""
    return values[None] if find_channel_axis(module, values) == 0 else values


def channels_first(module: nn.Module, values: Tensor) -> Tensor:
    """A module's input or output as (batch, channels, positions)."""
    values = add_batch_axis(module, values)
    moved = values.movedim(find_channel_axis(module, values), 1)
    return moved.flatten(2) if moved.ndim > 2 else moved[:, :, None]

"""Winograd: 3x3 convolutions with a quarter of the multiplications, for training on a CPU.

A convolution of small tiles becomes a product of transformed tiles, entry by entry, and the sums over channels become
matrix products. The tile's transform is saved for the gradient of the weights, which torch's own CPU kernels spend
most of a training on. Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

KERNEL = 3

TRANSFORMS: Mapping[int, tuple[list[list[float]], list[list[float]], list[list[float]]]] = {
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
}
"""By the side of an output tile: the transforms of a line of inputs, of weights, and back to outputs."""

LEAST_CHANNELS = 128
"""With fewer input channels the transforms cost more than they save. Half as many suffice where the gradient of the
weights uses them again."""


class FastConvolutions(TorchFunctionMode):
    """A context in which convolutions that suit are computed by Winograd's method, with gradients; the others, and
    all functions but `conv2d`, as always. It holds for one thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.conv2d and not kwargs and _suits(*args):
            return _WinogradConvolution.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _suits(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | int = 1,
    padding: Sequence[int] | int | str = 0,
    dilation: Sequence[int] | int = 1,
    groups: int = 1,
) -> bool:
    least = LEAST_CHANNELS // 2 if weight.requires_grad and torch.is_grad_enabled() else LEAST_CHANNELS
    return (
        inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.ndim == 4
        and weight.shape[2:] == (KERNEL, KERNEL)
        and weight.shape[1] >= least
        and (stride, padding, dilation, groups) == ((1, 1), (1, 1), (1, 1), 1)
        and all(side % min(TRANSFORMS) == 0 for side in inputs.shape[2:])
    )


class _WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        side = max(side for side in TRANSFORMS if all(each % side == 0 for each in inputs.shape[2:]))
        tiles = _transform_inputs(inputs, side)
        ctx.save_for_backward(tiles, weight)
        ctx.side = side
        outputs = _multiply(tiles, weight, inputs.shape, side)
        return outputs if bias is None else outputs.add_(bias[:, None, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tiles, weight = ctx.saved_tensors
        by_inputs = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            flipped = weight.flip(2, 3).transpose(0, 1)
            by_inputs = _multiply(_transform_inputs(gradient, ctx.side), flipped, gradient.shape, ctx.side)
        if ctx.needs_input_grad[1]:
            by_weight = _sum_over_tiles(tiles, _transform_back(gradient, ctx.side), ctx.side)
        if ctx.needs_input_grad[2]:
            by_bias = gradient.sum((0, 2, 3))
        return by_inputs, by_weight, by_bias


@lru_cache
def _matrices(side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transforms of tiles, as one matrix each: those of lines, by rows and by columns."""
    of_inputs, of_weights, of_outputs = (torch.tensor(lines, dtype=torch.float32) for lines in TRANSFORMS[side])
    return torch.kron(of_inputs, of_inputs), torch.kron(of_weights, of_weights), torch.kron(of_outputs, of_outputs)


def _transform_inputs(inputs: Tensor, side: int) -> Tensor:
    """Overlapping tiles with a border of one, transformed: entry of the tile, tile, channel."""
    count, channels, height, width = inputs.shape
    padded = functional.pad(inputs, (1,) * 4).permute(0, 2, 3, 1).contiguous()
    image, row, column, _ = padded.stride()
    reach = side + KERNEL - 1
    tiles = padded.as_strided(
        (reach, reach, count, height // side, width // side, channels),
        (row, column, image, side * row, side * column, 1),
    )
    return (_matrices(side)[0] @ tiles.reshape(reach**2, -1)).view(reach**2, -1, channels)


def _multiply(tiles: Tensor, weight: Tensor, shape: torch.Size, side: int) -> Tensor:
    """Outputs of a convolution from its transformed inputs; `shape` is that of the inputs."""
    _, of_weights, of_outputs = _matrices(side)
    outputs, channels = weight.shape[:2]
    kernels = (of_weights @ weight.permute(2, 3, 1, 0).reshape(KERNEL**2, -1)).view(-1, channels, outputs)
    values = of_outputs @ torch.bmm(tiles, kernels).view(len(kernels), -1)
    count, _, height, width = shape
    grid = values.view(side, side, count, height // side, width // side, outputs).permute(2, 3, 0, 4, 1, 5)
    return grid.reshape(count, height, width, outputs).permute(0, 3, 1, 2)


def _transform_back(gradient: Tensor, side: int) -> Tensor:
    """The gradient of the products from that of the outputs: the transposed transform, tile by tile."""
    count, channels, height, width = gradient.shape
    grid = gradient.permute(0, 2, 3, 1).reshape(count, height // side, side, width // side, side, channels)
    tiles = grid.permute(2, 4, 0, 1, 3, 5).reshape(side**2, -1)
    return (_matrices(side)[2].T @ tiles).view(-1, count * (height // side) * (width // side), channels)


def _sum_over_tiles(tiles: Tensor, gradients: Tensor, side: int) -> Tensor:
    """The gradient of the weights."""
    products = torch.bmm(tiles.transpose(1, 2), gradients)
    channels, outputs = products.shape[1:]
    summed = _matrices(side)[1].T @ products.view(len(products), -1)
    return summed.view(KERNEL, KERNEL, channels, outputs).permute(3, 2, 0, 1)

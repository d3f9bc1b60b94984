"""The built-in readers of calls that move elements: slices, permutations, shuffles.

The source of every output element is found by running the call on the indices of the input's elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critical_neurons.core.structure import Ints
from critical_neurons.readers.fx_nodes import DIVISIONS
from critical_neurons.readers.layers.reshaping import read_reshape
from critical_neurons.readers.registry import Reading, Rearranges, TracedCall, reads


@reads(torch.permute, "permute", torch.transpose, "transpose", torch.movedim, "movedim", torch.swapaxes, "swapaxes")
@reads(getattr)
def read_permutation(call: TracedCall) -> Reading:
    """Also x.mT: of what an attribute gives, all else is no tensor, or none of the same elements."""
    return Rearranges(find_elements(call))


@reads(operator.getitem)
def read_index(call: TracedCall) -> Reading:
    """Axes of size 1 may be dropped or added, as in x[:, :, 0, 0] and x[:, None]; others are sliced by index."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(part is None or part is ... or isinstance(part, int | slice) for part in index):
        raise call.refuse(f"an index {_describe(index)}", "Numbers, slices, ... and None are read.")
    if len(call.output) != len(call.input) or index[0] not in (slice(None), ...):
        raise call.refuse(
            f"it takes a part of {_batched(call)} along the batch axis", "Keep the first axis, as in x[:, 0]."
        )
    if call.output.numel() == call.input.numel():
        return read_reshape(call)
    return Rearranges(find_elements(call))


@reads(torch.narrow, "narrow", torch.select, "select", torch.flip, "flip")
def read_part(call: TracedCall) -> Reading:
    return Rearranges(find_elements(call))


@reads(*DIVISIONS)
def read_division(call: TracedCall) -> Reading:
    """One of the parts of a divided value, number `call.part`."""
    return Rearranges(find_elements(call))


@reads(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle)
def read_shuffle(call: TracedCall) -> Reading:
    return Rearranges(find_elements(call))


def find_elements(call: TracedCall) -> Ints:
    """The `elements` of `Rearranges`, by running the call on the numbers 1, 2, …; 0 marks padding."""
    batch, size = len(call.input), math.prod(call.input_shape)
    numbers = torch.arange(1, batch * size + 1, dtype=torch.float64).reshape(call.input.shape)
    moved = run_again(call, numbers)
    if len(moved) != batch:
        raise call.refuse(f"it turns {tuple(call.input.shape)} into {tuple(moved.shape)}", "Keep the first axis.")
    moved = moved.reshape(batch, *call.output_shape)
    first = torch.arange(batch).reshape(-1, *[1] * (moved.ndim - 1)) * size
    own = torch.where(moved == 0, 0, moved.long() - first)
    if (own != own[:1]).any() or (own < 0).any() or (own > size).any():
        raise call.refuse("it moves elements from one data point to another", "Keep the first axis.")
    elements: Ints = own[0].numpy() - 1
    return elements


def run_again(call: TracedCall, values: Tensor) -> Tensor:
    """The same call on other values of the same shape."""
    function: Callable[..., Any] = call.function
    if isinstance(function, str):
        function = getattr(torch.Tensor, function)
    result = function(values, *call.args[1:], **call.kwargs)
    moved: Tensor = result if call.part is None else result[call.part]
    return moved


def _describe(index: Iterable[Any]) -> str:
    kinds = (type(part).__name__.removeprefix("immutable_") for part in index)  # torch.fx has its own
    return f"of {', '.join(kinds)}"


def _batched(call: TracedCall) -> str:
    return f"(batch, {', '.join(map(str, call.input_shape))})"

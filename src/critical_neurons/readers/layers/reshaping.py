"""The built-in readers of calls that reshape."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from critical_neurons.readers.registry import Reading, Reshapes, TracedCall, reads


@reads(nn.Flatten, torch.flatten, "flatten", torch.unsqueeze, "unsqueeze")
def read_reshape(call: TracedCall) -> Reading:
    return _reshape(call)


@reads("view", "reshape", torch.reshape)
def read_view(call: TracedCall) -> Reading:
    return _reshape(call, _written(call, call.literal_sizes, "x.flatten(1)"))


@reads(nn.Unflatten, torch.unflatten, "unflatten")
def read_unflattening(call: TracedCall) -> Reading:
    module = call.module
    if isinstance(module, nn.Unflatten):
        axis, sizes = module.dim, module.unflattened_size
    else:
        axis, sizes = call.argument(1, "dim"), call.argument(2, "sizes")
    axis = axis % call.input.ndim
    if axis == 0:
        raise call.refuse("it divides the batch axis", "Only other axes are unflattened.")
    return _reshape(call, _written(call, (size for size in sizes if size > 1), "-1") if axis == 1 else "")


@reads(torch.squeeze, "squeeze")
def read_squeeze(call: TracedCall) -> Reading:
    dim = call.argument(1, "dim")
    axes = {axis % call.input.ndim for axis in ((dim,) if isinstance(dim, int) else dim or (0,))}
    if 0 in axes:
        raise call.refuse(
            "a squeeze that takes the batch axis away where it holds one data point",
            "Name the other axes, as in x.squeeze(-1), or write x.flatten(1).",
        )
    return _reshape(call, f"{call.name}, which takes the channels' axis away if one is left" if 1 in axes else "")


def _reshape(call: TracedCall, obstacle: str = "") -> Reading:
    if len(call.output) != len(call.input):
        raise call.refuse(
            f"it turns {tuple(call.input.shape)} into {tuple(call.output.shape)} and so changes the batch axis",
            "Keep the first axis, as x.flatten(1) does.",
        )
    return Reshapes(obstacle)


def _written(call: TracedCall, sizes: Iterable[int], instead: str) -> str:
    """Why channels must stay, if their number is written into the call."""
    found = ", ".join(map(str, sizes))
    return f"{call.name}, which has the size {found} written into it; write {instead}" if found else ""

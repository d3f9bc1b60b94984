"""The built-in readers of what gives the same elements another shape."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import nn

from critical_neurons.readers.registry import SINGLE_ADVICE, Call, Reading, Reshapes, reads


@reads(nn.Flatten, torch.flatten, "flatten", torch.unsqueeze, "unsqueeze")
def read_reshape(call: Call) -> Reading:
    return _reshape(call)


@reads("view", "reshape", torch.reshape)
def read_view(call: Call) -> Reading:
    return _reshape(call, _written(call, call.literal_sizes, "x.flatten(1)"))


@reads(nn.Unflatten, torch.unflatten, "unflatten")
def read_unflattening(call: Call) -> Reading:
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
def read_squeeze(call: Call) -> Reading:
    dim = call.argument(1, "dim")
    axes = {axis % call.input.ndim for axis in ((dim,) if isinstance(dim, int) else dim or (0,))}
    if 0 in axes:
        raise call.refuse(
            "a squeeze that takes the batch axis away where it holds one data point",
            "Name the other axes, as in x.squeeze(-1), or write x.flatten(1).",
        )
    return _reshape(call, f"{call.name}, which takes the channels' axis away if one is left" if 1 in axes else "")


@reads(operator.getitem)
def read_index(call: Call) -> Reading:
    """Axes of size 1 may go, and others come: x[:, :, 0, 0], x[:, None]."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    kept = (part is None or part is ... or isinstance(part, int) or _is_whole(part) for part in index)
    if not all(kept) or call.output.numel() != call.input.numel():
        raise call.refuse(
            f"it takes a part of (batch, {', '.join(map(str, call.input_shape))})",
            "Only axes of size 1 are taken away by an index, as in x[:, :, 0, 0].",
        )
    return _reshape(call)


def _reshape(call: Call, obstacle: str = "") -> Reading:
    if len(call.output) != len(call.input):
        raise call.refuse(
            f"it turns {tuple(call.input.shape)} into {tuple(call.output.shape)} and so changes the batch axis",
            "Keep the first axis, as x.flatten(1) does.",
        )
    if call.output.ndim == 1:
        raise call.refuse(
            f"it turns {tuple(call.input.shape)} into {tuple(call.output.shape)}",
            f"Logits of shape (batch, classes) are read. {SINGLE_ADVICE}",
        )
    return Reshapes(obstacle)


def _written(call: Call, sizes: Iterable[int], instead: str) -> str:
    """Why channels must stay whose number is written into the call, if it is."""
    found = ", ".join(map(str, sizes))
    return f"{call.name}, which has the size {found} written into it; write {instead}" if found else ""


def _is_whole(part: object) -> bool:
    return isinstance(part, slice) and part == slice(None)

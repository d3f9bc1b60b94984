"""Converters of reshapes, permutations, slices and calculations with shapes."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from critical_neurons.io.onnx_import.builder import Size, find_shape
from critical_neurons.io.onnx_import.converters import GraphStep, Sizes, Value, converts
from critical_neurons.io.onnx_import.elementwise import as_entries

FAR = 2**31 - 1
"""Values from here on mean the end of an axis."""

DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    11: torch.float64,
}
"""torch types by ONNX type number."""


@converts("Constant")
def convert_constant(step: GraphStep) -> Value:
    for name in ("value_float", "value_floats", "value_int", "value_ints"):
        if (numbers := step.attribute(name)) is not None:
            return torch.tensor(numbers, dtype=torch.float32 if "float" in name else torch.int64)
    if not isinstance(found := step.attribute("value"), Tensor):
        raise step.refuse("holds no dense tensor", "numbers and dense tensors")
    return found


@converts("ConstantOfShape")
def convert_filling(step: GraphStep) -> Value:
    value = step.attribute("value", torch.zeros(1))
    return step.call(torch.full, step.sizes(0), value.item(), dtype=value.dtype)


@converts("Shape")
def convert_shape(step: GraphStep) -> Value:
    value, chosen = step.input(), slice(step.attribute("start", 0), step.attribute("end"))
    if isinstance(value, Tensor):
        return torch.tensor(value.shape[chosen])
    axes = range(len(find_shape(value)))[chosen]
    return Sizes(_collect([step.builder.take_size(value, axis) for axis in axes]))


@converts("Cast")
def convert_cast(step: GraphStep) -> Value:
    dtype = DTYPES.get(step.attribute("to"))
    if dtype is None or (step.any_sizes() and dtype not in (torch.int32, torch.int64)):
        raise step.refuse("gives another type", "float32, float64, integers and bool; whole numbers of shapes")
    if isinstance(value := step.any(), Sizes):
        return value
    return step.call(torch.Tensor.to, value, dtype)


@converts("Flatten")
def convert_flattening(step: GraphStep) -> Value:
    axis = step.attribute("axis", 1)
    axis = axis + len(step.shape()) if axis < 0 else axis
    if axis != 1:
        raise step.refuse(f"merges {axis} axes into the batch", "axis 1, which leaves the batch alone")
    return step.activate(nn.Flatten())


@converts("Reshape")
def convert_reshape(step: GraphStep) -> Value:
    sizes = step.numbers(1, "shape")
    wanted: list[Size] = step.sizes(1) if step.has(1) else [*sizes]
    if step.any_sizes() and isinstance(step.any(0), Sizes):
        return Sizes(as_entries(step, 0).reshape(sizes))
    value, before = step.input(), step.shape()
    if not step.attribute("allowzero", 0):
        wanted = [_take(step, value, axis) if size == 0 else size for axis, size in enumerate(wanted)]
    after = find_shape(step.call(torch.reshape, value, wanted))
    if isinstance(value, Tensor):
        return step.call(torch.reshape, value, wanted)
    if after == before:
        return value
    if not before[0] == after[0] == step.builder.rows:
        return step.call(torch.reshape, value, wanted)
    if len(after) == 2:
        return step.call(torch.flatten, value, 1)
    return step.call(torch.reshape, value, _loosen(step, value, wanted, after))


def _loosen(step: GraphStep, value: fx.Node, wanted: list[Size], after: tuple[int, ...]) -> list[Size]:
    """The same sizes for any batch size and, if torch can infer it, any number of channels: the batch size is taken
    from the value, and -1 replaces the channels."""
    before = find_shape(value)
    loose = [
        size if isinstance(size, fx.Node) else number for size, number in zip(wanted[1:], after[1:], strict=True)
    ]
    axis = find_channels(before[1:], after[1:])
    if axis is not None and isinstance(loose[axis], int):
        loose[axis] = -1
    return [step.builder.take_size(value, 0), *loose]


def find_channels(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """The last of the new axes that the first old axis, possibly merged with others, is split into."""
    if 0 in before:
        return None
    for count in range(1, len(before) + 1):
        product = math.prod(before[:count])
        for axis in range(len(after)):
            if math.prod(after[: axis + 1]) == product:
                return axis
    return None


def _take(step: GraphStep, value: Any, axis: int) -> Size:
    if isinstance(value, fx.Node):
        return step.builder.take_size(value, axis)
    return int(value.shape[axis])


@converts("Expand")
def convert_expansion(step: GraphStep) -> Value:
    """Sizes of one in either shape are broadcast to the other's."""
    value, sizes = step.input(), step.sizes(1)
    new = len(sizes) - len(find_shape(value))  # axes that the value does not have; torch keeps a size by -1
    wanted = [-1 if size == 1 and place >= new else size for place, size in enumerate(sizes)]
    return step.call(torch.Tensor.expand, value, [-1] * -new + wanted)


@converts("Transpose")
def convert_transposition(step: GraphStep) -> Value:
    order = step.attribute("perm", tuple(reversed(range(len(step.shape())))))
    return step.call(torch.permute, step.input(), order)


@converts("Squeeze")
def convert_squeeze(step: GraphStep) -> Value:
    axes = step.numbers(1, "axes")
    if step.any_sizes():
        return Sizes(np.squeeze(as_entries(step, 0), axes))
    chosen = [axis for axis, size in enumerate(step.shape()) if size == 1] if axes is None else [*axes]
    return step.call(torch.squeeze, step.input(), chosen)


@converts("Unsqueeze")
def convert_unsqueeze(step: GraphStep) -> Value:
    axes = step.numbers(1, "axes", ())
    if step.any_sizes():
        return Sizes(np.expand_dims(as_entries(step, 0), axes))
    value = step.input()
    rank = len(find_shape(value)) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        value = step.call(torch.unsqueeze, value, axis)
    return value


@converts("Concat")
def convert_concatenation(step: GraphStep) -> Value:
    axis = step.attribute("axis", 0)
    if step.any_sizes():
        return Sizes(np.concatenate([as_entries(step, place) for place in range(len(step.node.inputs))], axis))
    return step.call(torch.cat, step.inputs(), axis)


@converts("Split")
def convert_split(step: GraphStep) -> Value | tuple[Value, ...]:
    axis, count = step.attribute("axis", 0), len(step.node.outputs)
    size = step.shape()[axis]
    each = math.ceil(size / count)
    sizes = step.numbers(1, "split") or tuple(min(each, size - each * place) for place in range(count))
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != size:
        raise step.refuse(f"divides {size} into {sizes}", f"{count} sizes that sum up to it")
    # Equal parts by their number, not their size, which falls with what is removed of every part.
    equal = len(set(sizes)) == 1
    divide, by = (torch.chunk, count) if equal else (torch.split, [*sizes])
    parts = step.builder.call(step.node.name, divide, step.input(), by, axis)
    if not isinstance(parts, fx.Node):
        return tuple(parts)
    return tuple(step.call(operator.getitem, parts, place) for place in range(count))


@converts("Slice")
def convert_slice(step: GraphStep) -> Value:
    starts, ends = (_find_ends(step, place, name) for place, name in ((1, "starts"), (2, "ends")))
    steps = step.numbers(4, "", (1,) * len(starts))
    source: Any = as_entries(step, 0) if isinstance(step.any(0), Sizes) else step.input()
    rank = source.ndim if isinstance(source, np.ndarray) else len(find_shape(source))
    axes = [axis % rank for axis in step.numbers(3, "axes", range(len(starts)))]
    if min(steps, default=1) < 1:
        raise step.refuse(f"takes elements in steps of {steps}", "steps above zero")
    chosen = [slice(None)] * rank
    for axis, first, last, stride in zip(axes, starts, ends, steps, strict=True):
        far = isinstance(last, int) and last >= FAR
        chosen[axis] = slice(first or None, None if far else last, stride if stride != 1 else None)
    index = tuple(chosen)
    if isinstance(source, np.ndarray):
        return Sizes(source[index])
    return step.call(operator.getitem, source, index)


def _find_ends(step: GraphStep, place: int, name: str) -> list[Size]:
    return step.sizes(place) if step.has(place) else [*step.attribute(name, ())]


@converts("Gather")
def convert_gather(step: GraphStep) -> Value:
    axis, numbers = step.attribute("axis", 0), step.constant(1)
    if isinstance(step.any(0), Sizes):
        result = as_entries(step, 0).take(numbers.numpy(), axis)
        return Sizes(result if isinstance(result, np.ndarray) else _collect(result))
    size = step.shape()[axis]
    index = torch.where(numbers < 0, numbers + size, numbers)
    if numbers.ndim == 0:
        return step.call(torch.select, step.input(), axis, int(index))
    if numbers.ndim > 1:
        raise step.refuse(f"takes elements by numbers of shape {tuple(numbers.shape)}", "one number or a list")
    return step.call(torch.index_select, step.input(), axis, index)


@converts("DepthToSpace", "SpaceToDepth")
def convert_shuffle(step: GraphStep) -> Value:
    """Blocks of positions to channels, and back; torch has the CRD order only."""
    side, value = step.attribute("blocksize"), step.computed()
    batch, call = step.builder.take_size(value, 0), step.call
    _, channels, rows, columns = find_shape(value)
    if step.node.operator == "DepthToSpace":
        if step.attribute("mode", "DCR") == "CRD":
            return step.module(nn.PixelShuffle(side))
        apart = call(torch.reshape, value, [batch, side, side, -1, rows, columns])
        moved = call(torch.permute, apart, (0, 3, 4, 1, 5, 2))
        return call(torch.reshape, moved, [batch, -1, rows * side, columns * side])
    apart = call(torch.reshape, value, [batch, channels, rows // side, side, columns // side, side])
    moved = call(torch.permute, apart, (0, 3, 5, 1, 2, 4))
    return call(torch.reshape, moved, [batch, -1, rows // side, columns // side])


def _collect(entries: Any) -> Any:
    """Integers and nodes as an object array, which numpy does not take apart."""
    result = np.empty(len(entries) if isinstance(entries, list) else (), dtype=object)
    result[...] = entries
    return result

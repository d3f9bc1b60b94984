"""ONNX file: parsed to a graph of plain data. Files are not trusted: nothing in them runs, and all sizes are
checked."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from critical_neurons.core.documents import check_file
from critical_neurons.errors import InvalidFileError, MissingExtraError, first_line

DOMAINS = ("", "ai.onnx")
"""Domains of the standard operators; others are named domain.operator here."""


@dataclass(frozen=True)
class OnnxNode:
    """One call. An omitted input is named ""."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class OnnxGraph:
    """A network with one input, whose open axes are None; `uses` counts the readers of each value."""

    path: Path
    opset: int
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Tensor]
    input: str
    input_shape: tuple[int | None, ...]
    dtype: torch.dtype
    outputs: tuple[str, ...]
    uses: Mapping[str, int]


def read_onnx(path: str | os.PathLike[str]) -> OnnxGraph:
    file = Path(path)
    model = _parse(file)
    graph = model.graph
    opsets = [each.version for each in model.opset_import if each.domain in DOMAINS]
    if not opsets or not graph.output:
        raise InvalidFileError(f"{file}: is no ONNX file, or a damaged one: it names no operators or no outputs.")
    named = [*graph.initializer, *graph.input, *graph.output]
    texts = [
        text for node in graph.node for text in (node.name, node.op_type, node.domain, *node.input, *node.output)
    ]
    if not all(
        isinstance(text, str) for text in (*texts, *(each.name for each in named))
    ):  # protobuf gives bytes then
        raise InvalidFileError(f"{file}: damaged: a name in it is no text.")
    if len(model.functions) or len(graph.sparse_initializer):
        found = "functions of its own" if len(model.functions) else "sparse weights"
        raise InvalidFileError(
            f"{file}: has {found}. Accepted: standard operators and dense weights. Functions are "
            "replaced by onnx.inliner.inline_local_functions."
        )
    constants = {each.name: _read_tensor(file, each) for each in graph.initializer}
    for name, values in constants.items():
        if values.is_floating_point() and not values.isfinite().all():
            raise InvalidFileError(f"{file}: the weight {_printable(name)} is NaN or infinite somewhere.")
    inputs = [each for each in graph.input if each.name not in constants]
    if len(inputs) != 1:
        names = ", ".join(repr(each.name) for each in inputs) or "none"
        raise InvalidFileError(f"{file}: has {len(inputs)} inputs ({names}). Accepted: networks with one.")
    shape, dtype = _read_input(file, inputs[0])
    nodes = tuple(_read_node(file, number, each) for number, each in enumerate(graph.node))
    outputs = tuple(each.name for each in graph.output)
    uses = Counter([*outputs, *(name for node in nodes for name in node.inputs)])
    _check_order(file, {*constants, inputs[0].name}, nodes, outputs)
    return OnnxGraph(file, max(opsets), nodes, constants, inputs[0].name, shape, dtype, outputs, uses)


def read_input_shape(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """The shape of one input, without the batch; None if the file leaves it open."""
    declared = read_onnx(path).input_shape[1:]
    shape = tuple(size for size in declared if size is not None)
    return shape if shape == declared else None


def _parse(file: Path) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    if not file.is_file():
        raise InvalidFileError(f"{file}: no such ONNX file.")
    check_file(file)
    try:
        return onnx.load_model_from_string(file.read_bytes())
    except Exception as error:  # protobuf's own, of several types
        raise InvalidFileError(
            f"{file}: is no ONNX file, or a damaged one ({first_line(error).rstrip('.')})."
        ) from error


def _read_input(file: Path, value: Any) -> tuple[tuple[int | None, ...], torch.dtype]:
    kinds = {1: torch.float32, 11: torch.float64}
    tensor = value.type.tensor_type
    if tensor.elem_type not in kinds or not tensor.HasField("shape") or len(tensor.shape.dim) < 2:
        raise InvalidFileError(
            f"{file}: its input {value.name!r} cannot be read. Accepted: a float32 or float64 tensor (batch, ...)."
        )
    shape = tuple(axis.dim_value if axis.dim_value > 0 else None for axis in tensor.shape.dim)
    return shape, kinds[tensor.elem_type]


def _read_node(file: Path, number: int, node: Any) -> OnnxNode:
    operator = node.op_type if node.domain in DOMAINS else f"{node.domain}.{node.op_type}"
    name = node.name or (node.output[0] if node.output else "") or f"node_{number}"
    attributes = {each.name: _read_attribute(file, each) for each in node.attribute}
    return OnnxNode(_printable(name), _printable(operator), tuple(node.input), tuple(node.output), attributes)


def _read_attribute(file: Path, attribute: Any) -> Any:
    """Numbers, texts, tensors and lists of the first two; None for others, such as graphs."""
    match attribute.type:
        case 1:
            return attribute.f
        case 2:
            return attribute.i
        case 3:
            return attribute.s.decode(errors="replace")
        case 4:
            return _read_tensor(file, attribute.t)
        case 6:
            return tuple(attribute.floats)
        case 7:
            return tuple(attribute.ints)
        case 8:
            return tuple(text.decode(errors="replace") for text in attribute.strings)
        case _:
            return None


def _read_tensor(file: Path, tensor: Any) -> Tensor:
    """The declared size is compared with the file before memory is allocated."""
    from onnx import TensorProto, numpy_helper

    kinds = {
        TensorProto.FLOAT: (torch.float32, "float_data"),
        TensorProto.DOUBLE: (torch.float64, "double_data"),
        TensorProto.FLOAT16: (torch.float16, "int32_data"),
        TensorProto.INT64: (torch.int64, "int64_data"),
        TensorProto.INT32: (torch.int32, "int32_data"),
        TensorProto.INT8: (torch.int8, "int32_data"),
        TensorProto.UINT8: (torch.uint8, "int32_data"),
        TensorProto.BOOL: (torch.bool, "int32_data"),
    }
    where = f"{file}: the tensor {tensor.name!r}"
    if tensor.data_type not in kinds:
        raise InvalidFileError(f"{where} is of type {tensor.data_type}. Accepted: floats, int64, int32, int8, bool.")
    dtype, field = kinds[tensor.data_type]
    sizes = tuple(tensor.dims)
    if any(size < 0 for size in sizes):
        raise InvalidFileError(f"{where} has the shape {sizes}: sizes are zero or more.")
    count = math.prod(sizes)
    if tensor.data_location == TensorProto.EXTERNAL:
        content = _read_external(where, file, tensor, count * dtype.itemsize)
        return torch.frombuffer(content, dtype=dtype).reshape(sizes) if count else torch.empty(sizes, dtype=dtype)
    if tensor.HasField("raw_data"):
        found, expected, unit = len(tensor.raw_data), count * dtype.itemsize, "bytes"
    else:
        found, expected, unit = len(getattr(tensor, field)), count, "numbers"
    if found != expected:
        raise InvalidFileError(f"{where} of shape {sizes} needs {expected:,} {unit}; the file holds {found:,}.")
    return torch.from_numpy(numpy_helper.to_array(tensor).copy())


def _read_external(where: str, file: Path, tensor: Any, expected: int) -> bytearray:
    """Weights in a separate file, which must be in the folder of the ONNX file."""
    entries = {each.key: each.value for each in tensor.external_data}
    folder = file.parent.resolve()
    try:
        place = (folder / entries.get("location", "")).resolve()
        if not place.is_relative_to(folder) or not place.is_file():
            raise InvalidFileError(
                f"{where} lies in {entries.get('location')!r}. Accepted: a file in the folder of the ONNX file."
            )
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
        if offset < 0 or length != expected or offset + length > place.stat().st_size:
            raise InvalidFileError(
                f"{where} needs {expected:,} bytes; {length:,} are said to begin at {offset:,} of {place.name}, "
                f"which holds {place.stat().st_size:,}."
            )
        with place.open("rb") as data:
            data.seek(offset)
            return bytearray(data.read(length))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, InvalidFileError):
            raise
        raise InvalidFileError(f"{where}: its data cannot be read ({first_line(error).rstrip('.')}).") from error


def _check_order(file: Path, known: set[str], nodes: tuple[OnnxNode, ...], outputs: tuple[str, ...]) -> None:
    for node in nodes:
        missing = [name for name in node.inputs if name and name not in known]
        again = [name for name in node.outputs if name in known]
        if missing or again:
            what = (
                f"reads {missing[0]!r}, which nothing before it gives" if missing else f"gives {again[0]!r} once more"
            )
            raise InvalidFileError(f"{file}: damaged: {node.name} ({node.operator}) {what}.")
        known |= set(node.outputs) - {""}
    for name in outputs:
        if name not in known:
            raise InvalidFileError(f"{file}: damaged: nothing gives its output {name!r}.")


def _printable(name: str) -> str:
    """Names appear in messages, and terminals interpret some characters."""
    return "".join(each if each.isprintable() else "?" for each in name)

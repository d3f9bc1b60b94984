"""Conversion: an ONNX graph to a `torch.fx.GraphModule`, compared with onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from critical_neurons.errors import (
    ConversionError,
    CriticalNeuronsError,
    ExportError,
    InvalidInputError,
    first_line,
)
from critical_neurons.io.exporters import ONNX_NAMES
from critical_neurons.io.onnx_import import elementwise, layers, shapes, windows  # noqa: F401  register converters
from critical_neurons.io.onnx_import.builder import Builder
from critical_neurons.io.onnx_import.converters import CONVERTERS, GraphStep, Sizes, Value
from critical_neurons.io.onnx_import.onnx_file import OnnxGraph, read_onnx
from critical_neurons.io.onnx_runtime import open_session

EXAMPLE_ROWS = 13
"""Batch size of the example if the file leaves it open: an unusual number, so that no other axis is mistaken for the
batch. Only shapes are computed with it."""

CHECKED_BATCHES = (2, 3)
"""Numbers of inputs, or of batches if the file fixes the batch size."""

CONVERSION_TOLERANCE = 1e-4
"""Largest difference from onnxruntime's outputs, relative to the largest output above one."""


def import_onnx(path: str | os.PathLike[str], input_shape: tuple[int, ...] | None = None) -> fx.GraphModule:
    """The network in the file, in evaluation mode. `input_shape`: of one input, if the file leaves it open."""
    graph = read_onnx(path)
    shape = _find_shape(graph, input_shape)
    module = convert_graph(graph, shape)
    check_conversion(module, graph, shape)
    return module


def convert_graph(graph: OnnxGraph, shape: tuple[int, ...]) -> fx.GraphModule:
    unknown = [node for node in graph.nodes if node.operator not in CONVERTERS]
    if unknown:
        found = ", ".join(f"{node.name} ({node.operator})" for node in unknown)
        raise ConversionError(
            f"{graph.path}: operators that are not converted: {found}. Accepted: {', '.join(sorted(CONVERTERS))}."
        )
    builder = Builder()
    values: dict[str, Value] = dict(graph.constants)
    rows = graph.input_shape[0] or EXAMPLE_ROWS
    values[graph.input] = builder.start(graph.input, (rows, *shape), graph.dtype)
    for node in graph.nodes:
        values.update(_convert(GraphStep(node, graph, values, builder)))
    outputs = [values[name] for name in graph.outputs]
    if any(isinstance(value, Sizes) for value in outputs):
        raise ConversionError(f"{graph.path}: gives a shape as its output. Accepted: tensors.")
    module = builder.finish(tuple(outputs))
    module.meta[ONNX_NAMES] = graph.input, graph.outputs[0]
    return module


def _convert(step: GraphStep) -> dict[str, Value]:
    """Exceptions of torch, which may have any type, become one sentence with the place."""
    try:
        results = CONVERTERS[step.node.operator](step)
    except CriticalNeuronsError as error:
        text = str(error)
        raise (error if text.startswith(step.describe()) else ConversionError(f"{step.describe()} {text}.")) from None
    except Exception as error:
        raise _failed(f"{step.describe()} does not fit what it reads", error) from error
    given = results if isinstance(results, tuple) else (results,)
    further = [name for name in step.node.outputs[len(given) :] if step.graph.uses[name]]
    if further:
        raise step.refuse(f"gives {further[0]!r}, which is read", "its first output alone")
    return dict(zip(step.node.outputs, given, strict=False))


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> ConversionError:
    return ConversionError(f"{what}: {first_line(error).rstrip('.')}.")


def check_conversion(module: fx.GraphModule, graph: OnnxGraph, shape: tuple[int, ...]) -> None:
    """Raise if the module's outputs differ from those of the file in onnxruntime."""
    try:
        session = open_session(graph.path)
    except ExportError as error:
        raise ConversionError(f"{graph.path}: {error}") from error
    fixed = graph.input_shape[0]
    for count in CHECKED_BATCHES:
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count * (fixed or 1), *shape, dtype=graph.dtype, generator=generator)
        batches = torch.split(rows, fixed or count)
        with _reporting(f"{graph.path}: onnxruntime does not run it"):
            runs = [session.run(None, {graph.input: batch.numpy()}) for batch in batches]
        expected = [torch.cat([torch.from_numpy(each) for each in outputs]) for outputs in zip(*runs, strict=True)]
        with torch.no_grad(), _reporting(f"{graph.path}: does not run on other batches than the file's"):
            found = module(rows)
        for name, ours, theirs in zip(graph.outputs, _as_tuple(found), expected, strict=True):
            _compare(f"{graph.path}: its output {name!r}, for {len(rows)} inputs,", ours, theirs)


def _compare(where: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise ConversionError(
            f"{where} is of shape {tuple(found.shape)} after conversion, {tuple(expected.shape)} in onnxruntime. Is "
            "the number of inputs written into the file?"
        )
    finite = torch.isfinite(expected)
    difference = (found - expected)[finite].abs().max() if finite.any() else torch.tensor(0.0)
    largest = max(1.0, float(expected[finite].abs().max())) if finite.any() else 1.0
    if not torch.equal(torch.isfinite(found), finite) or not difference <= CONVERSION_TOLERANCE * largest:
        raise ConversionError(
            f"{where} differs after conversion from onnxruntime's by {float(difference):.2e}, with values up to "
            f"{largest:.2e}."
        )


def _find_shape(graph: OnnxGraph, given: tuple[int, ...] | None) -> tuple[int, ...]:
    declared = graph.input_shape[1:]
    if given is not None and (
        len(given) != len(declared) or any(size not in (None, own) for size, own in zip(declared, given, strict=True))
    ):
        raise InvalidInputError(f"{graph.path}: reads inputs of shape {_describe(declared)}, not {_describe(given)}.")
    shape = tuple(size for size in given or declared if size is not None)
    if len(shape) != len(declared):
        raise InvalidInputError(
            f"{graph.path}: leaves the shape of an input open: {_describe(declared)}. Give it, as "
            "input_shape=(3, 32, 32) or --input-shape 3,32,32."
        )
    return shape


def _describe(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)

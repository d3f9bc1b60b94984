"""ONNX port: size of a model as an ONNX file, and size and accuracy in int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from critical_neurons.errors import ExportError, MissingExtraError
from critical_neurons.io.exporters import check_export, convert_to_onnx
from critical_neurons.io.onnx_runtime import Runner, open_onnx, quantise_onnx
from critical_neurons.removal.metrics import predict_by, share_of_equals
from critical_neurons.removal.rows import Inputs, match_model


@dataclass(frozen=True)
class Port:
    """A model in onnxruntime: how to run it, measured fields of `Measurement`, and a `reason` if not all could be
    measured."""

    run: Runner | None
    measured: dict[str, Any]
    reason: str = ""


def measure_port(
    model: nn.Module, inputs: Inputs, ranges: Inputs, labels: Tensor | None, *, threads: int, batch_size: int
) -> Port:
    """`ranges` are the inputs for the int8 ranges; without labels there is no accuracy."""
    try:
        content = convert_to_onnx(model, inputs)
        run = open_onnx(content, threads)
        check_export(model, run, inputs)
    except (ExportError, MissingExtraError) as error:
        return Port(None, {}, f"Not measured in onnxruntime: {error}")
    measured: dict[str, Any] = {"onnx_bytes": len(content)}
    matched = match_model(ranges, model)
    if not isinstance(matched, Tensor) or not matched.is_floating_point():
        return Port(run, measured, "Not measured in int8: that is for a single input of floating-point numbers.")
    try:
        small = quantise_onnx(content, matched)
        measured["int8_bytes"] = len(small)
        if labels is not None:
            run_small = open_onnx(small, threads)
            found = predict_by(lambda rows: run_small(match_model(rows, model)), inputs, batch_size=batch_size)
            measured["int8_accuracy"] = share_of_equals(found, labels)
    except ExportError as error:
        return Port(run, measured, f"Not measured in int8: {error}")
    return Port(run, measured)

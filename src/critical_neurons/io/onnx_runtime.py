"""onnxruntime: run ONNX files, and quantise them to int8. Exceptions of it and of exporters become one sentence."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from critical_neurons.errors import ExportError, InvalidInputError, MissingExtraError, first_line
from critical_neurons.removal.rows import Inputs, find_tensors

CALIBRATION_ROWS = 32
"""Inputs per step of int8 calibration."""

Runner: TypeAlias = Callable[[Inputs], Any]
"""Any function from a batch of inputs to outputs."""


def open_onnx(source: bytes | Path, threads: int = 1) -> Runner:
    """Run an ONNX file with onnxruntime, on the CPU with `threads` threads. The function returns one or more
    tensors."""
    session = open_session(source, threads)
    names = [each.name for each in session.get_inputs()]

    def run(inputs: Inputs) -> Any:
        try:  # `with reporting` would add to the latency of small networks
            if isinstance(inputs, Tensor):
                given = {names[0]: inputs.numpy()}
            elif isinstance(inputs, Mapping) and set(inputs) == set(names):
                given = {name: values.numpy() for name, values in inputs.items()}
            else:
                given = {name: values.numpy() for name, values in zip(names, find_tensors(inputs), strict=True)}
            found = [torch.from_numpy(values) for values in session.run(None, given)]
        except Exception as error:
            raise _failed("running in onnxruntime", error) from error
        return found[0] if len(found) == 1 else found

    return run


def open_session(source: bytes | Path, threads: int = 1) -> Any:
    runtime = require_onnx()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what goes wrong is raised, too
    # Spinning threads would slow down the next measurement.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with (
        reporting("loading in onnxruntime", " It knows no convolutions in float64: convert with model.float()."),
        quiet(),
    ):
        return runtime.InferenceSession(
            source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
        )


def quantise_onnx(content: bytes, calibration: Tensor) -> bytes:
    """The network in int8, by onnxruntime's static quantisation: weights per channel, activations per tensor with
    their ranges on the calibration inputs."""
    require_onnx()
    from onnxruntime import quantization

    name = open_session(content).get_inputs()[0].name
    batches = iter([{name: rows.numpy()} for rows in torch.split(calibration, CALIBRATION_ROWS)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(batches, None)

    with tempfile.TemporaryDirectory() as folder, reporting("int8 quantisation"), quiet():
        source, target = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        source.write_bytes(content)
        quantization.quantize_static(
            str(source), str(target), Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=True
        )
        return target.read_bytes()


def convert_layer(module: nn.Module, example: Tensor) -> bytes | None:
    """A linear layer or convolution as an ONNX file with one node, without its bias; None for other modules."""
    require_onnx()
    from onnx import TensorProto, helper, numpy_helper

    weight = module.weight
    if example.dtype != torch.float32 or not isinstance(weight, Tensor):
        return None
    if isinstance(module, nn.Linear):
        values, node = weight.T, helper.make_node("MatMul", ["x", "w"], ["y"])
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and not isinstance(module.padding, str):
        values = weight
        node = helper.make_node(
            "Conv",
            ["x", "w"],
            ["y"],
            kernel_shape=list(module.kernel_size),
            strides=list(module.stride),
            dilations=list(module.dilation),
            pads=list(module.padding) * 2,
        )
    else:
        return None
    ends = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", list(example.shape)), ("y", None))
    )
    read, given = ends
    stored = numpy_helper.from_array(values.detach().contiguous().numpy(), "w")
    graph = helper.make_graph([node], "layer", [read], [given], [stored])
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return content


@contextmanager
def reporting(step: str, hint: str = "") -> Iterator[None]:
    """Exceptions of exporters and runtimes, which may have any type, become one sentence."""
    try:
        yield
    except (ExportError, MissingExtraError, InvalidInputError):
        raise
    except Exception as error:
        raise _failed(step, error, hint) from error


def _failed(step: str, error: Exception, hint: str = "") -> ExportError:
    cause = error
    while type(cause).__module__.startswith("torch.onnx") and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__  # torch's exporter wraps the actual error
    return ExportError(f"{step} failed: {first_line(cause).rstrip('.')}.{hint}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what exporters print; problems are raised or checked afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def require_onnx() -> Any:
    """onnxruntime, if it and the packages for export are installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "onnxruntime", "onnx") from error
    return onnxruntime

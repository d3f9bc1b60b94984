"""Exporters: nn.Module to files that other programs run, each loaded again, run and compared before it counts."""

from __future__ import annotations

import copy
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from critical_neurons.core.files import check_writable, write_atomically
from critical_neurons.errors import ExportError, InvalidInputError, InvalidSettingError, MissingExtraError

TRACED_ROWS = 3
"""Inputs in the traced batch: more than one, since torch takes a batch of one for a fixed size."""

CHECKED_ROWS = (1, 5)
"""Batch sizes the export must run at."""

EXPORT_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference between the outputs of the model and of its export, relative to the largest output above one."""

CALIBRATION_ROWS = 32
"""Images per step when the ranges for int8 are found."""

INPUT, OUTPUT, BATCH = "input", "output", "batch"
"""What the input and the output of an ONNX file are called, and their first axis."""

FORWARD_HINT = " Neither the number of inputs nor their values may decide what the forward does."

Runner: TypeAlias = Callable[[Tensor], Tensor]
"""What turns a batch of inputs into outputs."""


@dataclass(frozen=True)
class Export:
    """A file that ran at several batch sizes and gave the model's outputs up to `difference`."""

    path: Path
    bytes: int
    difference: float


def export_onnx(model: nn.Module, path: str | os.PathLike[str], example: Tensor) -> Export:
    """One ONNX file with a dynamic batch, its input and output called "input" and "output"."""
    check_writable(path)
    return _write(path, convert_to_onnx(model, example), model, example, open_onnx)


def export_pt2(model: nn.Module, path: str | os.PathLike[str], example: Tensor) -> Export:
    """A file of `torch.export`, with a dynamic batch."""
    check_writable(path)
    rows = _cycle(example, TRACED_ROWS, model)
    content = io.BytesIO()
    with _reporting("torch.export", FORWARD_HINT), _quiet():
        torch.export.save(_capture(model, rows), content)
    return _write(path, content.getvalue(), model, example, _open_pt2)


def convert_to_onnx(model: nn.Module, example: Tensor) -> bytes:
    require_onnx()
    rows = _cycle(example, TRACED_ROWS, model)
    with _reporting("ONNX export", FORWARD_HINT), _quiet():
        program: Any = torch.onnx.export(
            _capture(model, rows),
            (rows,),
            dynamo=True,
            dynamic_shapes=({0: BATCH},),  # names the axis
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
        )
        content: bytes = program.model_proto.SerializeToString()
    return content


def open_onnx(source: bytes | Path, threads: int = 1) -> Runner:
    """Run an ONNX file with onnxruntime, on the CPU and so many threads."""
    runtime = require_onnx()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what goes wrong is raised, too
    # Threads that wait busily would slow down whatever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with _reporting("loading in onnxruntime", " It knows no convolutions in float64: convert with model.float()."):
        session = runtime.InferenceSession(
            source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
        )

    def run(inputs: Tensor) -> Tensor:
        try:  # `with _reporting` would show in the latency of small networks
            return torch.from_numpy(session.run([OUTPUT], {INPUT: inputs.numpy()})[0])
        except Exception as error:
            raise _failed("running in onnxruntime", error) from error

    return run


def quantise_onnx(content: bytes, calibration: Tensor) -> bytes:
    """The network in int8, by onnxruntime's static quantisation: weights per channel, activations per tensor with the
    ranges they take on the calibration inputs."""
    require_onnx()
    from onnxruntime import quantization

    batches = iter([{INPUT: rows.numpy()} for rows in torch.split(calibration, CALIBRATION_ROWS)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(batches, None)

    with tempfile.TemporaryDirectory() as folder, _reporting("int8 quantisation"), _quiet():
        source, target = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        source.write_bytes(content)
        quantization.quantize_static(
            str(source), str(target), Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=True
        )
        return target.read_bytes()


def check_export(model: nn.Module, run: Runner, example: Tensor) -> float:
    """The largest difference between the outputs of the model and of its export; an error if it is large."""
    exact, differences = _copy(model), []
    for count in CHECKED_ROWS:
        rows = _cycle(example, count, model)
        with torch.no_grad():
            expected = exact(rows.clone())
        if not isinstance(expected, Tensor):
            raise ExportError(f"the model returns a {type(expected).__name__}. Accepted: a tensor.")
        with _reporting(f"running the export on {count} inputs"):
            found = run(rows)
        if found.shape != expected.shape:
            raise ExportError(
                f"the export gives outputs of shape {tuple(found.shape)} for {count} inputs, the model "
                f"{tuple(expected.shape)}. Is the number of inputs written into its forward?"
            )
        difference = float((found.detach() - expected).abs().max())
        tolerance = EXPORT_TOLERANCE.get(expected.dtype, EXPORT_TOLERANCE[torch.float32])
        if not difference <= tolerance * max(1.0, float(expected.abs().max())):
            raise ExportError(f"the export gives other outputs than the model (difference {difference:.2e}).")
        differences.append(difference)
    return max(differences)


def _write(
    path: str | os.PathLike[str],
    content: bytes,
    model: nn.Module,
    example: Tensor,
    open_file: Callable[[Path], Runner],
) -> Export:
    found: list[float] = []
    write_atomically(path, content, lambda draft: found.append(check_export(model, open_file(draft), example)))
    return Export(Path(path), len(content), found[0])


def _open_pt2(path: Path) -> Runner:
    with path.open("rb") as file, _reporting("torch.export"), _quiet():
        module: Any = torch.export.load(file).module()

    def run(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = module(inputs)
        return outputs

    return run


def _capture(model: nn.Module, rows: Tensor) -> torch.export.ExportedProgram:
    """The forward as a graph. Neither how many inputs there are nor what is in them may change its course."""
    return torch.export.export(_copy(model), (rows,), dynamic_shapes=({0: torch.export.Dim(BATCH)},))


def _copy(model: nn.Module) -> nn.Module:
    """On the CPU, in evaluation mode."""
    return copy.deepcopy(model).to("cpu").eval()


def _cycle(example: Tensor, count: int, model: nn.Module) -> Tensor:
    """So many inputs, of the type of the model's parameters."""
    if not isinstance(example, Tensor) or example.ndim < 2 or len(example) == 0:
        raise InvalidInputError(
            "example: give a batch of inputs, a tensor of shape (batch, ...) with at least one row."
        )
    dtype = next((parameter.dtype for parameter in model.parameters()), example.dtype)
    return example.detach()[torch.arange(count) % len(example)].to("cpu", dtype)


@contextmanager
def _reporting(step: str, hint: str = "") -> Iterator[None]:
    """What exporters and runtimes raise, which is of every type, becomes one sentence."""
    try:
        yield
    except (ExportError, MissingExtraError, InvalidInputError):
        raise
    except Exception as error:
        raise _failed(step, error, hint) from error


def _failed(step: str, error: Exception, hint: str = "") -> ExportError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ExportError(f"{step} failed: {reason.rstrip('.')}.{hint}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters speak about their own insides. What matters to the user is raised, or checked afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def require_onnx() -> Any:
    """onnxruntime, when it and what exports for it are installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "onnxruntime", "onnx") from error
    return onnxruntime


EXPORTERS = {".onnx": export_onnx, ".pt2": export_pt2}


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise unless the ending is one that `export` writes, with what is installed."""
    if Path(path).suffix not in EXPORTERS:
        raise InvalidSettingError(f"{path}: its ending says the format. Accepted: {', '.join(EXPORTERS)}.")
    if EXPORTERS[Path(path).suffix] is export_onnx:
        require_onnx()

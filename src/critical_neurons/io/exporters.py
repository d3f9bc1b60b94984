"""Exporters: nn.Module to ONNX and torch.export files, each loaded again, run and compared with the model."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from critical_neurons.core.files import check_writable, write_atomically
from critical_neurons.errors import ExportError, InvalidInputError, InvalidSettingError
from critical_neurons.io.onnx_runtime import Runner, open_onnx, quiet, reporting, require_onnx
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.rows import (
    Inputs,
    call_model,
    count_rows,
    find_tensors,
    is_whole,
    map_inputs,
    match_model,
    name_tensors,
    split_arguments,
    take_rows,
)

TRACED_ROWS = 3
"""Rows of the traced batch: more than one, since torch treats a batch of one as a fixed size."""

CHECKED_ROWS = (1, 5)
"""Batch sizes the export must run at."""

EXPORT_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference between the outputs of the model and of its export, relative to the largest output above one."""

INPUT, OUTPUT, BATCH = "input", "output", "batch"
"""Default names of the input, the output and the first axis in an ONNX file. Several inputs are named as in the
forward pass, several outputs by their names or numbers."""

ONNX_NAMES = "onnx_names"
"""Key in the `meta` of a model that was an ONNX file: the names of its input and output, which are kept."""

FORWARD_HINT = " Neither the number of inputs nor their values may decide what the forward does."


@dataclass(frozen=True)
class Export:
    """A file that ran at several batch sizes and gave the model's outputs up to `difference`."""

    path: Path
    bytes: int
    difference: float


def export_onnx(model: nn.Module, path: str | os.PathLike[str], example: Inputs) -> Export:
    """One ONNX file with a dynamic batch. A single input or output is named "input" or "output", or as in the ONNX
    file that the model comes from."""
    check_writable(path)
    return _write(path, convert_to_onnx(model, example), model, example, open_onnx)


def export_pt2(model: nn.Module, path: str | os.PathLike[str], example: Inputs) -> Export:
    """A file of `torch.export`, with a dynamic batch. Outputs of unsupported types become a tuple."""
    check_writable(path)
    rows = _cycle(example, TRACED_ROWS, model)
    content = io.BytesIO()
    with reporting("torch.export", FORWARD_HINT), quiet():
        copied = _copy_for_export(model, rows, Tensor, int, float, str, type(None))
        torch.export.save(_capture(copied, rows), content)
    return _write(path, content.getvalue(), model, example, _open_pt2)


def convert_to_onnx(model: nn.Module, example: Inputs) -> bytes:
    require_onnx()
    rows = _cycle(example, TRACED_ROWS, model)
    with reporting("ONNX export", FORWARD_HINT), quiet():
        args, kwargs = split_arguments(rows)
        reads, gives = _name_ends(model, rows)
        program: Any = torch.onnx.export(
            _capture(_copy_for_export(model, rows, Tensor), rows),
            args,
            kwargs=kwargs,
            dynamo=True,
            dynamic_shapes=_free_batch(model, rows, BATCH),  # names the axis
            verbose=False,
            input_names=reads,
            output_names=gives,
        )
        content: bytes = program.model_proto.SerializeToString()
    return content


def _name_ends(model: nn.Module, rows: Inputs) -> tuple[list[str], list[str]]:
    """The names of inputs and outputs."""
    known = model.meta if isinstance(model, fx.GraphModule) else {}
    source, target = known.get(ONNX_NAMES, (INPUT, OUTPUT))
    args, kwargs = split_arguments(rows)
    reads = [name for name, _ in name_tensors(kwargs or inspect.signature(model.forward).bind(*args).arguments)]
    if isinstance(rows, Tensor):
        reads = [source]
    found = [name for name, _ in name_tensors(_run(_copy(model), rows))]
    gives = [name if name and not name[0].isdigit() and name not in reads else f"{OUTPUT}_{name}" for name in found]
    return reads, [target] if len(found) == 1 else gives


def check_export(model: nn.Module, run: Runner, example: Inputs) -> float:
    """The largest difference between the outputs of the model and of its export; raises if it is too large."""
    exact, differences = _copy(model), [0.0]
    for count in CHECKED_ROWS:
        rows = _cycle(example, count, model)
        expected = list(name_tensors(_run(exact, rows)))
        with reporting(f"running the export on {count} inputs"):
            found = list(find_tensors(run(rows)))
        if len(found) != len(expected) or not expected:
            raise ExportError(
                f"the export gives {len(found)} tensors, the model {len(expected)}. Accepted: as many, at least one."
            )
        for (name, wanted), given in zip(expected, found, strict=True):
            differences.append(_compare(f"{name}: " if name else "", wanted, given, count))
    return max(differences)


def _compare(where: str, wanted: Tensor, found: Tensor, count: int) -> float:
    if found.shape != wanted.shape:
        raise ExportError(
            f"{where}the export gives outputs of shape {tuple(found.shape)} for {count} inputs, the model "
            f"{tuple(wanted.shape)}. Is the number of inputs written into its forward?"
        )
    if wanted.numel() == 0:
        return 0.0
    tolerance = EXPORT_TOLERANCE.get(wanted.dtype, EXPORT_TOLERANCE[torch.float32])
    exact = wanted.double()
    difference = float((found.detach().double() - exact).abs().max())
    if not difference <= tolerance * max(1.0, float(exact.abs().max())):
        raise ExportError(f"{where}the export gives other outputs than the model (difference {difference:.2e}).")
    return difference


def _write(
    path: str | os.PathLike[str],
    content: bytes,
    model: nn.Module,
    example: Inputs,
    open_file: Callable[[Path], Runner],
) -> Export:
    found: list[float] = []
    write_atomically(path, content, lambda draft: found.append(check_export(model, open_file(draft), example)))
    return Export(Path(path), len(content), found[0])


def _open_pt2(path: Path) -> Runner:
    with path.open("rb") as file, reporting("torch.export"), quiet():
        module: Any = torch.export.load(file).module()

    def run(inputs: Inputs) -> Any:
        with torch.no_grad():
            return call_model(module, inputs)

    return run


def _copy_for_export(model: nn.Module, rows: Inputs, *known: type) -> nn.Module:
    """A copy that returns a tuple of tensors if the outputs hold types that the exporter does not support."""
    copied = _copy(model)
    if not all(isinstance(each, known) for each in tree_leaves(_run(copied, rows))):
        whole = copied.forward

        @wraps(whole)  # exporters ask for the names of the arguments
        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return tuple(find_tensors(whole(*args, **kwargs)))

        copied.forward = forward
    return copied


def _run(model: nn.Module, rows: Inputs) -> Any:
    """The outputs for a copy of the inputs, which a forward pass may change."""
    with torch.no_grad():
        return call_model(model, map_inputs(rows, Tensor.clone))


def _capture(model: nn.Module, rows: Inputs) -> torch.export.ExportedProgram:
    """The forward pass as a graph, which must not depend on the batch size or on values."""
    args, kwargs = split_arguments(rows)
    shapes = _free_batch(model, rows, torch.export.Dim(BATCH))
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)


def _free_batch(model: nn.Module, rows: Inputs, batch: Any) -> dict[str, Any]:
    """The dynamic axes of every argument: the first, unless rows cannot be separated."""
    args, kwargs = split_arguments(rows)
    given = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    shapes: dict[str, Any] = tree_map_only(Tensor, lambda _: None if is_whole(rows) else {0: batch}, given)
    return shapes


def _copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU in evaluation mode."""
    return copy_whole(model).to("cpu").eval()


def _cycle(example: Inputs, count: int, model: nn.Module) -> Inputs:
    """`count` inputs on the CPU, floating-point ones in the type of the model's parameters."""
    rows = count_rows(example)
    if rows == 0:
        raise InvalidInputError("example: give a batch of inputs, with at least one row.")
    taken = map_inputs(take_rows(example, torch.arange(count) % rows), Tensor.detach)
    return map_inputs(match_model(taken, model), Tensor.cpu)


EXPORTERS = {".onnx": export_onnx, ".pt2": export_pt2}


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise unless the ending is one that `export` writes, with what is installed."""
    if Path(path).suffix not in EXPORTERS:
        raise InvalidSettingError(f"{path}: its ending says the format. Accepted: {', '.join(EXPORTERS)}.")
    if EXPORTERS[Path(path).suffix] is export_onnx:
        require_onnx()

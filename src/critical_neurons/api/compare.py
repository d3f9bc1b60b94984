"""Compare: two networks measured side by side, in torch and in onnxruntime: the public `compare`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.batch import CALIBRATED_ON, check_classes, digest_rows, gather_batch
from critical_neurons.core.comparison import Comparison, DataKind, Latency, Measurement
from critical_neurons.core.environment import describe_machine, describe_versions
from critical_neurons.errors import ExportError, InvalidInputError, InvalidSettingError, MissingExtraError
from critical_neurons.io.exporters import Runner, check_export, convert_to_onnx, open_onnx, quantise_onnx
from critical_neurons.parallel.threads import on_threads
from critical_neurons.readers import on_cpu, unwrap
from critical_neurons.removal.metrics import (
    count_bytes,
    count_classes,
    count_macs,
    count_parameters,
    measure_activations,
    predict,
    predict_by,
    share_of_equals,
    time_in_turns,
)

INT8_IMAGES = 256
"""Images the int8 ranges are taken from, at most."""


@on_cpu
def compare(
    model: nn.Module,
    smaller: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    data: DataKind = "test",
    calibration: Any = None,
    batch_sizes: Sequence[int] = (1, 64),
    repeats: int = 30,
    threads: int = 1,
    onnx: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Measure both networks on the CPU: accuracy, agreement, sizes, multiply-adds, memory and latency; with the extra
    `onnx` also the latency in onnxruntime, and accuracy and size in int8.

    `inputs` and `labels` as for `score`. Where some of them had a part in scoring or refitting, as a network made by
    `prune` remembers, accuracy is labelled so; of others say `data="calibration"`, or give the inputs that had such a
    part as `calibration`. The int8 ranges are taken from `calibration`, else from the first of `inputs`.

    `repeats` samples are taken of every latency, before and after in turns, on `threads` threads. `progress` is told
    what is about to be measured.
    """
    _check_settings(data, batch_sizes, repeats, threads)
    tell = progress or (lambda text: None)
    trial = _gather((model, smaller), inputs, labels, calibration)
    notes = [*_explain(len(trial.labels), repeats, threads)]
    if trial.common and data == "test":
        data = "calibration"
        notes.append(f"{trial.common} of the images are among the calibration ones: the accuracy is labelled so.")
    if data == "test" and not trial.checked:
        notes.append("Taken for test data unchecked: no calibration inputs were given to look these up among.")
    tell("accuracy and sizes")
    predictions = [predict(each, trial.inputs) for each in trial.models]
    measured = [_measure(each, trial, found) for each, found in zip(trial.models, predictions, strict=True)]
    runners: dict[str, list[Runner]] = {"torch": [_run_in_torch(each) for each in trial.models]}
    if onnx:
        tell("ONNX and int8")
        ports = [_port(each, trial, threads) for each in trial.models]
        measured = [replace(each, **port.measured) for each, port in zip(measured, ports, strict=True)]
        notes += dict.fromkeys(port.note for port in ports)
        runners["onnxruntime"] = [port.run for port in ports if port.run is not None]
    latencies: list[list[Latency]] = [[] for _ in trial.models]
    for runtime, pair in runners.items():
        for size in batch_sizes if len(pair) == len(trial.models) else ():
            tell(f"latency in {runtime}, batch of {size}")
            for found, latency in zip(latencies, _time(runtime, pair, trial, size, repeats, threads), strict=True):
                found.append(latency)
    before, after = (replace(each, latencies=tuple(found)) for each, found in zip(measured, latencies, strict=True))
    return Comparison(
        before,
        after,
        agreement=share_of_equals(*predictions),
        images=len(trial.labels),
        data=data,
        int8_data=data if trial.calibrated else "calibration",
        threads=threads,
        notes=tuple(notes),
        machine=describe_machine(),
        versions=describe_versions("torch", *(("onnx", "onnxruntime") if onnx else ())),
    )


@dataclass(frozen=True)
class _Trial:
    """Both models on the CPU; what they are measured on; `ranges`, the images for int8, which are calibration images
    where such were given (`calibrated`). Of the inputs `common` had a part in making the smaller model, as far as
    that is known (`checked`)."""

    models: tuple[nn.Module, ...]
    inputs: Tensor
    labels: Tensor
    ranges: Tensor
    calibrated: bool
    checked: bool
    common: int

    def describe_int8(self) -> str:
        whose = (
            "calibration images" if self.calibrated else "images measured on, so its accuracy counts as calibration"
        )
        return (
            "int8: onnxruntime's static quantisation, weights per channel, ranges of activations from the first "
            f"{len(self.ranges)} {whose}."
        )


@dataclass(frozen=True)
class _Port:
    """A network in onnxruntime: how to run it, what was measured, and how or why not."""

    run: Runner | None
    measured: dict[str, Any]
    note: str


def _check_settings(data: str, batch_sizes: Sequence[int], repeats: int, threads: int) -> None:
    if data not in get_args(DataKind):
        raise InvalidSettingError(f"data: found {data!r}. Accepted: {', '.join(map(repr, get_args(DataKind)))}.")
    if not isinstance(batch_sizes, Sequence):
        raise InvalidSettingError(f"batch_sizes: found {batch_sizes!r}. Accepted: several, such as (1, 64).")
    counts = {"repeats": [repeats], "threads": [threads], "batch_sizes": list(batch_sizes)}
    for name, values in counts.items():
        for value in values:
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise InvalidSettingError(f"{name}: found {value!r}. Accepted: whole numbers of at least 1.")


def _gather(pair: tuple[nn.Module, nn.Module], inputs: Any, labels: Any, calibration: Any) -> _Trial:
    batch = gather_batch(inputs, labels)
    if batch.labels is None:
        raise InvalidInputError("labels: none. Give the index of the right class of every input.")
    rows, seen = torch.from_numpy(batch.inputs), None
    if calibration is not None:
        seen = torch.from_numpy(gather_batch(calibration).inputs)
        if seen.shape[1:] != rows.shape[1:]:
            raise InvalidInputError(
                f"calibration: found shape {tuple(seen.shape)} beside inputs of shape {tuple(rows.shape)}. Accepted: "
                "inputs of the same shape."
            )
    remembered = (getattr(unwrap(each), CALIBRATED_ON, ()) for each in pair)
    known = set().union(*remembered, () if seen is None else digest_rows(seen.numpy()))
    models = tuple(copy.deepcopy(unwrap(each)).to("cpu").eval() for each in pair)
    classes = [count_classes(each, rows) for each in models]
    if classes[0] != classes[1]:
        raise InvalidInputError(f"smaller: it has {classes[1]} outputs, the model {classes[0]}. Give two that match.")
    check_classes(batch.labels, classes[0])
    return _Trial(
        models,
        rows,
        torch.from_numpy(batch.labels),
        (rows if seen is None else seen)[:INT8_IMAGES],
        calibrated=seen is not None,
        checked=bool(known),
        common=sum(digest in known for digest in digest_rows(batch.inputs)),
    )


def _explain(images: int, repeats: int, threads: int) -> tuple[str, ...]:
    """How the numbers are to be read."""
    return (
        f"{images} images. Multiply-adds: those of convolutions and matrix products for one image, by "
        "torch.utils.flop_counter.",
        "Peak activations: the most bytes alive at once in torch for one image, with the input, without weights.",
        "Size on disk: parameters and buffers as safetensors.",
        f"Latency: median of up to {repeats} samples of a batch on the CPU, before and after in turns, threads: "
        f"{threads}.",
    )


def _measure(model: nn.Module, trial: _Trial, predictions: Tensor) -> Measurement:
    return Measurement(
        accuracy=share_of_equals(predictions, trial.labels),
        parameters=count_parameters(model),
        macs=count_macs(model, trial.inputs),
        peak_activation_bytes=measure_activations(model, trial.inputs),
        bytes_on_disk=count_bytes(model),
    )


def _port(model: nn.Module, trial: _Trial, threads: int) -> _Port:
    dtype = _dtype(model)
    try:
        content = convert_to_onnx(model, trial.inputs)
        run = open_onnx(content, threads)
        check_export(model, run, trial.inputs)
    except (ExportError, MissingExtraError) as error:
        return _Port(None, {}, f"Not measured in onnxruntime: {error}")
    measured: dict[str, Any] = {"onnx_bytes": len(content)}
    try:
        small = quantise_onnx(content, trial.ranges.to(dtype))
        predictions = predict_by(open_onnx(small, threads), trial.inputs.to(dtype))
    except ExportError as error:
        return _Port(run, measured, f"Not measured in int8: {error}")
    measured |= {"int8_bytes": len(small), "int8_accuracy": share_of_equals(predictions, trial.labels)}
    return _Port(run, measured, trial.describe_int8())


def _run_in_torch(model: nn.Module) -> Runner:
    def run(rows: Tensor) -> Tensor:
        with torch.inference_mode():
            outputs: Tensor = model(rows)
        return outputs

    return run


def _time(
    runtime: str, runners: Sequence[Runner], trial: _Trial, size: int, repeats: int, threads: int
) -> list[Latency]:
    rows = trial.inputs[torch.arange(size) % len(trial.inputs)]
    batches = [rows.to(_dtype(model)) for model in trial.models]
    calls = [lambda run=run, batch=batch: run(batch) for run, batch in zip(runners, batches, strict=True)]
    with on_threads(threads):
        samples = time_in_turns(calls, repeats=repeats)
    latencies = []
    for seconds in samples:
        lower, median, upper = (float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75)))
        latencies.append(Latency(runtime, size, median, lower, upper, len(seconds)))
    return latencies


def _dtype(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)

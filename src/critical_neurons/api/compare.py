"""The public `compare`: two networks measured side by side, in torch and in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor, nn

from critical_neurons.core.answers import Answers
from critical_neurons.core.batch import CALIBRATED_ON, check_classes
from critical_neurons.core.comparison import Comparison, DataKind, Latency, Measurement, explain_figures
from critical_neurons.core.environment import describe_machine, describe_versions
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.io.onnx_port import measure_port
from critical_neurons.io.onnx_runtime import Runner
from critical_neurons.parallel.threads import on_threads
from critical_neurons.readers import isolated
from critical_neurons.removal.differences import OutputComparison, compare_outputs
from critical_neurons.removal.metrics import (
    count_bytes,
    count_classes,
    count_macs,
    count_parameters,
    measure_activations,
    share_of_equals,
    time_in_turns,
)
from critical_neurons.removal.rows import (
    Inputs,
    as_whole,
    call_model,
    count_rows,
    digest_inputs,
    find_tensors,
    gather_inputs,
    gather_labelled,
    is_whole,
    match_model,
    take_rows,
)
from critical_neurons.structure import copy_model, join_rows, unwrap

INT8_INPUTS = 256
"""Most inputs for the ranges of int8 activations."""

MOST_BYTES, MOST_ROWS = 2**28, 512
"""Limits of a batch: bytes of activations, and rows."""


@isolated
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
    """Measure both networks on the CPU: accuracy, agreement, difference of the outputs, sizes, multiply-adds, memory
    and latency; with the extra `onnx` also the latency in onnxruntime, and accuracy and size in int8.

    `inputs` are a tensor or array, a tuple or dict of them for models of several inputs, or an iterable of batches,
    with or without labels. The models may return any nesting of tensors. Accuracy needs one output (batch, classes)
    and `labels`, the class index of every input; agreement needs only the output.

    A network made by `prune` remembers the inputs it was scored and refitted on: if some of them are among these, the
    data is labelled calibration. For other networks give `data="calibration"`, or the inputs that were used as
    `calibration`. The int8 ranges come from `calibration`, else from the first of `inputs`.

    Every latency is the median of up to `repeats` samples, before and after in turns, on `threads` threads.
    `progress` receives what is about to be measured.

    >>> comparison = cn.compare(model, smaller, test_inputs, test_labels, onnx=False)
    >>> comparison.after.macs < comparison.before.macs
    True
    """
    _check_settings(data, batch_sizes, repeats, threads)
    report = progress or (lambda text: None)
    trial, beside = _gather((model, smaller), inputs, calibration)
    notes = [*explain_figures(count_rows(trial.inputs), repeats, threads)]
    if trial.common and data == "test":
        data = "calibration"
        notes.append(f"{trial.common} of the inputs are calibration inputs: the data is labelled calibration.")
    if data == "test" and not trial.checked:
        notes.append("Assumed to be test data: no calibration inputs were given to compare them with.")
    report("accuracy and sizes")
    measured = [_measure(each, trial.inputs) for each in trial.models]
    most = max(each.peak_activation_bytes for each in measured)
    size = max(1, min(MOST_ROWS, MOST_BYTES // max(1, most)))
    outputs = compare_outputs(*trial.models, trial.inputs, batch_size=size)
    expected, why = _choose_labels(trial, outputs, labels, beside)
    notes += [why] if why else []
    notes += [f"No difference: {outputs.reason}."] if outputs.reason else []
    agreement, answers = None, None
    if outputs.predictions is not None:
        agreement = share_of_equals(*outputs.predictions)
        first, second = (found.numpy() for found in outputs.predictions)
        answers = Answers.count(first, second, None if expected is None else expected.numpy())
        if expected is not None:
            rated = (share_of_equals(found, expected) for found in outputs.predictions)
            measured = [replace(each, accuracy=share) for each, share in zip(measured, rated, strict=True)]
    runners: dict[str, list[Runner]] = {"torch": [_run_in_torch(each) for each in trial.models]}
    if onnx:
        report("ONNX and int8")
        ports = [
            measure_port(each, trial.inputs, trial.ranges, expected, threads=threads, batch_size=size)
            for each in trial.models
        ]
        measured = [replace(each, **port.measured) for each, port in zip(measured, ports, strict=True)]
        notes += dict.fromkeys(port.reason or trial.describe_int8() for port in ports)
        runners["onnxruntime"] = [port.run for port in ports if port.run is not None]
    latencies: list[list[Latency]] = [[] for _ in trial.models]
    for runtime, pair in runners.items():
        for rows in batch_sizes if len(pair) == len(trial.models) else ():
            report(f"latency in {runtime}, batch of {rows}")
            for found, latency in zip(latencies, _time(runtime, pair, trial, rows, repeats, threads), strict=True):
                found.append(latency)
    before, after = (replace(each, latencies=tuple(found)) for each, found in zip(measured, latencies, strict=True))
    return Comparison(
        before,
        after,
        agreement=agreement,
        difference=outputs.difference,
        inputs=count_rows(trial.inputs),
        data=data,
        int8_data=data if trial.calibrated else "calibration",
        threads=threads,
        notes=tuple(notes),
        machine=describe_machine(),
        versions=describe_versions("torch", *(("onnx", "onnxruntime") if onnx else ())),
        answers=answers,
    )


@dataclass(frozen=True)
class _Trial:
    """Both models on the CPU; the inputs; `ranges`, the inputs for int8, which are calibration inputs if such were
    given (`calibrated`). `common` inputs are known to have been used to make the smaller model; `checked`: whether
    anything is known about that."""

    models: tuple[nn.Module, nn.Module]
    inputs: Inputs
    ranges: Inputs
    calibrated: bool
    checked: bool
    common: int

    def describe_int8(self) -> str:
        whose = "calibration inputs" if self.calibrated else "inputs measured on: an accuracy counts as calibration"
        return (
            "int8: onnxruntime's static quantisation, weights per channel, ranges of activations from the first "
            f"{count_rows(self.ranges)} {whose}."
        )


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


def _gather(pair: tuple[nn.Module, nn.Module], inputs: Any, calibration: Any) -> tuple[_Trial, Tensor | None]:
    """The trial, and the labels that came with the inputs."""
    rows, beside = gather_labelled(inputs)
    seen = None if calibration is None else gather_inputs(calibration)
    if seen is not None:
        shapes = [[(*each.shape[1:],) for each in find_tensors(values)] for values in (rows, seen)]
        if shapes[0] != shapes[1]:
            accepted, found = (", ".join(str(("batch", *shape)) for shape in each) for each in shapes)
            raise InvalidInputError(
                f"calibration: found inputs {found} beside {accepted}. Accepted: the same shapes."
            )
    remembered = (getattr(unwrap(each), CALIBRATED_ON, ()) for each in pair)
    known = set().union(*remembered, () if seen is None else digest_inputs(seen))
    model, smaller = (copy_model(unwrap(each)).to("cpu") for each in pair)
    if is_whole(join_rows(model, match_model(rows, model))):
        rows = as_whole(rows)
    ranges = rows if seen is None else seen
    trial = _Trial(
        (model, smaller),
        rows,
        take_rows(ranges, torch.arange(min(INT8_INPUTS, count_rows(ranges)))),
        calibrated=seen is not None,
        checked=bool(known),
        common=sum(digest in known for digest in digest_inputs(rows)) if known else 0,
    )
    return trial, beside


def _choose_labels(
    trial: _Trial, outputs: OutputComparison, given: Any, beside: Tensor | None
) -> tuple[Tensor | None, str]:
    """The labels, or why there is no accuracy. Labels that come with the inputs may not be classes."""
    count = count_rows(trial.inputs)
    if outputs.predictions is None:
        return None, "No accuracy and no agreement: those are for one output (batch, classes)."
    if given is None and beside is None:
        return None, "No accuracy: no labels were given."
    try:
        labels = torch.as_tensor(beside if given is None else given).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"labels: found {type(given).__name__}. Accepted: a tensor or array.") from error
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.shape != (count,) or not whole:
        found = f"{labels.dtype} of shape {tuple(labels.shape)}"
        if given is None:
            return None, f"No accuracy: the labels beside the inputs are {found}, not the class of every input."
        raise InvalidInputError(
            f"labels: found {found}. Accepted: integers of shape ({count},), the index of the right class."
        )
    check_classes(labels.long().numpy(), count_classes(trial.models[0], trial.inputs))
    return labels.long(), ""


def _measure(model: nn.Module, inputs: Inputs) -> Measurement:
    return Measurement(
        accuracy=None,
        parameters=count_parameters(model),
        macs=count_macs(model, inputs),
        peak_activation_bytes=measure_activations(model, inputs),
        bytes_on_disk=count_bytes(model),
    )


def _run_in_torch(model: nn.Module) -> Runner:
    def run(rows: Inputs) -> Any:
        with torch.inference_mode():
            return call_model(model, rows)

    return run


def _time(
    runtime: str, runners: Sequence[Runner], trial: _Trial, size: int, repeats: int, threads: int
) -> list[Latency]:
    rows = take_rows(trial.inputs, torch.arange(size) % count_rows(trial.inputs))
    batches = [match_model(rows, model) for model in trial.models]
    calls = [lambda run=run, batch=batch: run(batch) for run, batch in zip(runners, batches, strict=True)]
    with on_threads(threads):
        samples = time_in_turns(calls, repeats=repeats)
    return [Latency.from_samples(runtime, size, seconds) for seconds in samples]

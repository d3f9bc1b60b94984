"""Comparison: a network before and after, measured side by side. It can be printed, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from critical_neurons.core.answers import Answers
from critical_neurons.core.documents import Amount, Count, Document, Number, Share
from critical_neurons.core.hooks import Shown, call_hook

DataKind: TypeAlias = Literal["test", "calibration"]
"""Calibration data was used to make the smaller network: for its scores, its refitting or its int8 ranges."""

NOTHING = "none"
"""Shown where nothing could be measured."""


@dataclass(frozen=True)
class Latency:
    """Seconds for one batch on the CPU: the median of `samples`, and the quartiles around it."""

    runtime: str
    batch_size: Number
    median: Amount
    lower: Amount
    upper: Amount
    samples: Number

    @classmethod
    def from_samples(cls, runtime: str, batch_size: int, seconds: Sequence[float]) -> Latency:
        lower, median, upper = (float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75)))
        return cls(runtime, batch_size, median, lower, upper, len(seconds))


@dataclass(frozen=True)
class Measurement:
    """One network. None: could not be measured, and the comparison's notes say why."""

    accuracy: Share | None
    parameters: Count
    macs: Count
    peak_activation_bytes: Count
    bytes_on_disk: Count
    latencies: tuple[Latency, ...] = ()
    onnx_bytes: Count | None = None
    int8_accuracy: Share | None = None
    int8_bytes: Count | None = None

    def latency(self, runtime: str, batch_size: int) -> Latency | None:
        found = (each for each in self.latencies if (each.runtime, each.batch_size) == (runtime, batch_size))
        return next(found, None)


@dataclass(frozen=True)
class Comparison(Shown, Document):
    """A network before and after, measured side by side.

    `agreement` is the share of inputs with the same predicted class, None unless outputs are (batch, classes).
    `difference` is the root mean squared difference of the outputs, relative to the standard deviation of the outputs
    before; if it is None, the notes say why. Both and the accuracies were measured on `inputs` inputs of the kind
    `data`, int8 accuracies on those of the kind `int8_data`. `answers` are the predicted classes, if there are any.

    >>> comparison = cn.compare(model, smaller, test_inputs, test_labels, onnx=False)
    >>> comparison.before.parameters, comparison.after.parameters
    (587, 167)
    >>> comparison.save("comparison.json")
    >>> cn.Comparison.load("comparison.json") == comparison
    True
    """

    FORMAT: ClassVar = "critical_neurons comparison"
    FORMAT_VERSION: ClassVar = 2

    before: Measurement
    after: Measurement
    agreement: Share | None
    difference: Amount | None
    inputs: Count
    data: DataKind
    int8_data: DataKind
    threads: Number
    notes: tuple[str, ...]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    answers: Answers | None = None

    def __post_init__(self) -> None:
        for kind in (self.data, self.int8_data):
            if kind not in get_args(DataKind):
                raise ValueError(f"data: found {kind!r}. Accepted: {', '.join(map(repr, get_args(DataKind)))}")

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Quantity, before, after, and their relation; what could not be measured is left out."""
        before, after = self.before, self.after
        rows = [
            _row(f"accuracy, {self.data} data", before.accuracy, after.accuracy, _percent, _points),
            _single("same predictions", self.agreement),
            _single(f"difference, {self.data} data", self.difference),
            _row("parameters", before.parameters, after.parameters, _count, _share),
            _row("multiply-adds", before.macs, after.macs, _count, _share),
            _row("peak activations", before.peak_activation_bytes, after.peak_activation_bytes, _size, _share),
            _row("size on disk", before.bytes_on_disk, after.bytes_on_disk, _size, _share),
            _row("size as ONNX", before.onnx_bytes, after.onnx_bytes, _size, _share),
            _row("size as int8 ONNX", before.int8_bytes, after.int8_bytes, _size, _share),
            _row(
                f"int8 accuracy, {self.int8_data} data", before.int8_accuracy, after.int8_accuracy, _percent, _points
            ),
        ]
        keys = {(each.runtime, each.batch_size): None for each in (*before.latencies, *after.latencies)}
        for runtime, size in keys:
            first, second = (
                None if found is None else found.median
                for found in (before.latency(runtime, size), after.latency(runtime, size))
            )
            rows.append(_row(f"{runtime}, batch of {size}", first, second, _milliseconds, _speed))
        return [row for row in rows if row[1:3] not in ((NOTHING, NOTHING), ("", NOTHING))]

    def __str__(self) -> str:
        table = [("", "before", "after", ""), *self.rows]
        widths = [max(len(row[at]) for row in table) for at in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
            for row in table
        ]
        return "\n".join([*lines, "", *self.notes])

    def plot(self, axes: Any = None) -> Any:
        """Draw what is left of every quantity. Returns matplotlib axes; needs the extra `plot`."""
        return call_hook("plot", self, axes)


def _row(
    name: str,
    before: float | None,
    after: float | None,
    show: Callable[[float], str],
    relate: Callable[[float, float], str],
) -> tuple[str, str, str, str]:
    shown = [NOTHING if value is None else show(value) for value in (before, after)]
    return name, shown[0], shown[1], "" if before is None or after is None else relate(before, after)


def _single(name: str, value: float | None) -> tuple[str, str, str, str]:
    """A row with one value for both networks together."""
    return name, "", NOTHING if value is None else _percent(value), ""


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _size(value: float) -> str:
    """Bytes, in the unit that leaves up to four digits before the point."""
    for unit in ("B", "kB", "MB"):
        if value < 9999.5:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.3f} ms"


def _points(before: float, after: float) -> str:
    return f"{100 * (after - before):+.2f} points"


def _share(before: float, after: float) -> str:
    return f"{after / before:.1%}" if before else ""


def _speed(before: float, after: float) -> str:
    return f"{before / after:.2f}x as fast"


def explain_figures(count: int, repeats: int, threads: int) -> tuple[str, ...]:
    """Notes that explain the numbers of a comparison."""
    return (
        f"{count} inputs. Multiply-adds: those of convolutions and matrix products for one input, by "
        "torch.utils.flop_counter.",
        "Difference: root mean squared difference of the outputs, relative to their standard deviation before.",
        "Peak activations: the most bytes alive at once in torch for one input, with the input, without weights.",
        "Size on disk: parameters and buffers as safetensors.",
        f"Latency: median of up to {repeats} samples of a batch on the CPU, before and after in turns, threads: "
        f"{threads}.",
    )

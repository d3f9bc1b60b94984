"""Batch: the data points a network is scored on, from the user's tensors, arrays or loader."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import InvalidInputError

CALIBRATED_ON = "calibrated_on"
"""The attribute of a smaller model with the digests (`digest_rows`) of the data points it was made with: accuracy on
them is not called test accuracy."""


@dataclass(frozen=True)
class Batch:
    """inputs (batch, ...) and labels (batch,); without labels the model's own predictions are used.

    `targets` (batch,) or (batch, outputs) are real-valued labels.
    """

    inputs: Floats
    labels: Ints | None
    targets: Floats | None = None

    def __len__(self) -> int:
        return len(self.inputs)


def gather_batch(inputs: Any, labels: Any = None, *, real: bool = False) -> Batch:
    """From tensors, arrays, or an iterable of batches: of inputs, of sequences of one, or of pairs (inputs, labels).
    `real`: labels may be real numbers."""
    if isinstance(inputs, Mapping):
        raise InvalidInputError(
            f"inputs: found {len(inputs)} of them by name. A program is made of a network with one input; search and "
            "compress take several."
        )
    if _is_array(inputs):
        gathered, given = _array(inputs), None if labels is None else _array(labels)
    elif isinstance(inputs, Iterable) and labels is None:
        gathered, given = _join(inputs)
    else:
        raise InvalidInputError(
            f"inputs: found {type(inputs).__name__}. Accepted: a tensor or array (batch, ...) with labels beside "
            "it, or an iterable of batches or of pairs (inputs, labels)."
        )
    checked = _check_inputs(gathered)
    if real and given is not None and np.issubdtype(given.dtype, np.floating):
        return Batch(checked, None, _check_targets(given, len(checked)))
    return Batch(checked, None if given is None else check_labels(given, len(checked)))


def _join(batches: Iterable[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
    parts = [_split(part) for part in batches]
    if not parts:
        raise InvalidInputError("inputs: the batch is empty. Give at least one data point.")
    if (
        any(not _is_array(part) or len(part) == 0 for part, _ in parts)
        or len({part.shape[1:] for part, _ in parts}) > 1
    ):
        raise InvalidInputError(
            "inputs: an iterable holds batches of one shape, tensors or arrays, or pairs (inputs, labels) of them. "
            "The labels of a single batch go beside it: score(model, inputs, labels)."
        )
    inputs = np.concatenate([_array(part) for part, _ in parts])
    labels = [_array(part) for _, part in parts if part is not None]
    if labels and len(labels) < len(parts):
        raise InvalidInputError("labels: some of the batches have labels and some have none.")
    return inputs, np.concatenate([np.atleast_1d(part) for part in labels]) if labels else None


def _split(part: Any) -> tuple[Any, Any]:
    """Inputs, and labels if there are any. A loader without labels may yield lists of one."""
    match part:
        case [inputs, labels]:
            return inputs, labels
        case [inputs]:
            return inputs, None
        case _:
            return part, None


def _check_inputs(inputs: NDArray[Any]) -> Floats:
    if inputs.ndim < 2:
        raise InvalidInputError(f"inputs: found shape {inputs.shape}. Accepted: (batch, ...).")
    if len(inputs) == 0:
        raise InvalidInputError("inputs: the batch is empty. Give at least one data point.")
    if not np.issubdtype(inputs.dtype, np.floating):
        raise InvalidInputError(
            f"inputs: found {inputs.dtype}. Give the floating-point values the model was trained on, for images "
            "usually pixels / 255 and normalised."
        )
    values = inputs.astype(np.float64)
    if not np.isfinite(values).all():
        bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        raise InvalidInputError(f"inputs: NaN or infinite values in data points {_some(bad)}.")
    return values


def check_labels(labels: NDArray[Any], size: int) -> Ints:
    if labels.shape != (size,):
        raise InvalidInputError(f"labels: found shape {labels.shape} for {size} data points. Accepted: ({size},).")
    if not np.issubdtype(labels.dtype, np.integer):
        raise InvalidInputError(f"labels: found {labels.dtype}. Accepted: integers, the index of the right class.")
    return labels.astype(np.int64)


def _check_targets(targets: NDArray[Any], size: int) -> Floats:
    if targets.ndim not in (1, 2) or len(targets) != size:
        raise InvalidInputError(
            f"labels: found shape {targets.shape} for {size} data points. Accepted: ({size},) or ({size}, outputs)."
        )
    values = targets.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidInputError("labels: NaN or infinite values.")
    return values


def digest_rows(inputs: NDArray[Any]) -> list[str]:
    """A digest of every data point, from its values in single precision."""
    rows = np.ascontiguousarray(inputs, dtype=np.float32).reshape(len(inputs), -1)
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


def check_classes(labels: Ints, class_count: int) -> None:
    outside = np.flatnonzero((labels < 0) | (labels >= class_count))
    if not len(outside):
        return
    found = f"labels: found {_some(np.unique(labels[outside]))}"
    if class_count == 1:
        raise InvalidInputError(
            f"{found} for a network with one output, which has no classes to choose from. Leave the labels out: give "
            "the inputs alone, or batches of them; compress and plan judge such a network by evaluate=."
        )
    raise InvalidInputError(
        f"{found}. Accepted: 0 to {class_count - 1}, one for each of the network's {class_count} outputs."
    )


def _is_array(values: Any) -> bool:
    return isinstance(values, np.ndarray) or hasattr(values, "detach")


def _array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if "float16" in str(values.dtype):  # numpy has no bfloat16
            values = values.float()
    return np.asarray(values)


def _some(values: NDArray[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:5])
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"


def choose_evenly(labels: Ints, count: int, seed: int) -> Ints:
    """Ascending indices of `count` random data points, with equally many of every class as far as possible."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    rank = np.zeros(len(labels), dtype=np.int64)  # the rank of a data point in its class
    for label in np.unique(labels):
        own = shuffled[labels[shuffled] == label]
        rank[own] = np.arange(len(own))
    first = shuffled[np.argsort(rank[shuffled], kind="stable")[:count]]
    return np.sort(first)

"""Rows: model inputs of any nesting, counted, sliced and joined along their first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from critical_neurons.core.batch import digest_rows
from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.joined import Joined

CHECKED_AT_ONCE = 64
"""Rows checked for NaN at once, to save memory."""


@dataclass(frozen=True)
class Whole:
    """Inputs that cannot be split, such as the nodes of a graph: they count as one row."""

    inputs: Tensor | Sequence[Any] | Mapping[str, Any]


Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any] | Whole
"""Arguments of a model: model(tensor), model(*sequence) or model(**mapping), with tensors in any nesting.

The first axis of all tensors counts rows. If tensors differ in the number of rows, such as concatenated tokens of
several texts and their offsets, the inputs cannot be split and count as one row.
"""


def count_rows(inputs: Inputs) -> int:
    """The length of all tensors; 1 if they cannot be split."""
    first = next(find_tensors(inputs), None)
    if first is None:
        raise InvalidInputError("inputs: found no tensor or array among them. Give at least one.")
    return 1 if is_whole(inputs) else len(first)


def as_whole(inputs: Inputs) -> Whole:
    return inputs if isinstance(inputs, Whole) else Whole(inputs)


def is_whole(inputs: Inputs) -> bool:
    """Whether the inputs cannot be split into rows."""
    if isinstance(inputs, Whole):
        return True
    sizes = {tuple(values.shape[:1]) for values in find_tensors(inputs)}
    return len(sizes) > 1 or sizes == {()}


def take_outputs(outputs: Sequence[Tensor], inputs: Inputs, rows: Tensor) -> list[Tensor]:
    """The outputs for these rows of the inputs; everything if the inputs cannot be split."""
    return [*outputs] if is_whole(inputs) else [each[rows] for each in outputs]


def join_outputs(batches: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """The outputs of several batches as those of one; of a single batch they may have any shape."""
    return [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*batches, strict=True)]


def take_rows(inputs: Inputs, rows: Tensor, device: torch.device | None = None) -> Inputs:
    """Copies of these rows, optionally on another device; everything if the inputs cannot be split."""
    if is_whole(inputs):
        return map_inputs(inputs, lambda values: values.clone().to(device))
    return map_inputs(inputs, lambda values: values[rows.to(values.device)].to(device))


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    args, kwargs = split_arguments(inputs)
    return model(*args, **kwargs)


def split_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(inputs, Whole):
        return split_arguments(inputs.inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def find_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value of any kind: containers, and attributes of objects."""
    return (tensor for _, tensor in name_tensors(value))


def name_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors with their paths: "" is the value itself, "boxes.0" the first element of `boxes`."""
    return _name_tensors(value, "", frozenset())


def _name_tensors(value: Any, name: str, seen: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif id(value) not in seen and not isinstance(value, type | nn.Module):
        parts: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            parts = value.items()
        elif isinstance(value, list | tuple | set | frozenset):
            parts = enumerate(value)
        elif hasattr(value, "__dict__") and not callable(value):
            parts = vars(value).items()
        for key, part in parts:
            yield from _name_tensors(part, f"{name}.{key}" if name else str(key), seen | {id(value)})


def split_rows(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Batches of `size` rows, as views; the last may have fewer."""
    if is_whole(inputs):
        yield inputs
        return
    for first in range(0, count_rows(inputs), size):
        yield map_inputs(inputs, lambda values, first=first: values[first : first + size])  # type: ignore[misc]


def gather_inputs(inputs: Any) -> Inputs:
    """The user's inputs as tensors.

    Accepts a tensor or array; a nested tuple or mapping of them, for a model of several inputs; or an iterable of
    batches of these, each alone, in a sequence of one, or with labels, which are dropped. Batches are read once, in
    order.
    """
    return gather_labelled(inputs)[0]


def gather_labelled(inputs: Any) -> tuple[Inputs, Tensor | None]:
    """`gather_inputs`, with the labels of the batches: None if there are none or they cannot be joined."""
    labels = None
    if isinstance(inputs, Whole):
        return inputs, None
    if _is_array(inputs) or isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and not _are_batches(inputs)):
        gathered: Inputs = _convert(inputs)
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes):
        beside: list[Any] = []
        gathered = join_batches(_list_inputs(inputs, beside))
        labels = _join_labels(beside)
    else:
        raise InvalidInputError(
            f"inputs: found {type(inputs).__name__}. Accepted: a tensor or array (batch, ...), a tuple or dict of "
            "them for a model of several inputs, or an iterable of batches."
        )
    if count_rows(gathered) == 0:
        raise InvalidInputError("inputs: the batch is empty. Give at least one data point.")
    for values in find_tensors(gathered):
        _require_finite(values)
    return gathered, labels


def _require_finite(values: Tensor) -> None:
    if not values.is_floating_point() or values.numel() == 0:
        return
    rows = values.reshape(len(values) if values.ndim else 1, -1)
    finite = torch.cat([torch.isfinite(some).all(1) for some in torch.split(rows, CHECKED_AT_ONCE)])
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        raise InvalidInputError(f"inputs: NaN or infinite values in data points {', '.join(map(str, bad[:5]))}.")


def match_model(inputs: Inputs, model: nn.Module) -> Inputs:
    """Move inputs to the model's device, and floating-point values to the type of its parameters."""
    like = next((each for each in model.parameters() if each.is_floating_point()), None)
    if like is None:
        return inputs

    def convert(values: Tensor) -> Tensor:
        return values.to(like) if values.is_floating_point() else values.to(like.device)

    return map_inputs(inputs, convert)


def digest_inputs(inputs: Inputs) -> list[str]:
    """A digest of every data point, by which plans and scores recognise it."""
    parts = [digest_rows(values.detach().cpu().float().numpy()) for values in _list_by_row(inputs)]
    return parts[0] if len(parts) == 1 else ["".join(each) for each in zip(*parts, strict=True)]


def count_numbers(inputs: Inputs) -> int:
    """Numbers in one row."""
    return sum(values[0].numel() for values in _list_by_row(inputs))


def _list_by_row(inputs: Inputs) -> list[Tensor]:
    """All tensors, with a first axis that counts rows."""
    whole = is_whole(inputs)
    return [values[None] if whole else values for values in find_tensors(inputs)]


def map_inputs(inputs: Inputs, convert: Callable[[Tensor], Tensor]) -> Inputs:
    """The same nesting with converted tensors."""
    if isinstance(inputs, Whole):
        return as_whole(map_inputs(inputs.inputs, convert))
    mapped: Inputs = _map(inputs, Tensor, convert)
    return mapped


def _map(value: Any, kind: type | tuple[type, ...], convert: Callable[[Any], Any]) -> Any:
    """Convert everything of one kind in nested mappings, tuples and lists, and keep the rest."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, Mapping):
        return {name: _map(part, kind, convert) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_map(part, kind, convert) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(part, kind, convert) for part in value)
    return value


def _convert(inputs: Any) -> Inputs:
    """Arrays as tensors."""
    converted: Inputs = _map(inputs, (np.ndarray, Tensor), _tensor)
    return converted


def _list_inputs(batches: Iterable[Any], labels: list[Any]) -> Iterator[Inputs]:
    """The inputs of each batch; labels are appended to the list."""
    for batch in batches:
        inputs, beside = _split_labels(batch)
        labels.append(beside)
        yield gather_inputs(inputs)


def join_batches(batches: Iterator[Inputs]) -> Inputs:
    """Concatenate batches, holding one at a time; many of them go to a temporary file, see `Joined`."""
    first = next(batches, None)
    if first is None:
        raise InvalidInputError("inputs: the batch is empty. Give at least one data point.")
    second = next(batches, None)
    if second is None:
        return first
    joined = [Joined() for _ in find_tensors(first)]
    for batch in chain((first, second), batches):
        if _describe(batch) != _describe(first):
            raise InvalidInputError(
                "inputs: an iterable holds batches of one kind and shape; found "
                f"{_describe(first)} and {_describe(batch)}. The labels of a single batch go beside it."
            )
        if is_whole(batch):
            raise InvalidInputError(
                f"inputs: batches of {_describe(first)} cannot be joined, as their tensors differ in how many rows "
                "they have. Give one batch."
            )
        for part, values in zip(joined, find_tensors(batch), strict=True):
            part.add(values)
    parts = iter(joined)
    return map_inputs(first, lambda _: next(parts).finish())


def _describe(batch: Inputs) -> str:
    shapes = {
        name: f"(batch{''.join(f', {size}' for size in values.shape[1:])})" for name, values in name_tensors(batch)
    }
    return ", ".join(f"{name} {shape}".strip() for name, shape in sorted(shapes.items()))


def _split_labels(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels of a loader's batch: a bare input, a list of one, or a pair."""
    if isinstance(batch, list | tuple):
        match batch:
            case [inputs]:
                return inputs, None
            case [inputs, labels]:
                return inputs, labels
            case _:
                return tuple(batch), None
    return batch, None


def _join_labels(labels: Sequence[Any]) -> Tensor | None:
    if not all(_is_array(each) and each.ndim for each in labels) or len({each.shape[1:] for each in labels}) > 1:
        return None
    return torch.cat([_tensor(each).cpu() for each in labels])


def _are_batches(values: tuple[Any, ...]) -> bool:
    """Whether a tuple holds batches, such as pairs of inputs and labels, rather than a model's arguments."""
    return not values or all(isinstance(part, list | tuple) for part in values)


def _is_array(values: Any) -> bool:
    return isinstance(values, np.ndarray | Tensor)


def _tensor(values: NDArray[Any] | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    try:
        return torch.from_numpy(np.asarray(values, order="C"))
    except TypeError as error:
        raise InvalidInputError(f"inputs: found an array of {values.dtype}. Accepted: numbers.") from error

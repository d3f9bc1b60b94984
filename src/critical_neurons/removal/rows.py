"""The inputs of a model, row by row: one tensor, or several side by side, in order or by name."""

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
"""Rows that are looked through for NaN at once, so that little memory is taken beside them."""


@dataclass(frozen=True)
class Whole:
    """Inputs that belong together, as the nodes of a graph: they count as one row."""

    inputs: Tensor | Sequence[Any] | Mapping[str, Any]


Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any] | Whole
"""What a model is called with: model(tensor), model(*sequence) or model(**mapping), with tensors in any nesting.

The first axis of all tensors counts rows. Where they do not agree on how many, as with tokens of several texts one
behind the other and offsets beside them, the inputs are one row as well.
"""


def count_rows(inputs: Inputs) -> int:
    """As many as every tensor has; one where they differ."""
    first = next(find_tensors(inputs), None)
    if first is None:
        raise InvalidInputError("inputs: found no tensor or array among them. Give at least one.")
    return 1 if is_whole(inputs) else len(first)


def as_whole(inputs: Inputs) -> Whole:
    return inputs if isinstance(inputs, Whole) else Whole(inputs)


def is_whole(inputs: Inputs) -> bool:
    """Whether the inputs cannot be taken apart into rows."""
    if isinstance(inputs, Whole):
        return True
    sizes = {tuple(values.shape[:1]) for values in find_tensors(inputs)}
    return len(sizes) > 1 or sizes == {()}


def take_rows(inputs: Inputs, rows: Tensor, device: torch.device | None = None) -> Inputs:
    """Copies of these rows, on a device if one is given; all there is where it cannot be taken apart."""
    if is_whole(inputs):
        return map_inputs(inputs, lambda values: values.clone().to(device))
    return map_inputs(inputs, lambda values: values[rows.to(values.device)].to(device))


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    args, kwargs = split_arguments(inputs)
    return model(*args, **kwargs)


def split_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By position and by name."""
    if isinstance(inputs, Whole):
        return split_arguments(inputs.inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def find_tensors(value: Any) -> Iterator[Tensor]:
    """In a value of any kind that a model takes or gives: containers, and the attributes of objects."""
    return (tensor for _, tensor in name_tensors(value))


def name_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The same with their names: "" is the value itself, "boxes.0" the first part of its part `boxes`."""
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
    """Whatever the user has to what a model is called with, in tensors.

    A tensor or array; a tuple or mapping of them, in any nesting, for a model of several inputs; or an iterable of
    batches, each one of these, alone, in a sequence of one or with labels beside it, which are left out. Batches are
    read once, in their order; many of them are kept in a temporary file rather than in memory, see `Joined`.
    """
    return gather_labelled(inputs)[0]


def gather_labelled(inputs: Any) -> tuple[Inputs, Tensor | None]:
    """The same, and the labels that come with the batches: None where there are none, or none that can be joined."""
    labels = None
    if isinstance(inputs, Whole):
        return inputs, None
    if _is_array(inputs) or isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and not _are_batches(inputs)):
        gathered: Inputs = _convert(inputs)
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes):
        beside: list[Any] = []
        gathered = _join(_list_inputs(inputs, beside))
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
    """On the device of the model's parameters; floating-point values in their type."""
    like = next((each for each in model.parameters() if each.is_floating_point()), None)
    if like is None:
        return inputs

    def convert(values: Tensor) -> Tensor:
        return values.to(like) if values.is_floating_point() else values.to(like.device)

    return map_inputs(inputs, convert)


def digest_inputs(inputs: Inputs) -> list[str]:
    """What every data point is known by later on."""
    parts = [digest_rows(values.detach().cpu().float().numpy()) for values in _list_by_row(inputs)]
    return parts[0] if len(parts) == 1 else ["".join(each) for each in zip(*parts, strict=True)]


def count_numbers(inputs: Inputs) -> int:
    """In one row."""
    return sum(values[0].numel() for values in _list_by_row(inputs))


def _list_by_row(inputs: Inputs) -> list[Tensor]:
    """With a first axis that counts rows."""
    whole = is_whole(inputs)
    return [values[None] if whole else values for values in find_tensors(inputs)]


def map_inputs(inputs: Inputs, convert: Callable[[Tensor], Tensor]) -> Inputs:
    """The same with other tensors."""
    if isinstance(inputs, Whole):
        return as_whole(map_inputs(inputs.inputs, convert))
    mapped: Inputs = _map(inputs, Tensor, convert)
    return mapped


def _map(value: Any, kind: type | tuple[type, ...], convert: Callable[[Any], Any]) -> Any:
    """Of what nests in mappings, tuples and lists all that is of a kind; the rest, as None or a number, stays."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, Mapping):
        return {name: _map(part, kind, convert) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named one
        return type(value)(*(_map(part, kind, convert) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(part, kind, convert) for part in value)
    return value


def _convert(inputs: Any) -> Inputs:
    """Tensors in place of arrays."""
    converted: Inputs = _map(inputs, (np.ndarray, Tensor), _tensor)
    return converted


def _list_inputs(batches: Iterable[Any], labels: list[Any]) -> Iterator[Inputs]:
    """One after the other, what is beside them added to the labels."""
    for batch in batches:
        inputs, beside = _split_labels(batch)
        labels.append(beside)
        yield gather_inputs(inputs)


def _join(batches: Iterator[Inputs]) -> Inputs:
    """Each is forgotten once its rows are where the others are."""
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
    """A loader gives inputs alone, as a list of one, or with labels beside them."""
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
    """Pairs of inputs and labels, say. What else is in a tuple are the inputs of a model, in their order."""
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

"""The inputs of a model, row by row: one tensor, or several side by side, in order or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.batch import digest_rows
from critical_neurons.errors import InvalidInputError

Inputs: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""What a model is called with: model(tensor), model(*sequence) or model(**mapping). The first axis counts rows."""


def count_rows(inputs: Inputs) -> int:
    """As many as every tensor has."""
    named = _name(inputs)
    shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in named.items()}
    lengths = {shape[0] if shape else None for shape in shapes.values()}
    length = next(iter(lengths), None)
    if len(lengths) != 1 or length is None:
        found = ", ".join(f"{name} {shape or type(named[name]).__name__}" for name, shape in shapes.items())
        raise InvalidInputError(
            f"inputs: found {found or 'nothing'}. Accepted: tensors, all with as many rows along their first axis."
        )
    return length


def take_rows(inputs: Inputs, rows: Tensor, device: torch.device | None = None) -> Inputs:
    """Copies of these rows, on a device if one is given."""
    if isinstance(inputs, Tensor):
        return inputs[rows.to(inputs.device)].to(device)
    if isinstance(inputs, Mapping):
        return {name: value[rows.to(value.device)].to(device) for name, value in inputs.items()}
    return tuple(value[rows.to(value.device)].to(device) for value in inputs)


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


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
    """Batches of so many rows, as views; the last may have fewer."""
    for first in range(0, count_rows(inputs), size):
        yield map_inputs(inputs, lambda values, first=first: values[first : first + size])  # type: ignore[misc]


def _name(inputs: Inputs) -> Mapping[str, Any]:
    if isinstance(inputs, Tensor):
        return {"": inputs}
    if isinstance(inputs, Mapping):
        return inputs
    if isinstance(inputs, Sequence):
        return {f"[{place}]": value for place, value in enumerate(inputs)}
    raise InvalidInputError(
        f"inputs: found {type(inputs).__name__}. Accepted: a tensor, or a sequence or mapping of tensors."
    )


def gather_inputs(inputs: Any) -> Inputs:
    """Whatever the user has to what a model is called with, in tensors.

    A tensor or array; a tuple or mapping of them for a model of several inputs; or an iterable of batches, each one
    of these, alone, in a sequence of one or with labels beside it, which are left out.
    """
    return gather_labelled(inputs)[0]


def gather_labelled(inputs: Any) -> tuple[Inputs, Tensor | None]:
    """The same, and the labels that come with the batches: None where there are none, or none that can be joined."""
    labels = None
    if _is_array(inputs):
        gathered: Inputs = _tensor(inputs)
    elif isinstance(inputs, Mapping):
        gathered = {name: _tensor(values) for name, values in inputs.items()}
    elif isinstance(inputs, tuple) and inputs and all(_is_array(values) for values in inputs):
        gathered = tuple(map(_tensor, inputs))
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes):
        pairs = [_split_labels(batch) for batch in inputs]
        gathered = _join([gather_inputs(batch) for batch, _ in pairs])
        labels = _join_labels([beside for _, beside in pairs])
    else:
        raise InvalidInputError(
            f"inputs: found {type(inputs).__name__}. Accepted: a tensor or array (batch, ...), a tuple or dict of "
            "them for a model of several inputs, or an iterable of batches."
        )
    count = count_rows(gathered)
    if count == 0:
        raise InvalidInputError("inputs: the batch is empty. Give at least one data point.")
    for values in find_tensors(gathered):
        if values.is_floating_point() and not torch.isfinite(values).all():
            finite = torch.isfinite(values).reshape(len(values), -1).all(1)
            bad = (~finite).nonzero().flatten().tolist()
            raise InvalidInputError(f"inputs: NaN or infinite values in data points {', '.join(map(str, bad[:5]))}.")
    return gathered, labels


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
    parts = [digest_rows(values.detach().cpu().float().numpy()) for values in find_tensors(inputs)]
    return parts[0] if len(parts) == 1 else ["".join(each) for each in zip(*parts, strict=True)]


def count_numbers(inputs: Inputs) -> int:
    """In one row."""
    return sum(values[0].numel() for values in find_tensors(inputs))


def map_inputs(inputs: Inputs, convert: Callable[[Tensor], Tensor]) -> Inputs:
    if isinstance(inputs, Tensor):
        return convert(inputs)
    if isinstance(inputs, Mapping):
        return {name: convert(values) for name, values in inputs.items()}
    return tuple(convert(values) for values in inputs)


def _join(batches: Sequence[Inputs]) -> Inputs:
    if not batches:
        raise InvalidInputError("inputs: the batch is empty. Give at least one data point.")
    first = batches[0]
    if any(_describe(batch) != _describe(first) for batch in batches):
        raise InvalidInputError(
            "inputs: an iterable holds batches of one kind and shape; found "
            f"{' and '.join(dict.fromkeys(map(_describe, batches)))}. The labels of a single batch go beside it."
        )
    if isinstance(first, Tensor):
        return torch.cat([each for batch in batches for each in find_tensors(batch)])
    if isinstance(first, Mapping):
        named = [batch for batch in batches if isinstance(batch, Mapping)]
        return {name: torch.cat([batch[name] for batch in named]) for name in first}
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


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


def _is_array(values: Any) -> bool:
    return isinstance(values, np.ndarray | Tensor)


def _tensor(values: Any) -> Tensor:
    if not _is_array(values) or values.ndim == 0:
        raise InvalidInputError(f"inputs: found {type(values).__name__}. Accepted: tensors or arrays (batch, ...).")
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))

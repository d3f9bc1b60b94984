"""Settings: helpers for the settings types in formulation, budget, solver and distillation.

The help text of a field is written once, beside it; the docstring of its type and the command line are made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, field, fields
from numbers import Integral, Real
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

from critical_neurons.errors import InvalidSettingError

Compensation: TypeAlias = Literal["none", "bias", "least_squares", "distil"]
EffortName: TypeAlias = Literal["quick", "standard", "thorough"]
DistanceName: TypeAlias = Literal["auto", "divergence", "squares"]
OutputDistance: TypeAlias = Callable[[Any, Any], Any]
"""A function of the outputs of the smaller and the original model: a tensor with one number, or one per input."""

_Kind = TypeVar("_Kind", bound=type)

EXAMPLE = "    >>> "
"""How the example in a docstring begins."""


def setting(default: Any, text: str, *, option: str | None = None) -> Any:
    """A field with its help text, and the name of its command line option if that differs.

    `default` is MISSING for a required field, `dict` for an empty mapping.
    """
    metadata = {"help": text, "option": option}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def data(text: str, *, compare: bool = False) -> Any:
    """A field for data rather than a setting: not an option of a command, and not recorded in files."""
    return field(default=None, compare=compare, metadata={"help": text, "data": True})


def list_settings(kind: Any) -> list[Field[Any]]:
    """The fields of a type, or of a value of it, that are settings rather than data."""
    return [each for each in fields(kind) if not each.metadata.get("data")]


def help_of(kind: Any, name: str) -> str:
    """The help text of a field."""
    return next(str(each.metadata["help"]) for each in fields(kind) if each.name == name)


def explained(kind: _Kind) -> _Kind:
    """Add the help texts of the fields to the docstring of a type, before its example."""
    lines = [f"    * `{each.name}`: {each.metadata['help']}" for each in fields(kind)]
    text, mark, example = (kind.__doc__ or "").partition(EXAMPLE)
    kind.__doc__ = "\n".join([f"{text.rstrip()}\n", *lines, *([f"\n{mark}{example}"] if mark else [])])
    return kind


class Plain:
    """Settings that convert to plain data, ready for JSON, and back."""

    def to_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in list_settings(self)}
        return {name: value.to_dict() if isinstance(value, Plain) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)

    def _settle(self, name: str, kind: Any, holds: Callable[[Any], bool], accepted: str) -> None:
        """Check a number, and store it as a Python int or float."""
        object.__setattr__(self, name, check_number(name, getattr(self, name), kind, holds, accepted))


def check_number(name: str, value: Any, kind: Any, holds: Callable[[Any], bool], accepted: str) -> Any:
    """The number as a Python int, if `kind` is Integral, or float."""
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
        raise InvalidSettingError(f"{name}: found {value!r}. Accepted: {accepted}.")
    return int(value) if kind is Integral else float(value)


def is_amount(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def check_share(name: str, value: Any) -> float:
    share: float = check_number(name, value, Real, lambda share: 0 < share <= 1, "a share above 0 and up to 1")
    return share


def check_seed(seed: Any) -> int:
    found: int = check_number(
        "seed", seed, Integral, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2**31 - 1"
    )
    return found


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidSettingError(f"{name}: found {value!r}. Accepted: True, False.")


def check_choice(name: str, value: Any, choices: Any, further: str = "") -> None:
    """`choices` is a Literal; `further` is appended to the accepted values in the message."""
    if not isinstance(value, str) or value not in get_args(choices):
        accepted = ", ".join(map(repr, get_args(choices)))
        raise InvalidSettingError(f"{name}: found {value!r}. Accepted: {accepted}{further}.")


def as_names(ignore: str | Collection[str]) -> tuple[str, ...]:
    """One name of a layer, or several."""
    if isinstance(ignore, str):
        return (ignore,)
    if not isinstance(ignore, Collection) or not all(isinstance(name, str) for name in ignore):
        raise InvalidSettingError(f"ignore: found {ignore!r}. Accepted: names of layers.")
    return tuple(ignore)

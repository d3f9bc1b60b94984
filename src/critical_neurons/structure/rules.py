"""Rules: what a call of torch does to labels, in one table by the name of the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from critical_neurons.structure.tags import Tag, blank

if TYPE_CHECKING:
    from critical_neurons.structure.run import LabelledRun

Tags: TypeAlias = Sequence[Tag | None]


class Call:
    """One call: its name, arguments and outputs."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        self.func, self.args, self.kwargs, self.outputs = func, args, dict(kwargs), outputs
        self.name = name_call(func)

    @property
    def output(self) -> Tensor:
        """The first output."""
        first: Tensor = self.outputs[0] if isinstance(self.outputs, tuple | list) else self.outputs
        return first

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema of the call."""
        if name in self.kwargs:
            return self.kwargs[name]
        place, value = _list_arguments(self.func).get(name, (len(self.args), None))
        if place < len(self.args):
            return self.args[place]
        return default if value is None else value

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, lists of them included."""
        return list_parts((*self.args, *self.kwargs.values()))


Rule: TypeAlias = "Callable[[LabelledRun, Call], Tags]"
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@cache
def name_call(func: Any) -> str:
    """`relu` for aten::relu, its overloads and its in-place form."""
    name: str = func._schema.name.partition("::")[2]
    return name.rstrip("_") if name.endswith("_") and not name.startswith("__") else name


@cache
def _list_arguments(func: Any) -> dict[str, tuple[int, Any]]:
    """By name: the place of every argument and its default value, if it is positional."""
    listed = enumerate(func._schema.arguments)
    return {each.name: (sys.maxsize if each.kwarg_only else place, each.default_value) for place, each in listed}


@cache
def _has_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def apply_rule(run: LabelledRun, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Tags:
    """The tags of the outputs."""
    call = Call(func, args, kwargs, outputs)
    if _has_out(func):
        return keep_all(run, call, f"{call.name} writes it into another tensor")
    found = RULES.get(call.name)
    if found is None and torch.Tag.pointwise in func.tags:
        found = RULES["pointwise"]
    return (found or keep_all)(run, call)


def keep_all(run: LabelledRun, call: Call, why: str = "") -> Tags:
    """For a call without a rule: all units that reach it must stay."""
    for values in call.tensors:
        run.keep(run.tag(values).labels, why or f"it is read by {call.name}")
    constant = not any(run.is_value(values) for values in call.tensors)
    return [
        blank(each.ndim, constant=constant) if isinstance(each, Tensor) else None
        for each in list_outputs(call.outputs)
    ]


def list_parts(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among some arguments or outputs, and in lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += list_parts(value)
    return found


def list_outputs(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]

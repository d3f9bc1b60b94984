"""Rules: what a call of torch does to labels, in one table by the name of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if place < len(self.args) and not argument.kwarg_only:
                    return self.args[place]
                return argument.default_value if argument.has_default_value() else default
        return default

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, lists of them included."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            parts = value if isinstance(value, tuple | list) else [value]
            found += [part for part in parts if isinstance(part, Tensor)]
        return found


Rule: TypeAlias = "Callable[[LabelledRun, Call], Tags]"
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def name_call(func: Any) -> str:
    """`relu` for aten::relu, its overloads and its in-place form."""
    name: str = func._schema.name.partition("::")[2]
    return name.rstrip("_") if name.endswith("_") and not name.startswith("__") else name


def apply_rule(run: LabelledRun, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Tags:
    """The tags of the outputs."""
    call = Call(func, args, kwargs, outputs)
    if any(argument.is_out for argument in func._schema.arguments):
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


def list_outputs(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]

"""Replay: rerun a model on the same inputs after some modules changed, reusing outputs from before the first change.

Outputs of earlier modules are taken from the first run; code between modules runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from critical_neurons.removal.rows import Inputs, call_model, map_inputs


@dataclass
class _Call:
    """A call of a module: its output and that tensor's version, the index of the next call outside it, and whether it
    or a module inside it changed its attributes, which other modules may read."""

    module: nn.Module
    given: Any = None
    version: int = 0
    after: int = 0
    notes: bool = False

    @property
    def is_kept(self) -> bool:
        """Outputs changed in place later, and those of calls with side effects, are computed again."""
        return isinstance(self.given, Tensor) and self.given._version == self.version and not self.notes


class Replay:
    """A recorded run of the model on some inputs, without gradients, and reruns of it."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self._model, self._inputs = model, inputs
        self._calls: list[_Call] = []
        self._next = self._first = 0
        with self._in_place_of_forward(self._record):
            call_model(model, self._copy_inputs())

    def run(self, changed: Collection[nn.Module]) -> Any:
        """The model's output after these modules were changed."""
        places = (place for place, call in enumerate(self._calls) if call.module in changed)
        self._next, self._first = 0, next(places, 0)
        with self._in_place_of_forward(self._repeat):
            return call_model(self._model, self._copy_inputs())

    def _copy_inputs(self) -> Inputs:
        return map_inputs(self._inputs, Tensor.clone)  # a forward pass may change them in place

    def _record(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, before = _Call(module), _list_attributes(module)
        self._calls.append(call)
        place = len(self._calls)
        call.given = forward(*args, **kwargs)
        call.after = len(self._calls)
        inside = any(each.notes for each in self._calls[place:])
        call.notes = inside or not _are_same(_list_attributes(module), before)
        if isinstance(call.given, Tensor):
            call.version = call.given._version
        return call.given

    def _repeat(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._next < self._first:
            call = self._calls[self._next]
            if call.module is not module:  # the forward pass takes another path than before
                self._first = 0
            elif call.after <= self._first and call.is_kept:
                self._next = call.after
                return call.given.clone()  # later code may change it in place
            else:
                self._next += 1
        return forward(*args, **kwargs)

    @contextmanager
    def _in_place_of_forward(self, call: Callable[..., Any]) -> Iterator[None]:
        own = {module: vars(module).get("forward") for module in self._model.modules()}
        try:
            for module in own:
                vars(module)["forward"] = partial(call, module, module.forward)
            yield
        finally:
            for module, forward in own.items():
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward


def _list_attributes(module: nn.Module) -> dict[str, tuple[Any, int]]:
    """Attributes that may hold tensors, with their lengths, which a forward pass may change."""
    return {
        name: (value, 0 if isinstance(value, Tensor) else len(value))
        for name, value in vars(module).items()
        if isinstance(value, Tensor | list | dict | tuple)
    }


def _are_same(found: dict[str, tuple[Any, int]], before: dict[str, tuple[Any, int]]) -> bool:
    return found.keys() == before.keys() and all(
        value is before[name][0] and length == before[name][1] for name, (value, length) in found.items()
    )

"""Replay: a model run again on the same inputs after some of its modules changed, from the first of them on.

What modules gave before that is taken from the first run; what the forward pass does between modules is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from critical_neurons.removal.rows import Inputs, call_model


@dataclass
class _Call:
    """A call of a module, what it gave, the version of that memory, and the number of the next call outside it."""

    module: nn.Module
    given: Any = None
    version: int = 0
    after: int = 0

    @property
    def is_kept(self) -> bool:
        """What was changed in place later is computed anew."""
        return isinstance(self.given, Tensor) and self.given._version == self.version


class Replay:
    """A run of the model on some inputs, without gradients, and further runs."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self._model, self._inputs = model, inputs
        self._calls: list[_Call] = []
        self._next = self._first = 0
        with self._in_place_of_forward(self._record):
            call_model(model, inputs)

    def run(self, changed: Collection[nn.Module]) -> Any:
        """What the model gives now that these modules are not what they were."""
        places = (place for place, call in enumerate(self._calls) if call.module in changed)
        self._next, self._first = 0, next(places, 0)
        with self._in_place_of_forward(self._repeat):
            return call_model(self._model, self._inputs)

    def _record(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _Call(module)
        self._calls.append(call)
        call.given = forward(*args, **kwargs)
        call.after = len(self._calls)
        if isinstance(call.given, Tensor):
            call.version = call.given._version
        return call.given

    def _repeat(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._next < self._first:
            call = self._calls[self._next]
            if call.module is not module:  # the forward pass goes another way than before
                self._first = 0
            elif call.after <= self._first and call.is_kept:
                self._next = call.after
                return call.given.clone()  # for what works in place on it
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

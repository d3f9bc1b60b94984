"""State: what a model keeps from one run to the next."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn

from critical_neurons.removal.copies import FIXED
from critical_neurons.removal.same_outputs import FAILURES

CONTAINERS = frozenset({dict, OrderedDict, set, list, tuple})


class ModelState:
    """All that the modules of a model refer to, to find out whether a run has changed it. Tensors are known by their
    versions; of buffers there are copies, since writing to `.data` does not change the version."""

    def __init__(self, model: nn.Module) -> None:
        self._found = _list_contents(model)
        self._buffers = {name: values.clone() for name, values in model.named_buffers()}

    def has_changed(self, model: nn.Module) -> bool:
        try:
            return self._found != _list_contents(model) or bool(self.list_changed(model))
        except FAILURES:  # other objects, which cannot be compared
            return True

    def list_changed(self, model: nn.Module) -> list[str]:
        """The buffers that have other values than before."""
        buffers = dict(model.named_buffers())
        return [name for name, old in self._buffers.items() if name in buffers and not _is_same(buffers[name], old)]


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or (one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()))


def _list_contents(model: nn.Module) -> list[tuple[Any, ...]]:
    """The contents of everything that a model refers to, in a fixed order. Of objects of unknown kinds something new
    each time."""
    found: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            parts = tuple(value.values())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            parts = tuple(value)
        elif isinstance(value, Tensor):
            parts = (0 if value.is_inference() else value._version,)
        elif isinstance(value, type):
            parts = ()
        elif hasattr(value, "__dict__"):
            parts = (vars(value),)
        else:
            found.append((object(),))
            continue
        found.append(parts)
        waiting += [part for part in parts if not (type(part) in FIXED or (type(part) in CONTAINERS and not part))]
    return found

"""Dry run: one forward pass of the original on a few inputs: order of calls, memory in use, inputs of batch norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from critical_neurons.removal.refit.least_squares import BatchNorm
from critical_neurons.removal.refit.passes import find_input
from critical_neurons.removal.rows import Inputs, call_model, find_tensors


@dataclass(frozen=True)
class DryRun:
    """The modules in the order of their first calls, the bytes that a pass holds when it pauses there, and the
    modules whose outputs are read by batch norms among them and by nothing else."""

    modules: tuple[str, ...]
    held: tuple[int, ...]
    absorbed: frozenset[str]


def run_dry(model: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> DryRun:
    watch = _CallWatch(model)
    held: dict[str, int] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(module, BatchNorm):
            watch.note_norm(find_input(args, kwargs))

    def leave(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Tensor) -> None:
            watch.in_norm = False
            watch.note_given(name, given)
            if name not in held:
                held[name] = watch.count_bytes()

        return note

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave(name), with_kwargs=True))
        stack.enter_context(watch)
        watch.note_inputs(inputs)
        call_model(model, inputs)
    return DryRun(tuple(held), tuple(held.values()), watch.find_absorbed())


class _CallWatch(TorchFunctionMode):
    """Observes all inputs and outputs of torch functions while the model runs, by weak references."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.in_norm = False
        self._own = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, tuple[ref[Tensor], str]] = {}
        self._norms: set[str] = set()
        self._others: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        tensors = list(find_tensors(given))
        for value in tensors:
            self._note(value)
        if tensors and not self.in_norm:  # calls without tensor outputs only ask for shapes
            self._others |= {self._name(value) for value in find_tensors((args, kwargs))}
        return given

    def note_inputs(self, inputs: Inputs) -> None:
        for value in find_tensors(inputs):
            self._note(value)

    def note_given(self, name: str, value: Tensor) -> None:
        self._given[id(value)] = ref(value), name

    def note_norm(self, value: Tensor) -> None:
        self._norms.add(self._name(value))
        self.in_norm = True

    def find_absorbed(self) -> frozenset[str]:
        return frozenset(self._norms - self._others - {""})

    def count_bytes(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._storages.values())

    def _name(self, value: Tensor) -> str:
        """The module whose output it is, if any."""
        known, name = self._given.get(id(value), (None, ""))
        return name if known is not None and known() is value else ""

    def _note(self, value: Tensor) -> None:
        if value.layout == torch.strided and type(value) is Tensor:
            storage = value.untyped_storage()
            if storage._cdata not in self._own:
                held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage._cdata] = held, storage.nbytes()

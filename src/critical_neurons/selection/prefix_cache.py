"""Prefix cache: what a model computes of its inputs before anything that changes from run to run, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from critical_neurons.removal.refit.im2col import Weighted

HELD_BYTES = 2**28
"""What may be held; modules that are reached later and no longer fit are run each time."""


class Front:
    """For a model that is run again and again on parts of the same inputs: its linear layers and convolutions that no
    change reaches.

    `probe` runs the model on a few inputs. What is going to change takes part in gradients then, and nothing else.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], object], input_count: int) -> None:
        modules = [module for module in model.modules() if isinstance(module, Weighted)]
        with torch.enable_grad(), _gather(modules) as probed:
            probe()
        self._steady: list[nn.Module] = []
        room = float(HELD_BYTES)
        for module, outputs in probed.items():
            size = outputs[0].nbytes / len(outputs[0]) * input_count
            alone = len(outputs) == 1 and "forward" not in vars(module) and outputs[0].ndim > 1
            # a module of two places gives two things, one without a batch axis none that can be told apart
            if alone and size <= room and not outputs[0].requires_grad:
                self._steady.append(module)
                room -= size
        self._count, self._given = input_count, dict[nn.Module, Tensor]()

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Meanwhile the model is run on all inputs, in their order, at once or in parts."""
        with torch.no_grad(), _gather(self._steady) as found:
            yield
        given = {module: torch.cat(outputs) for module, outputs in found.items()}
        self._given = {module: values for module, values in given.items() if len(values) == self._count}

    @contextmanager
    def recall(self, rows: Tensor) -> Iterator[None]:
        """Meanwhile the model is run on these of the inputs."""
        for module, given in self._given.items():
            vars(module)["forward"] = partial(_pick, given, rows)
        try:
            yield
        finally:
            for module in self._given:
                del vars(module)["forward"]


def _pick(given: Tensor, rows: Tensor, read: Tensor) -> Tensor:
    """A copy: what follows may work in place."""
    return given[rows]


@contextmanager
def _gather(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """What the modules give while the model runs, before other hooks change it, in the order of the calls."""
    found: dict[nn.Module, list[Tensor]] = {}

    def note(module: nn.Module, args: object, output: Tensor) -> Tensor:
        found.setdefault(module, []).append(output)
        return output.clone()  # what works in place behind it must not reach it

    handles = [module.register_forward_hook(note, prepend=True) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()

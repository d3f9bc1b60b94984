"""Same outputs: whether the smaller model gives what the masked one gives, with random numbers made equal."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from critical_neurons.core.deadline import check_time
from critical_neurons.errors import PruningError, first_line
from critical_neurons.removal.dispatch import DispatchMode
from critical_neurons.removal.rows import Inputs, call_model, find_tensors, map_inputs
from critical_neurons.removal.seeding import seeded

REMOVAL_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest relative difference between the outputs of the masked and of the smaller model, by their type."""

ROUGH_TOLERANCE = 1e-1
"""The same for types of lower precision."""

FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, AttributeError, ArithmeticError)
"""What a forward pass may raise on unsuitable inputs or sizes."""


def check_removal(masked: nn.Module, smaller: nn.Module, inputs: Inputs) -> None:
    """Raise unless both models give the same outputs."""
    require_same(run_evenly(masked, inputs), run_smaller(smaller, inputs))


def run_smaller(smaller: nn.Module, inputs: Inputs, *, draws: bool = True) -> list[Tensor]:
    try:
        return run_evenly(smaller, inputs, draws=draws)
    except FAILURES as error:
        raise PruningError(
            f"the smaller model does not run ({first_line(error)}). Is a size written into its forward?"
        ) from error


def require_same(expected: list[Tensor], found: list[Tensor]) -> None:
    """Raise unless the outputs of the masked and of the smaller model agree."""
    shapes = [[tuple(values.shape) for values in outputs] for outputs in (expected, found)]
    if shapes[0] != shapes[1]:
        accepted, given = (", ".join(map(str, each)) for each in shapes)
        raise PruningError(f"the smaller model gives outputs of shape {given}, not {accepted}.")
    for one, other in zip(expected, found, strict=True):
        difference, scale = _compare(one, other)
        if not difference <= REMOVAL_TOLERANCE.get(one.dtype, ROUGH_TOLERANCE) * scale:
            raise PruningError(
                f"the smaller model gives other outputs than the masked one (difference {difference:.2e})."
            )


def run_evenly(model: nn.Module, inputs: Inputs, *, draws: bool = True) -> list[Tensor]:
    """The outputs, without gradients, and with a constant in place of every random number if the model `draws` any,
    since models of different sizes would draw different ones. The inputs are copied, since a forward pass may change
    them in place."""
    noise = _EvenNoise() if draws else nullcontext()  # type: ignore[no-untyped-call]
    with seeded(0, model), torch.no_grad(), noise:
        return list(find_tensors(call_model(model, map_inputs(inputs, Tensor.clone))))


class _EvenNoise(DispatchMode):  # type: ignore[no-untyped-call]
    """Random functions return `LEVEL` everywhere, or the mean plus `LEVEL` standard deviations."""

    LEVEL = 0.5
    NAMES = frozenset({"rand", "randn", "rand_like", "randn_like", "normal", "uniform", "exponential", "bernoulli"})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_time()
        outputs = func(*args, **(kwargs or {}))
        name = _name_call(func)
        if name not in self.NAMES or not outputs.is_floating_point():
            return outputs
        if name == "normal" and not func._schema.is_mutable and len(args) == 2:
            return outputs.copy_(args[0] + self.LEVEL * args[1])
        if name == "bernoulli" and not func._schema.is_mutable:
            return outputs.copy_(args[0])
        return outputs.fill_(self.LEVEL)


@cache
def _name_call(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2].rstrip("_")
    return name


def _compare(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest difference, and the scale it is relative to. Infinite values must be equal."""
    if not (one.is_floating_point() or one.is_complex()) or one.numel() == 0:
        return 0.0, 1.0
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs())
    finite = one.abs()[one.isfinite()]
    return float(difference.max()), max(1.0, float(finite.max())) if len(finite) else 1.0

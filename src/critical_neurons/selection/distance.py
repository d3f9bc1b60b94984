"""Distance: how far the outputs of one model are from those of another, for any kind of output."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.core.settings import DistanceName, OutputDistance
from critical_neurons.errors import InvalidInputError, InvalidSettingError, first_line
from critical_neurons.removal.rows import Inputs, call_model, count_numbers, count_rows, find_tensors, take_rows
from critical_neurons.removal.same_outputs import FAILURES

SOFTENING = 0.1
"""Softmax temperature for comparing decisions, relative to the standard deviation of the logits."""

SUM_TOLERANCE = 1e-4

LEAST_ROWS, MOST_ROWS, FEW_NUMBERS = 8, 64, 2**18
"""Inputs whose outputs determine how outputs are compared: as many as have this many numbers, within these limits."""

FEW_CLASSES = 10
"""Up to this many outputs count as class scores even if the inputs are as small."""


def list_outputs(outputs: Any) -> list[Tensor]:
    """The floating-point tensors of a nested model output."""
    return [values for values in find_tensors(outputs) if values.is_floating_point()]


@dataclass(frozen=True)
class Distance:
    """With `divergence` the Kullback-Leibler divergence of class probabilities, else the mean squared difference of
    each output tensor divided by its variance, summed over tensors. `logarithms`: the outputs are probabilities."""

    divergence: bool
    logarithms: bool = False
    scales: tuple[float, ...] = ()

    def measure(self, found: Sequence[Tensor], wanted: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
        """The distance, averaged over inputs."""
        if self.divergence:
            one, other = (functional.log_softmax(self._logits(each) / temperature, dim=1) for each in (found, wanted))
            return functional.kl_div(one, other, log_target=True, reduction="batchmean")
        return self._add_squares(found, wanted)

    def miss(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
        """A smoothed share of the inputs whose predicted class changes; without classes, the squares.

        Smoothing makes near misses count. To choose between networks in a search, the divergence of all classes is a
        worse criterion: of very small networks it prefers ones with more wrong decisions.
        """
        if not self.divergence:
            return float(self._add_squares(found, wanted))
        one, other = (self._logits(each).double() for each in (found, wanted))
        temperature = SOFTENING * float((other - other.mean(1, keepdim=True)).square().mean().sqrt()) or 1.0
        kept = (one / temperature).softmax(1).gather(1, other.argmax(1, keepdim=True))
        return 1 - float(kept.mean())

    def probe(self, outputs: Sequence[Tensor], temperature: float, generator: torch.Generator) -> Tensor:
        """A scalar whose squared gradient equals, in expectation, the curvature of the distance: for the divergence
        the loss of sampled classes (Fisher matrix), for squares a sum with random signs (Hutchinson)."""
        if self.divergence:
            logits = self._logits(outputs) / temperature
            spread = functional.log_softmax(logits.detach().double(), dim=1).exp()
            drawn = torch.multinomial(spread.cpu(), 1, generator=generator).to(logits.device)
            return functional.cross_entropy(logits, drawn[:, 0], reduction="sum")
        total = outputs[0].new_zeros(())
        for values, scale in zip(outputs, self.scales, strict=True):
            signs = torch.randint(0, 2, values.shape, generator=generator, dtype=values.dtype) * 2 - 1
            per_row = values[0].numel() if len(values) else 1
            total = total + (values * signs.to(values.device)).sum() * (2 / (scale * per_row)) ** 0.5
        return total

    def _logits(self, outputs: Sequence[Tensor]) -> Tensor:
        values = outputs[0]
        return values.clamp(min=torch.finfo(values.dtype).tiny).log() if self.logarithms else values

    def _add_squares(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
        total = found[0].new_zeros(())
        for one, other, scale in zip(found, wanted, self.scales, strict=True):
            total = total + (one - other).square().mean() / scale
        return total


@dataclass(frozen=True)
class GivenDistance(Distance):
    """The user's own function of the outputs of two models; it returns one number, or one per input.

    `like` is an example output, whose nesting the arguments get. Tensors that are not floating point become None.
    """

    function: OutputDistance = lambda found, wanted: None
    like: Any = None

    def measure(self, found: Sequence[Tensor], wanted: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
        given = self.function(self._nest(found), self._nest(wanted))
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim > 1:
            kind = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise InvalidSettingError(
                f"distance: the function gives {kind}. Accepted: a tensor with one number, or one for every input."
            )
        return given.mean()

    def miss(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
        return float(self.measure(found, wanted))

    def probe(self, outputs: Sequence[Tensor], temperature: float, generator: torch.Generator) -> Tensor:
        """Uses the diagonal of the Hessian, estimated with random signs (Hutchinson). Functions without curvature at
        equal outputs, such as a norm or a mean absolute difference, weigh all outputs alike."""
        signs = [
            (torch.randint(0, 2, each.shape, generator=generator, dtype=each.dtype) * 2 - 1).to(each.device)
            for each in outputs
        ]
        wanted = [each.detach() for each in outputs]
        found = [each.clone().requires_grad_() for each in wanted]
        rows = max(len(each) for each in outputs)
        with torch.enable_grad():
            slopes = torch.autograd.grad(
                self.measure(found, wanted) * rows, found, create_graph=True, allow_unused=True
            )
            along = [(one * sign).sum() for one, sign in zip(slopes, signs, strict=True) if one is not None]
            total = sum(along, start=found[0].new_zeros(()))
            bends: Sequence[Tensor | None] = [None] * len(found)
            if total.requires_grad:
                bends = torch.autograd.grad(total, found, allow_unused=True)
        scales = [
            torch.zeros_like(each)
            if bend is None
            else torch.nan_to_num(bend * sign, 0.0, 0.0, 0.0).clamp(min=0).sqrt()
            for each, bend, sign in zip(wanted, bends, signs, strict=True)
        ]
        if not any(bool(scale.any()) for scale in scales):
            scales = [torch.ones_like(each) for each in wanted]
        parts = [(each * sign * scale).sum() for each, sign, scale in zip(outputs, signs, scales, strict=True)]
        return sum(parts[1:], start=parts[0])

    def _nest(self, values: Sequence[Tensor]) -> Any:
        return _nest_like(self.like, iter(values))


def _nest_like(like: Any, values: Iterator[Tensor]) -> Any:
    """The values nested like the example, in the order of `list_outputs`."""
    if isinstance(like, Tensor):
        return next(values) if like.is_floating_point() else None
    if isinstance(like, Mapping):
        return {name: _nest_like(part, values) for name, part in like.items()}
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*(_nest_like(part, values) for part in like))
    if isinstance(like, list | tuple):
        return type(like)(_nest_like(part, values) for part in like)
    if hasattr(like, "__dict__") and not callable(like):
        nested = copy.copy(like)
        vars(nested).update({name: _nest_like(part, values) for name, part in vars(like).items()})
        return nested
    return like


def try_distance(model: nn.Module, inputs: Inputs, name: DistanceName | OutputDistance) -> tuple[Distance, Any]:
    """The distance for the outputs of a model, and its outputs for the first few inputs, by which it was chosen."""
    size = count_numbers(inputs)
    few = min(max(FEW_NUMBERS // max(size, 1), LEAST_ROWS), MOST_ROWS, count_rows(inputs))
    with torch.no_grad():
        given = call_model(model, take_rows(inputs, torch.arange(few)))
    return choose_distance(given, name, size), given


def choose_distance(given: Any, name: DistanceName | OutputDistance, input_size: int) -> Distance:
    """The distance by name, or the user's function, for outputs like the given ones.

    "auto" is the divergence if there is a single output (batch, classes) with few classes or at most half as many
    numbers as an input, and squares otherwise: regression, images, embeddings, several outputs.
    """
    outputs = list_outputs(given)
    if not outputs or not all(torch.isfinite(each).all() for each in outputs):
        raise InvalidInputError("inputs: the model gives NaN or infinite values for them. Are they scaled right?")
    if callable(name):
        found = GivenDistance(False, function=name, like=given)
        try:
            found.measure(outputs, outputs)  # fail now rather than at the end of a search
        except InvalidSettingError:
            raise
        except FAILURES as error:
            raise InvalidSettingError(f"distance: the function fails on the outputs: {first_line(error)}.") from error
        return found
    classes = len(outputs) == 1 and outputs[0].ndim == 2 and outputs[0].shape[1] > 1
    match name:
        case "auto":
            divergence = classes and (outputs[0].shape[1] <= FEW_CLASSES or 2 * outputs[0].shape[1] <= input_size)
        case "divergence" | "squares":
            divergence = name == "divergence"
        case _:
            raise InvalidSettingError(
                f"distance: found {name!r}. Accepted: 'auto', 'divergence', 'squares', or a function of the outputs "
                "of two models."
            )
    if divergence and not classes:
        shapes = ", ".join(str(tuple(each.shape)) for each in outputs)
        raise InvalidSettingError(
            f"distance: 'divergence' is for one output (batch, classes); the model gives {shapes}."
        )
    if divergence:
        return Distance(True, logarithms=_are_probabilities(outputs[0]))
    scales = tuple(float(each.double().var(correction=0)) or 1.0 for each in outputs)
    return Distance(False, scales=scales)


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all()) and bool(((values.double().sum(1) - 1).abs() < SUM_TOLERANCE).all())

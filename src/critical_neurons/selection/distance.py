"""Distance: how far the outputs of one model are from those of another, whatever the outputs are."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from critical_neurons.core.settings import DistanceName, OutputDistance
from critical_neurons.errors import InvalidInputError, InvalidSettingError, first_line
from critical_neurons.removal.remove import FAILURES
from critical_neurons.removal.rows import find_tensors

SOFTENING = 0.1
"""The temperature at which decisions are compared, relative to the deviation of the outputs."""

SUM_TOLERANCE = 1e-4

FEW_CLASSES = 10
"""So many outputs are taken for classes, however small the inputs are."""


def list_outputs(outputs: Any) -> list[Tensor]:
    """The floating-point tensors among what a model gives, in whatever nesting."""
    return [values for values in find_tensors(outputs) if values.is_floating_point()]


@dataclass(frozen=True)
class Distance:
    """`divergence`: the Kullback-Leibler divergence of class probabilities. `squares`: mean squared difference of
    every output, relative to its variance, summed over outputs. `logarithms`: outputs are probabilities."""

    divergence: bool
    logarithms: bool = False
    scales: tuple[float, ...] = ()

    def measure(self, found: Sequence[Tensor], wanted: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
        """The mean over inputs."""
        if self.divergence:
            one, other = (functional.log_softmax(self._logits(each) / temperature, dim=1) for each in (found, wanted))
            return functional.kl_div(one, other, log_target=True, reduction="batchmean")
        return self._add_squares(found, wanted)

    def miss(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
        """The share of the inputs whose decision changes, taken for softer than it is, so that near misses count too;
        without decisions the squares. A divergence of all outputs is the worse guide: where little is left it names
        networks that decide worse."""
        if not self.divergence:
            return float(self._add_squares(found, wanted))
        one, other = (self._logits(each).double() for each in (found, wanted))
        temperature = SOFTENING * float((other - other.mean(1, keepdim=True)).square().mean().sqrt()) or 1.0
        kept = (one / temperature).softmax(1).gather(1, other.argmax(1, keepdim=True))
        return 1 - float(kept.mean())

    def probe(self, outputs: Sequence[Tensor], temperature: float, generator: torch.Generator) -> Tensor:
        """A number whose squared gradients have the curvature of the distance for their mean: of the divergence by
        classes drawn from the outputs, of squares by signs."""
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
    """A function of the outputs of two models, as they give them, to a number, or to one for every input.

    `like` is an example of the outputs. The function is given None in the place of tensors that are no
    floating-point numbers.
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
        """By the curvature along every output by itself, estimated with random signs (Hutchinson). Of a function that
        has none where the outputs are equal, as a mean of absolute differences or a norm, all outputs count alike."""
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
    """The values in the nesting of an example of them, in the order in which `list_outputs` finds them."""
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


def choose_distance(given: Any, name: DistanceName | OutputDistance, input_size: int) -> Distance:
    """The distance that suits what a model gives for some inputs, or the function of the user's own.

    "auto" is the divergence for a single output (batch, classes) of few classes or much smaller than an input,
    squares for everything else: regression, images, embeddings as large as inputs, several outputs.
    """
    outputs = list_outputs(given)
    if not outputs or not all(torch.isfinite(each).all() for each in outputs):
        raise InvalidInputError("inputs: the model gives NaN or infinite values for them. Are they scaled right?")
    if callable(name):
        found = GivenDistance(False, function=name, like=given)
        try:
            found.measure(outputs, outputs)  # now rather than at the end of a search
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
                f"distance: found {name!r}. Accepted: 'auto', 'divergence', 'squares', or a function of what two "
                "models give."
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

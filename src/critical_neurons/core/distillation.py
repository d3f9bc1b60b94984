"""Distillation: settings for training the smaller network to reproduce the original's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from critical_neurons.core.settings import Compensation, Plain, check_choice, data, explained, setting
from critical_neurons.errors import InvalidSettingError

AugmentationName: TypeAlias = Literal["auto", "none", "images", "mixtures"]
Refitted: TypeAlias = Literal["none", "bias", "least_squares"]


@explained
@dataclass(frozen=True, kw_only=True)
class Distillation(Plain):
    """Training after least squares, without labels. Given as `compensate`, in place of "distil" with its defaults.

    Equal settings give equal networks, unless the time runs out before the steps are done.

    >>> short = cn.Distillation(seconds=10, steps=4, learning_rate=1e-3)
    >>> distilled = cn.prune(model, plan, inputs, compensate=short)
    >>> distilled[0].out_channels
    2
    """

    seconds: float = setting(
        400.0, "Time limit of distillation in seconds: training is shortened to fit.", option="distil_seconds"
    )
    steps: int | None = setting(
        None,
        "Most steps of distillation. Default: 800, up to 4 000 for small networks.",
        option="distil_steps",
    )
    batch_size: int = setting(
        64, "Batch size of distillation; smaller if memory is short.", option="distil_batch_size"
    )
    learning_rate: float | None = setting(
        None, "Highest learning rate of distillation. Default: the best of several.", option="distil_rate"
    )
    augment: AugmentationName = setting(
        "auto",
        "Augmentation during distillation. images: flipped, shifted and mixed; mixtures: mixed, maps also by pasted "
        "rectangles; auto: images for colour images, mixtures for other maps (batch, channels, height, width); none "
        "for sides below 8 and else.",
        option="distil_augment",
    )
    augmentation: Callable[[Any], Any] | None = data(
        "A function from a batch of inputs to an augmented one, in place of `augment`; may use torch's generator."
    )
    loss: Callable[[Any, Any], Any] | None = data(
        "A function of the outputs of the smaller and of the original model to a scalar tensor to minimise, in place "
        "of the distance of the outputs."
    )

    def __post_init__(self) -> None:
        self._settle("seconds", Real, lambda value: value > 0, "a number of seconds above 0")
        if self.steps is not None:
            self._settle("steps", Integral, lambda value: value >= 1, "a whole number of at least 1, or None")
        self._settle("batch_size", Integral, lambda value: value >= 1, "a whole number of at least 1")
        if self.learning_rate is not None:
            self._settle("learning_rate", Real, lambda value: 0 < value < float("inf"), "a number above 0, or None")
        check_choice("augment", self.augment, AugmentationName)
        for name in ("augmentation", "loss"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise InvalidSettingError(f"{name}: found {given!r}. Accepted: a function, or None.")


def split_compensation(given: Compensation | Distillation) -> tuple[Refitted, Distillation | None]:
    """The refitting method, and the settings of distillation if there is any."""
    if isinstance(given, Distillation):
        return "least_squares", given
    check_choice("compensate", given, Compensation, " or cn.Distillation(...)")
    return ("least_squares", Distillation()) if given == "distil" else (given, None)

"""Recipes: how the paper's networks are trained, by network, data set and name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.errors import InvalidSettingError

Optimiser: TypeAlias = Literal["rmsprop", "sgd", "adam"]
Annealing: TypeAlias = Literal["constant", "linear", "one_cycle"]

OPTIMISERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}

WARM_UP = 0.2
"""Share of the training in which the one-cycle learning rate rises."""

SHIFT = 4
"""Largest shift of an augmented image, in pixels."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    * `momentum`, `nesterov` and `weight_decay` are those of torch's optimisers; the first two are for SGD only.
    * `augmented`: images are flipped at random and shifted by up to `SHIFT` pixels, with zero padding.
    * `annealing` is the learning-rate schedule, applied at every step: constant; linear decay to zero; or one cycle,
      with a linear warm-up from zero first.
    * `freeze_from` is for decoupled training: the share of the epochs after which the first part is frozen. The other
      parts follow in even steps, the last one at the end. Every part's learning rate is annealed over its own epochs.
    * `mixed_precision`: products in bfloat16, weights and sums in single precision (torch's autocast). About twice as
      fast on processors with such instructions (AVX512-BF16), slower on others.
    """

    optimiser: Optimiser
    learning_rate: float
    epochs: int
    batch_size: int = 128
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    augmented: bool = False
    annealing: Annealing = "constant"
    freeze_from: float = 1.0
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("optimiser", get_args(Optimiser)), ("annealing", get_args(Annealing))):
            if getattr(self, name) not in accepted:
                raise InvalidSettingError(f"{name}: found {getattr(self, name)!r}. Accepted: {', '.join(accepted)}.")
        if not 0 < self.learning_rate < math.inf:
            raise InvalidSettingError(f"learning_rate: found {self.learning_rate}. Accepted: a number above 0.")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidSettingError(f"weight_decay: found {self.weight_decay}. Accepted: 0 or a number above it.")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidSettingError(f"{name}: found {getattr(self, name)}. Accepted: at least one.")
        if not 0 <= self.momentum < 1 or (self.momentum and self.optimiser != "sgd"):
            raise InvalidSettingError(
                f"momentum: found {self.momentum} for {self.optimiser}. Accepted: from 0 to below 1, for sgd alone."
            )
        if self.nesterov and not self.momentum:
            raise InvalidSettingError("nesterov: found without momentum. Give sgd a momentum, such as 0.9.")
        if not 0 < self.freeze_from <= 1:
            raise InvalidSettingError(f"freeze_from: found {self.freeze_from}. Accepted: a share above 0, up to 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without settings at their defaults; the batch size is always included."""
        defaults = {field.name: field.default for field in fields(self) if field.name != "batch_size"}
        return {name: value for name, value in asdict(self).items() if value != defaults.get(name)}

    def build_optimiser(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        names = [name for name in ("momentum", "nesterov", "weight_decay") if getattr(self, name)]
        further: dict[str, Any] = {name: getattr(self, name) for name in names}
        return OPTIMISERS[self.optimiser](parameters, lr=self.learning_rate, **further)  # type: ignore[call-arg]

    def choose_precision(self, like: Tensor) -> torch.autocast:
        """A context for forward passes of training, on the device of the tensor."""
        # No weight is read twice in a pass, so nothing is gained by keeping converted ones.
        return torch.autocast(like.device.type, torch.bfloat16, self.mixed_precision, cache_enabled=False)

    def rate_at(self, done: float) -> float:
        """The learning rate after the share `done` of the training."""
        match self.annealing:
            case "constant":
                return self.learning_rate
            case "linear":
                return self.learning_rate * (1 - done)
            case "one_cycle":
                return self.learning_rate * min(done / WARM_UP, (1 - done) / (1 - WARM_UP))

    def shortened(self, epochs: int) -> Recipe:
        """The same recipe for another number of epochs. One epoch is the paper's fine-tuning."""
        return replace(self, epochs=epochs)


def compute_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy; of bfloat16 in single precision."""
    return functional.cross_entropy(outputs.float() if outputs.dtype == torch.bfloat16 else outputs, labels)


def set_rate(optimiser: torch.optim.Optimizer, recipe: Recipe, done: float) -> None:
    """Set the optimiser's learning rate after the share `done` of the training."""
    for group in optimiser.param_groups:
        group["lr"] = recipe.rate_at(done)


def augment(images: Tensor) -> Tensor:
    """Flip each image at random and shift it by up to `SHIFT` pixels, with zero padding."""
    count, _, height, width = images.shape
    flipped = torch.where((torch.rand(count) < 0.5).to(images.device)[:, None, None, None], images.flip(3), images)
    tops, lefts = (torch.randint(0, 2 * SHIFT + 1, (count,)).tolist() for _ in range(2))
    padded = functional.pad(flipped, (SHIFT,) * 4)
    # Slicing takes half the time of one gather by all rows and columns.
    moved = (image[:, y : y + height, x : x + width] for image, y, x in zip(padded, tops, lefts, strict=True))
    return torch.stack(list(moved)).contiguous(memory_format=torch.channels_last)


DATA_SETS = ("mnist", "fashion_mnist", "cifar10")

PAPER: Mapping[tuple[str, str], Recipe] = {
    **{
        (network, data): Recipe("rmsprop", 1e-3, epochs=30)
        for network in ("fc3", "fc4", "lenet5")
        for data in ("mnist", "fashion_mnist")
    },
    ("lenet5", "cifar10"): Recipe("sgd", 1e-2, epochs=256),
    **{("vgg16", data): Recipe("adam", 1e-2, epochs=30) for data in DATA_SETS},
}
"""As printed, by network and data set. For VGG-16 the paper has only CIFAR-10; the other data sets use the same."""

AUTHORS: Mapping[tuple[str, str], Recipe] = {
    ("lenet5", "cifar10"): Recipe(
        "sgd", 1e-2, epochs=256, momentum=0.9, nesterov=True, weight_decay=5e-4, augmented=True
    ),
    **{
        ("vgg16", data): Recipe(
            "sgd", 0.1, epochs=30, momentum=0.9, nesterov=True, weight_decay=5e-4, augmented=data == "cifar10"
        )
        for data in DATA_SETS
    },
}
"""As in the authors' code, where it differs from the paper."""

SHORT: Mapping[tuple[str, str], Recipe] = {
    key: replace(recipe, epochs=20, batch_size=256, annealing="one_cycle", freeze_from=0.4, mixed_precision=True)
    for key, recipe in AUTHORS.items()
    if key[0] == "vgg16"
} | {
    ("resnet20", "cifar10"): Recipe("sgd", 0.1, epochs=6, momentum=0.9, augmented=True, annealing="linear"),
}
"""Our own, in two thirds of the epochs: the authors' with one cycle, larger batches, early parts frozen early, and
mixed precision.
ResNet-20 is not in the paper."""

RECIPES: Mapping[str, Mapping[tuple[str, str], Recipe]] = {
    "paper": PAPER,
    "authors": {**PAPER, **AUTHORS},
    "short": {**PAPER, **AUTHORS, **SHORT},
}
"""By name. A name without its own recipe for a network and data set uses that of the name before it."""

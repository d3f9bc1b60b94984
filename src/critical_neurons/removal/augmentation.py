"""Augmentation: random changes to a batch of inputs, drawn from torch's generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from critical_neurons.core.distillation import AugmentationName
from critical_neurons.errors import InvalidSettingError
from critical_neurons.removal.rows import Inputs

Augmentation: TypeAlias = Callable[[Inputs], Inputs]

COLOURS = 3
"""Maps with this many channels count as images. One channel may be a spectrogram, which must not be flipped."""

SMALLEST_SIDE = 8
"""Maps with a shorter side are not augmented by "auto"."""

SHIFT_SHARE = 8
"""Images are shifted by up to one in this many of their pixels."""


def choose_augmentation(inputs: Inputs, name: AugmentationName) -> Augmentation:
    """The augmentation of that name. "mixtures" is for a single floating-point tensor, "images" for one of the shape
    (batch, channels, height, width); "auto" chooses by the shape."""
    match _choose_name(inputs) if name == "auto" else name:
        case "mixtures":
            if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
                raise InvalidSettingError(
                    "augment: 'mixtures' is for one input of floating-point numbers. Give a function as "
                    "augmentation=, or augment='none'."
                )
            return _mix
        case "images":
            if not _are_maps(inputs):
                raise InvalidSettingError(
                    "augment: 'images' is for one input (batch, channels, height, width) of floating-point numbers. "
                    "Give a function as augmentation=, or augment='none'."
                )
            return _move_images
        case _:
            return lambda given: given


def _choose_name(inputs: Inputs) -> AugmentationName:
    """Mixtures, without flips and shifts, for other maps than colour images: digits, spectrograms."""
    if not _are_maps(inputs) or min(inputs.shape[2:]) < SMALLEST_SIDE:
        return "none"
    return "images" if inputs.shape[1] == COLOURS else "mixtures"


def _are_maps(inputs: Inputs) -> TypeGuard[Tensor]:
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()


def _move_images(images: Inputs) -> Inputs:
    assert isinstance(images, Tensor)
    return _mix(shift(flip(images)))


def _mix(inputs: Inputs) -> Inputs:
    """Half of the batches of maps are blended and half are pasted; other inputs have no rectangles to paste."""
    assert isinstance(inputs, Tensor)
    return blend(inputs) if not _are_maps(inputs) or torch.rand(()) < 0.5 else paste(inputs)


def blend(values: Tensor) -> Tensor:
    """Mixup: every row mixed with another, by a uniformly drawn share."""
    share = torch.rand(len(values), *[1] * (values.ndim - 1)).to(values)
    return share * values + (1 - share) * values[torch.randperm(len(values))]


def paste(images: Tensor) -> Tensor:
    """CutMix: a rectangle of uniformly drawn area in every image is replaced by that of another image."""
    count, _, *sides = images.shape
    length = torch.rand(count, 1).sqrt()
    inside = []
    for side in sides:
        centre = torch.randint(0, side, (count, 1))
        inside.append((torch.arange(side) - centre).abs() * 2 <= (length * side).long())
    rectangle = (inside[0][:, None, :, None] & inside[1][:, None, None, :]).to(images.device)
    return torch.where(rectangle, images[torch.randperm(count)], images)


def flip(images: Tensor) -> Tensor:
    """Mirror each image left to right with probability one half."""
    flipped = (torch.rand(len(images), 1, 1, 1) < 0.5).to(images.device)
    return torch.where(flipped, images.flip(3), images)


def shift(images: Tensor) -> Tensor:
    """Shift every image by a random number of pixels along both axes; the border is mirrored."""
    for axis in (2, 3):
        size = images.shape[axis]
        reach = size // SHIFT_SHARE
        places = torch.arange(size) + torch.randint(-reach, reach + 1, (len(images), 1))
        places = (size - 1 - (size - 1 - places.abs()).abs()).to(images.device)
        index = places[:, None, :, None] if axis == 2 else places[:, None, None, :]
        images = images.gather(axis, index.expand(images.shape))
    return images

"""Builtin models: the paper's networks and a residual one, untrained, each an `nn.Sequential`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from critical_neurons.errors import InvalidSettingError

VGG16_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Widths of the convolutions; every group ends in a pooling that halves the image."""

RESNET20_WIDTHS = (16, 32, 64)
"""Widths of the three stages of three blocks; the second and third start with a block that halves the image."""


def fc3(*, classes: int = 10, channels: int = 3, size: int = 32) -> nn.Sequential:
    """Two hidden layers: 300, 100."""
    return _fully_connected((channels * size * size, 300, 100, classes))


def fc4(*, classes: int = 10, channels: int = 3, size: int = 32) -> nn.Sequential:
    """Three hidden layers: 200, 100, 100."""
    return _fully_connected((channels * size * size, 200, 100, 100, classes))


def lenet5(*, classes: int = 10, channels: int = 3, size: int = 32) -> nn.Sequential:
    """LeNet-5 with ReLU and average pooling. At size 32 the third convolution has a single position."""
    side = ((size - 4) // 2 - 4) // 2 - 4
    if side < 1:
        raise InvalidSettingError(f"size: LeNet-5 takes images of 32 or more pixels on a side, got {size}.")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120 * side * side, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def vgg16(*, classes: int = 10, channels: int = 3, size: int = 32, narrow: int = 1) -> nn.Sequential:
    """VGG-16 with batch norm and average pooling, and two fully connected layers. Widths are divided by `narrow`."""
    side = size // 2 ** len(VGG16_GROUPS)
    if side < 1:
        raise InvalidSettingError(f"size: VGG-16 takes images of 32 or more pixels on a side, got {size}.")
    layers: list[nn.Module] = []
    for group in VGG16_GROUPS:
        for width in (full // narrow for full in group):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.AvgPool2d(2))
    hidden = 512 // narrow
    layers += [nn.Flatten(), nn.Linear(channels * side * side, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


def resnet20(*, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """ResNet-20 for small images: nine blocks of two convolutions. A block that widens has a third in its
    shortcut."""
    before = RESNET20_WIDTHS[0]
    layers: list[nn.Module] = [*_convolve(channels, before), nn.ReLU()]
    for width in RESNET20_WIDTHS:
        for _ in range(3):
            layers.append(ResidualBlock(before, width))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.body = nn.Sequential(*_convolve(before, width, stride=stride), nn.ReLU(), *_convolve(width, width))
        self.shortcut = nn.Sequential(*([] if before == width else _convolve(before, width, kernel=1, stride=stride)))

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs))


def _convolve(before: int, width: int, *, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(before, width, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width),
    ]


def _fully_connected(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Builtin:
    """A network known by name, and the shape of one input."""

    factory: Callable[[], nn.Module]
    input_shape: tuple[int, ...]


MODELS: dict[str, Builtin] = {
    factory.__name__: Builtin(factory, (3, 32, 32)) for factory in (fc3, fc4, lenet5, vgg16, resnet20)
}

"""Building blocks shared by several architectures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[..., nn.Module]


def conv(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int] = 3,
    stride: int = 1,
    *,
    groups: int = 1,
    dilation: int = 1,
    padding: int | tuple[int, int] | None = None,
    norm: Make | None = nn.BatchNorm2d,
    act: Make | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution, normalisation, activation; `padding` keeps the size by default."""
    if padding is None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (dilation * (sides[0] - 1) // 2, dilation * (sides[1] - 1) // 2)
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=norm is None)
    ]
    if norm is not None:
        layers.append(norm(outputs))
    if act is not None:
        layers.append(act())
    return nn.Sequential(*layers)


def dense(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), act()]
    return nn.Sequential(*layers[:-1])


def relu_in_place() -> nn.Module:
    return nn.ReLU(inplace=True)


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.1, inplace=True)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels // 4), channels)


class SqueezeExcitation(nn.Module):
    """Hu et al. 2018: channels scaled by a gate computed from their means."""

    def __init__(self, channels: int, squeezed: int, act: Make = nn.ReLU, gate: Make = nn.Sigmoid) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.act = act()
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.fc2(self.act(self.fc1(scale))))


class Concat(nn.Module):
    """Parallel branches of one input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Residual(nn.Module):
    """A residual connection around the layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class BasicBlock(nn.Module):
    """He et al. 2016: two 3x3 convolutions, and a projection where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, norm: Make = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNetTrunk(nn.Module):
    """ResNet-18 without its head; returns the feature maps of its last three stages (128, 256, 512 channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.layer1 = nn.Sequential(BasicBlock(64, 64), BasicBlock(64, 64))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c3 = self.layer2(self.layer1(self.stem(x)))
        c4 = self.layer3(c3)
        return c3, c4, self.layer4(c4)


class InvertedResidual(nn.Module):
    """Sandler et al. 2018: expand, filter depthwise, project; with squeeze-excitation from 2019 on."""

    def __init__(
        self,
        inputs: int,
        expanded: int,
        outputs: int,
        kernel: int,
        stride: int,
        act: Make,
        excitation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.use_shortcut = stride == 1 and inputs == outputs
        layers = [conv(inputs, expanded, 1, act=act)] if expanded != inputs else []
        layers.append(conv(expanded, expanded, kernel, stride, groups=expanded, act=act))
        if excitation is not None:
            layers.append(excitation)
        layers.append(conv(expanded, outputs, 1, act=None))
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_shortcut:
            return x + self.conv(x)
        return self.conv(x)


class Pooled(nn.Module):
    """A feature extractor, global average pooling and a linear classifier."""

    def __init__(self, features: nn.Module, channels: int, classes: int = 1000, hidden: int | None = None) -> None:
        super().__init__()
        self.features = features
        self.fc = nn.Linear(hidden or channels, classes)
        self.hidden = None if hidden is None else nn.Sequential(nn.Linear(channels, hidden), nn.Hardswish())

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1).flatten(1)
        if self.hidden is not None:
            x = self.hidden(x)
        return self.fc(x)

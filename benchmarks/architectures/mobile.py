"""Networks for small devices: depthwise convolutions, channel shuffles, squeeze-excitation."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import InvertedResidual, Make, Pooled, SqueezeExcitation, conv
from architectures.registry import Architecture, image

FAMILY = "mobile"


def separable(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(conv(inputs, inputs, 3, stride, groups=inputs), conv(inputs, outputs, 1))


def round_to(multiple: int, channels: int) -> int:
    return max(multiple, (channels + multiple // 2) // multiple * multiple)


def mobilenet_v1() -> nn.Module:
    """Howard et al. 2017."""
    widths = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    layers, inputs = [conv(3, 32, 3, 2)], 32
    for at, outputs in enumerate(widths):
        layers.append(separable(inputs, outputs, 2 if at in (1, 3, 5, 11) else 1))
        inputs = outputs
    return Pooled(nn.Sequential(*layers), 1024)


def mobilenet_v2() -> nn.Module:
    """Sandler et al. 2018: (expansion, channels, repeats, stride) by stage."""
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2))
    stages += ((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.ReLU6)]
    inputs = 32
    for factor, outputs, repeats, stride in stages:
        for step in range(repeats):
            layers.append(InvertedResidual(inputs, factor * inputs, outputs, 3, 1 if step else stride, nn.ReLU6))
            inputs = outputs
    return Pooled(nn.Sequential(*layers, conv(320, 1280, 1, act=nn.ReLU6)), 1280)


def mobilenet_v3_small() -> nn.Module:
    """Howard et al. 2019: (kernel, expanded, channels, excited, hard swish, stride) by block."""
    blocks = (
        *((3, 16, 16, True, False, 2), (3, 72, 24, False, False, 2), (3, 88, 24, False, False, 1)),
        *((5, 96, 40, True, True, 2), (5, 240, 40, True, True, 1), (5, 240, 40, True, True, 1)),
        *((5, 120, 48, True, True, 1), (5, 144, 48, True, True, 1), (5, 288, 96, True, True, 2)),
        *((5, 576, 96, True, True, 1), (5, 576, 96, True, True, 1)),
    )
    layers: list[nn.Module] = [conv(3, 16, 3, 2, act=nn.Hardswish)]
    inputs = 16
    for kernel, expanded, outputs, excited, hard, stride in blocks:
        act = nn.Hardswish if hard else nn.ReLU
        squeezed = round_to(8, expanded // 4)
        excitation = SqueezeExcitation(expanded, squeezed, gate=nn.Hardsigmoid) if excited else None
        layers.append(InvertedResidual(inputs, expanded, outputs, kernel, stride, act, excitation))
        inputs = outputs
    return Pooled(nn.Sequential(*layers, conv(96, 576, 1, act=nn.Hardswish)), 576, hidden=1024)


def efficientnet_b0() -> nn.Module:
    """Tan and Le 2019: (expansion, channels, repeats, stride, kernel) by stage."""
    stages = (
        *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
        *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
    )
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.SiLU)]
    inputs = 32
    for factor, outputs, repeats, stride, kernel in stages:
        for step in range(repeats):
            expanded = factor * inputs
            excitation = SqueezeExcitation(expanded, inputs // 4, nn.SiLU)
            first = 1 if step else stride
            layers.append(InvertedResidual(inputs, expanded, outputs, kernel, first, nn.SiLU, excitation))
            inputs = outputs
    return Pooled(nn.Sequential(*layers, conv(320, 1280, 1, act=nn.SiLU), nn.Dropout(0.2)), 1280)


def mnasnet_b1() -> nn.Module:
    """Tan et al. 2019: (expansion, channels, repeats, stride, kernel) by stage."""
    stages = ((3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5))
    stages += ((6, 96, 2, 1, 3), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))
    layers: list[nn.Module] = [conv(3, 32, 3, 2), conv(32, 32, 3, groups=32), conv(32, 16, 1, act=None)]
    inputs = 16
    for factor, outputs, repeats, stride, kernel in stages:
        for step in range(repeats):
            first = 1 if step else stride
            layers.append(InvertedResidual(inputs, factor * inputs, outputs, kernel, first, nn.ReLU))
            inputs = outputs
    return Pooled(nn.Sequential(*layers, conv(320, 1280, 1)), 1280)


def shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    return torch.transpose(x, 1, 2).contiguous().view(batch, -1, height, width)


class ShuffleUnit(nn.Module):
    """Zhang et al. 2018: grouped 1x1, shuffle, depthwise 3x3, grouped 1x1; a pooled shortcut at strides."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.stride, self.groups = stride, groups
        branch = outputs - inputs if stride == 2 else outputs
        middle = outputs // 4
        self.conv1 = conv(inputs, middle, 1, groups=1 if inputs == 24 else groups)
        self.conv2 = conv(middle, middle, 3, stride, groups=middle, act=None)
        self.conv3 = conv(middle, branch, 1, groups=groups, act=None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv3(self.conv2(shuffle(self.conv1(x), self.groups)))
        if self.stride == 2:
            return F.relu(torch.cat([out, F.avg_pool2d(x, 3, 2, 1)], 1))
        return F.relu(out + x)


def shufflenet_v1() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 24
    for outputs, repeats in ((240, 4), (480, 8), (960, 4)):
        for step in range(repeats):
            layers.append(ShuffleUnit(inputs, outputs, 1 if step else 2, 3))
            inputs = outputs
    return Pooled(nn.Sequential(*layers), 960)


class ShuffleUnit2(nn.Module):
    """Ma et al. 2018: half of the channels pass unchanged."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        self.branch1 = nn.Identity()
        if stride == 2:
            self.branch1 = nn.Sequential(conv(inputs, inputs, 3, 2, groups=inputs, act=None), conv(inputs, half, 1))
        self.branch2 = nn.Sequential(
            conv(inputs if stride == 2 else half, half, 1),
            conv(half, half, 3, stride, groups=half, act=None),
            conv(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return shuffle(out, 2)


def shufflenet_v2() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 24
    for outputs, repeats in ((116, 4), (232, 8), (464, 4)):
        for step in range(repeats):
            layers.append(ShuffleUnit2(inputs, outputs, 1 if step else 2))
            inputs = outputs
    return Pooled(nn.Sequential(*layers, conv(464, 1024, 1)), 1024)


class Ghost(nn.Module):
    """Han et al. 2020: half of the feature maps by convolution, the others by a depthwise one of those."""

    def __init__(self, inputs: int, outputs: int, act: Make | None = nn.ReLU) -> None:
        super().__init__()
        self.outputs = outputs
        half = -(-outputs // 2)
        self.primary = conv(inputs, half, 1, act=act)
        self.cheap = conv(half, half, 3, groups=half, act=act)

    def forward(self, x: Tensor) -> Tensor:
        primary = self.primary(x)
        return torch.cat([primary, self.cheap(primary)], 1)[:, : self.outputs, :, :]


class GhostBottleneck(nn.Module):
    def __init__(self, inputs: int, expanded: int, outputs: int, kernel: int, stride: int, excited: bool) -> None:
        super().__init__()
        self.ghost1 = Ghost(inputs, expanded)
        self.depthwise = conv(expanded, expanded, kernel, stride, groups=expanded, act=None) if stride > 1 else None
        self.se = SqueezeExcitation(expanded, round_to(4, expanded // 4), gate=nn.Hardsigmoid) if excited else None
        self.ghost2 = Ghost(expanded, outputs, act=None)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            filtered = conv(inputs, inputs, kernel, stride, groups=inputs, act=None)
            self.shortcut = nn.Sequential(filtered, conv(inputs, outputs, 1, act=None))

    def forward(self, x: Tensor) -> Tensor:
        out = self.ghost1(x)
        if self.depthwise is not None:
            out = self.depthwise(out)
        if self.se is not None:
            out = self.se(out)
        return self.ghost2(out) + self.shortcut(x)


def ghostnet() -> nn.Module:
    """(kernel, expanded, channels, excited, stride) by block."""
    blocks = (
        *((3, 16, 16, False, 1), (3, 48, 24, False, 2), (3, 72, 24, False, 1), (5, 72, 40, True, 2)),
        *((5, 120, 40, True, 1), (3, 240, 80, False, 2), (3, 200, 80, False, 1), (3, 184, 80, False, 1)),
        *((3, 184, 80, False, 1), (3, 480, 112, True, 1), (3, 672, 112, True, 1), (5, 672, 160, True, 2)),
        *((5, 960, 160, False, 1), (5, 960, 160, True, 1), (5, 960, 160, False, 1), (5, 960, 160, True, 1)),
    )
    layers: list[nn.Module] = [conv(3, 16, 3, 2)]
    inputs = 16
    for kernel, expanded, outputs, excited, stride in blocks:
        layers.append(GhostBottleneck(inputs, expanded, outputs, kernel, stride, excited))
        inputs = outputs
    return Pooled(nn.Sequential(*layers, conv(160, 960, 1)), 960, hidden=1280)


class XceptionBlock(nn.Module):
    """Chollet 2017: separable convolutions without an inner nonlinearity, ReLU first."""

    def __init__(self, *widths: int, stride: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
            layers += [nn.ReLU(), depthwise, nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        if stride > 1:
            layers.append(nn.MaxPool2d(3, stride, 1))
        self.rep = nn.Sequential(*layers)
        self.skip = conv(widths[0], widths[-1], 1, stride, act=None) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.skip is None else self.skip(x)
        out = self.rep(x)
        out += skip
        return out


def xception() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 32, 3, 2), conv(32, 64)]
    layers += [XceptionBlock(64, 128, 128), XceptionBlock(128, 256, 256), XceptionBlock(256, 728, 728)]
    layers += [XceptionBlock(728, 728, 728, 728, stride=1) for _ in range(8)]
    layers += [XceptionBlock(728, 728, 1024), separable(1024, 1536), separable(1536, 2048)]
    return Pooled(nn.Sequential(*layers), 2048)


ARCHITECTURES = [
    Architecture(make.__name__, FAMILY, make, image(64), ("fc",))
    for make in (
        *(mobilenet_v1, mobilenet_v2, mobilenet_v3_small, efficientnet_b0, mnasnet_b1),
        *(shufflenet_v1, shufflenet_v2, ghostnet, xception),
    )
]

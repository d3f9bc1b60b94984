"""Residual networks for images."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import BasicBlock, Make, SqueezeExcitation, conv, group_norm
from architectures.registry import Architecture, image

FAMILY = "residual"


class ShortcutA(nn.Module):
    """He et al. 2016, option A: subsampling by two, zero padding of channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding), "constant", 0)


class CifarBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential() if stride == 1 else ShortcutA(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class CifarResNet(nn.Module):
    """6n + 2 layers with 16, 32 and 64 feature maps."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(CifarBlock(16, 16, 1) for _ in range(n)))
        self.layer2 = nn.Sequential(CifarBlock(16, 32, 2), *(CifarBlock(32, 32, 1) for _ in range(n - 1)))
        self.layer3 = nn.Sequential(CifarBlock(32, 64, 2), *(CifarBlock(64, 64, 1) for _ in range(n - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


class Bottleneck(nn.Module):
    """1x1, 3x3 (grouped in ResNeXt and RegNet), 1x1; optional squeeze-excitation."""

    def __init__(
        self, inputs: int, width: int, outputs: int, stride: int = 1, groups: int = 1, squeezed: int = 0
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.se = SqueezeExcitation(outputs, squeezed) if squeezed else nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = conv(inputs, outputs, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.se(self.bn3(self.conv3(out)))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem (7x7 and max pooling), four stages, average pooling."""

    def __init__(self, stages: list[list[nn.Module]], outputs: int, norm: Make = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2, self.layer3, self.layer4 = (nn.Sequential(*stage) for stage in stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(outputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def basic_resnet(depths: tuple[int, ...], norm: Make = nn.BatchNorm2d) -> nn.Module:
    stages, inputs = [], 64
    for at, (depth, outputs) in enumerate(zip(depths, (64, 128, 256, 512), strict=True)):
        first = BasicBlock(inputs, outputs, 1 if at == 0 else 2, norm)
        stages.append([first, *(BasicBlock(outputs, outputs, 1, norm) for _ in range(depth - 1))])
        inputs = outputs
    return ResNet(stages, 512, norm)


def bottleneck_resnet(depths: tuple[int, ...], groups: int = 1, width: int = 64, squeeze: int = 0) -> nn.Module:
    """ResNet-50 and variants: `width` of the first stage's 3x3; `squeeze`: reduction ratio of squeeze-excitation."""
    stages, inputs = [], 64
    for at, depth in enumerate(depths):
        outputs, stage = 256 * 2**at, []
        for step in range(depth):
            stride = 2 if at > 0 and step == 0 else 1
            squeezed = outputs // squeeze if squeeze else 0
            stage.append(Bottleneck(inputs, width * 2**at, outputs, stride, groups, squeezed))
            inputs = outputs
        stages.append(stage)
    return ResNet(stages, 2048)


class PreActBlock(nn.Module):
    """Pre-activation: normalisation and ReLU before each convolution, and before the projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        return self.conv2(F.relu(self.bn2(out))) + shortcut


class PreActResNet(nn.Module):
    """He et al. 2016 (18 layers), and Wide ResNet of Zagoruyko and Komodakis 2016, for CIFAR."""

    def __init__(self, stem: int, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        blocks, inputs = [], stem
        for at, outputs in enumerate(widths):
            for step in range(depth):
                blocks.append(PreActBlock(inputs, outputs, 2 if at > 0 and step == 0 else 1))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.bn = nn.BatchNorm2d(inputs)
        self.linear = nn.Linear(inputs, 10)
        self.channels = inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        for block in self.blocks:
            out = block(out)
        out = F.relu(self.bn(out))
        out = F.avg_pool2d(out, out.shape[-1])
        return self.linear(out.view(-1, self.channels))


class RegNet(nn.Module):
    """Radosavovic et al. 2020; Y has squeeze-excitation, squeezed to a quarter of the block's input."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], group: int, excited: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(3, 32, 3, 2)]
        inputs = 32
        for outputs, depth in zip(widths, depths, strict=True):
            for step in range(depth):
                squeezed = inputs // 4 if excited else 0
                stride = 2 if step == 0 else 1
                layers.append(Bottleneck(inputs, outputs, outputs, stride, outputs // group, squeezed))
                inputs = outputs
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean([2, 3]))


class Res2Block(nn.Module):
    """Gao et al. 2019: channels in groups; each convolution also reads the output of the previous group."""

    def __init__(self, channels: int, width: int, parts: int) -> None:
        super().__init__()
        self.width = width
        self.conv1 = conv(channels, width * parts, 1)
        self.convs = nn.ModuleList(conv(width, width) for _ in range(parts - 1))
        self.conv3 = conv(width * parts, channels, 1, act=None)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self.conv1(x), self.width, 1)
        outputs = [parts[0]]
        for at, layer in enumerate(self.convs):
            outputs.append(layer(parts[at + 1] if at == 0 else parts[at + 1] + outputs[-1]))
        return F.relu(self.conv3(torch.cat(outputs, 1)) + x)


class Res2Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 64, 3, 2)
        self.blocks = nn.Sequential(*(Res2Block(64, 26, 4) for _ in range(3)))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)[:, :, 0, 0])


class ChannelSpatialAttention(nn.Module):
    """CBAM of Woo et al. 2018: gates from mean and maximum, by channel and then by pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(channels, channels // 8), nn.ReLU(), nn.Linear(channels // 8, channels))
        self.conv = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels = x.shape[:2]
        gate = torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))
        x = x * gate.view(batch, channels, 1, 1)
        summary = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return x * torch.sigmoid(self.conv(summary))


class AttentiveResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(3, 64)]
        for inputs, outputs in ((64, 64), (64, 128), (128, 256)):
            layers += [BasicBlock(inputs, outputs, outputs // inputs), ChannelSpatialAttention(outputs)]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((-2, -1)))


_regnet_x = partial(RegNet, (24, 56, 152, 368), (1, 1, 4, 7), 8, False)
_regnet_y = partial(RegNet, (48, 104, 208, 440), (1, 3, 6, 6), 8, True)
_deep = (3, 4, 6, 3)

ARCHITECTURES = [
    Architecture(name, FAMILY, make, image(side), (output,))
    for name, make, side, output in (
        ("resnet20_cifar", partial(CifarResNet, 3), 32, "linear"),
        ("resnet56_cifar", partial(CifarResNet, 9), 32, "linear"),
        ("preact_resnet18", partial(PreActResNet, 64, (64, 128, 256, 512), 2), 32, "linear"),
        ("wide_resnet_16_4", partial(PreActResNet, 16, (64, 128, 256), 2), 32, "linear"),
        ("resnet18", partial(basic_resnet, (2, 2, 2, 2)), 64, "fc"),
        ("resnet34", partial(basic_resnet, _deep), 64, "fc"),
        ("resnet50", partial(bottleneck_resnet, _deep), 64, "fc"),
        ("resnext50_32x4d", partial(bottleneck_resnet, _deep, groups=32, width=128), 64, "fc"),
        ("se_resnet50", partial(bottleneck_resnet, _deep, squeeze=16), 64, "fc"),
        ("regnet_x_200mf", _regnet_x, 64, "fc"),
        ("regnet_y_400mf", _regnet_y, 64, "fc"),
        ("resnet18_group_norm", partial(basic_resnet, (2, 2, 2, 2), group_norm), 64, "fc"),
        ("res2net_cifar", Res2Net, 32, "fc"),
        ("cbam_resnet_cifar", AttentiveResNet, 32, "fc"),
    )
]

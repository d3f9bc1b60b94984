"""Tiny versions of the architectures people use: residual, densely connected, depthwise, grouped, max pooled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    """The block of a ResNet: two convolutions with batch norm, and a shortcut, with one of its own where needed."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, a block with an identity shortcut, one with a convolution of stride 2 in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.stage1, self.stage2 = Basic(2, 2), Basic(2, 3, stride=2)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(F.relu(self.norm(self.stem(x)))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class PreActivation(nn.Module):
    """Batch norm and ReLU before each convolution; nothing on the stream itself but additions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(2)
        self.first = nn.Conv2d(channels, 2, 3, padding=1, bias=False)
        self.second = nn.Conv2d(2, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm2(self.first(F.relu(self.norm1(x))))))


class PreActivationResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.block1, self.block2 = PreActivation(3), PreActivation(3)
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.block2(self.block1(self.stem(x)))))
        return self.head(x.mean((2, 3)))


def build_mobilenet() -> nn.Module:
    """Depthwise and pointwise convolutions in turn, ReLU6; the second depthwise one doubles its channels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU6(inplace=True)),
        *(nn.Conv2d(2, 2, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(2), nn.ReLU6()),
        *(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU6()),
        *(nn.Conv2d(3, 6, 2, groups=3), nn.ReLU6(), nn.Conv2d(6, 3, 1), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(3, 2)),
    )


class DenseNet(nn.Module):
    """Every convolution reads all that came before it, through batch norm and ReLU of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False)
        self.norm1, self.first = nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm2, self.second = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1, bias=False)
        self.norm3, self.transition = nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1, bias=False)
        self.norm4, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.first(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.second(F.relu(self.norm2(x)))], 1)
        x = F.avg_pool2d(self.transition(F.relu(self.norm3(x))), 3)
        return self.head(F.relu(self.norm4(x)).flatten(1))


class Joined(nn.Module):
    """A stem and two branches of linear layers, joined in the way given; all with four units."""

    def __init__(
        self, join: Callable[[nn.Module, Tensor], Tensor], features: int = 4, *, normed: bool = False
    ) -> None:
        super().__init__()
        self.stem, self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if normed:
            self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(features, 2)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(self, F.relu(self.stem(x))))


def add_in_place(m: nn.Module, x: Tensor) -> Tensor:
    out = m.other(F.relu(m.one(x)))
    out += x
    return F.relu(out)


def add_by_function(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(torch.add(m.other(F.relu(m.one(x))), x))


def add_three(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(m.one(x) + m.other(x) + x)


def add_to_itself(m: nn.Module, x: Tensor) -> Tensor:
    x = x + x
    y = m.one(x)
    return F.relu(m.other(F.relu(y + y)))


def add_behind_relus(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(m.one(x)) + F.relu(m.norm(m.other(x)))


def concatenate(m: nn.Module, x: Tensor) -> Tensor:
    """One part behind a ReLU, the other not, and again behind a ReLU6."""
    return F.relu6(torch.cat((m.one(x), F.relu(m.other(x))), dim=1))


class Branched(nn.Module):
    """A concatenation that is added to a stream: each of its parts has some of the stream's units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.other = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 3)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(x + torch.cat([self.other(x), self.one(x)], 1)))


class Pooled(nn.Module):
    """A residual block behind a max pool, whose stream is max pooled again on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        return self.head(F.relu(x + self.branch(x)).flatten(1))


class Padded(nn.Module):
    """The shortcut of the CIFAR ResNets: every other position, and zeros beside the channels (option A)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.second, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 2)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        out = self.second(F.relu(self.first(x))) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
        return self.head(F.relu(self.last(F.relu(out))).mean((2, 3)))


class Permuted(nn.Module):
    """Channels behind the positions: flattened so, and linear layers on the last of several axes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.mixed = nn.Conv2d(1, 3, 3), nn.Linear(4, 3)
        self.tokens, self.head = nn.Linear(4, 2), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.mixed(x))[:, 0].transpose(1, 2)
        y = F.relu(self.tokens(y))
        x = F.relu(self.convolution(x)).permute(0, 2, 3, 1)
        return self.head(torch.cat([x.flatten(1), y.flatten(1), y.narrow(1, 1, 1)[:, 0]], 1))


class Tokens(nn.Module):
    """Linear layers at every position, the larger of two halves of their channels, and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.mixed, self.head = nn.Linear(4, 6), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.relu(self.halves(x)).chunk(2, -1)
        x = F.leaky_relu(self.mixed(torch.maximum(one, other)), 0.2)
        return self.head(x.mT.mT.mean(1))


class Decoder(nn.Module):
    """A transposed convolution, upsampling, a pixel shuffle and a flip of what a convolution has given in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Conv2d(2, 5, 3, padding=1)
        self.up = nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1, output_padding=1)
        self.wider, self.last = nn.Upsample(scale_factor=2), nn.Conv2d(5, 2, 2, stride=2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.down(x))
        one, other = F.relu(self.middle(x)).split([1, 4], 1)
        parts = [F.relu(self.up(one)), self.wider(x).flip(3), F.pixel_shuffle(other, 2)]
        return self.head(F.relu(self.last(torch.cat(parts, 1))).flatten(1))


class Leaky(nn.Module):
    """Activation functions that let negative numbers through: on a residual stream, max pooled, with one slope per
    channel, and clipped on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.branch = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)
        self.leaky, self.pool = nn.LeakyReLU(0.2), nn.MaxPool2d(2)
        self.wide, self.slopes = nn.Conv2d(2, 3, 1), nn.PReLU(3)
        self.hidden, self.clip, self.head = nn.Linear(3, 3), nn.Hardtanh(-0.5, 0.8), nn.Linear(3, 2)
        with torch.no_grad():
            self.slopes.weight.copy_(torch.tensor([0.3, -0.2, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaky(self.norm(self.stem(x)))
        x = self.pool(F.leaky_relu(x + self.branch(x), 0.4))
        return self.head(self.clip(self.hidden(self.slopes(self.wide(x)).flatten(1))))


class Maxima(nn.Module):
    """The larger and the smaller of two branches, their difference, and absolute values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.last, self.head = nn.Linear(3, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).abs()
        one, other = F.relu(self.one(x)), F.relu(self.other(x))
        y = F.relu(self.last(torch.maximum(one, other) - torch.min(one, other)))
        return self.head(torch.cat([torch.maximum(y, torch.zeros(())), -one], 1))

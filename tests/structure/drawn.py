"""Networks drawn at random: layers, norms, functions, joins and reshapes in any order that fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 4
STEPS = 5

Step = Callable[[Tensor], Tensor]


class Drawn(nn.Module):
    """A stem, steps one after the other, and a head on the flattened or averaged image."""

    def __init__(self, stem: nn.Module, steps: list[nn.Module], head: nn.Module, flat: bool) -> None:
        super().__init__()
        self.stem, self.steps, self.head, self.flat = stem, nn.ModuleList(steps), head, flat

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for step in self.steps:
            x = step(x)
        return self.head(x.flatten(1) if self.flat else x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module, before: bool) -> None:
        super().__init__()
        self.inner, self.before = nn.Sequential(*inner), before

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.before else F.relu(self.inner(x) + x)


class Dense(nn.Module):
    def __init__(self, inner: nn.Module, *, in_front: bool) -> None:
        super().__init__()
        self.inner, self.in_front = inner, in_front

    def forward(self, x: Tensor) -> Tensor:
        parts = [x, self.inner(x)]
        return torch.cat(parts[::-1] if self.in_front else parts, 1)


class Halves(nn.Module):
    """Both halves of the channels on ways of their own, joined in another order, or one as the other's gate."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        if self.way == "gate":
            return one * torch.sigmoid(other)
        if self.way == "slices":
            one, other = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return torch.cat([self.inner(other), one], 1)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 3), nn.Linear(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[:, :, None, None]


class Shuffle(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)


class ChannelsLast(nn.Module):
    """A linear layer on the channels, behind the positions."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Written(nn.Module):
    """Two layers whose outputs are written into one tensor."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(channels, outputs, 1), nn.Conv2d(channels, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        out = x.new_zeros(len(x), one.shape[1] + other.shape[1], *x.shape[2:])
        out[:, : one.shape[1]] = one
        out[:, one.shape[1] :] = F.relu(other)
        return out


def draw_network(seed: int) -> tuple[nn.Module, Tensor]:
    """Untrained, in evaluation mode, with inputs in float64."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    width = int(generator.choice([4, 6, 8]))
    stem = nn.Conv2d(2, width, 3, padding=1)
    steps: list[nn.Module] = []
    for _ in range(int(generator.integers(1, STEPS + 1))):
        step, width = draw_step(generator, width)
        steps += [step, draw_function(generator, width)]
    flat = bool(generator.integers(2))
    with torch.no_grad():
        size = nn.Sequential(stem, *steps).eval()(torch.zeros(2, 2, SIDE, SIDE))[0].numel()
    head = nn.Sequential(nn.Linear(size if flat else width, 5), nn.Tanh(), nn.Linear(5, 2))
    return Drawn(stem, steps, head, flat), torch.randn(2, 2, SIDE, SIDE, dtype=torch.float64)


def draw_step(generator: np.random.Generator, width: int) -> tuple[nn.Module, int]:
    """A step and how many channels it gives."""
    outputs = int(generator.choice([4, 6, 8]))
    same = nn.Sequential(nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, width, 1))
    kinds: dict[str, Callable[[], tuple[nn.Module, int]]] = {
        "convolution": lambda: (nn.Conv2d(width, outputs, 3, padding=1, bias=bool(generator.integers(2))), outputs),
        "depthwise": lambda: (nn.Conv2d(width, width, 3, padding=1, groups=width), width),
        "transposed": lambda: (nn.ConvTranspose2d(width, outputs, 3, padding=1), outputs),
        "residual": lambda: (Residual(same, before=bool(generator.integers(2))), width),
        "dense": lambda: (Dense(nn.Conv2d(width, 3, 1), in_front=bool(generator.integers(2))), width + 3),
        "excitation": lambda: (SqueezeExcite(width), width),
        "channels last": lambda: (ChannelsLast(width, outputs), outputs),
        "written": lambda: (Written(width, 3), 6),
        "shared": lambda: (nn.Sequential(*[nn.Conv2d(width, width, 1)] * 2), width),
    }
    if width % 2 == 0:
        half = nn.Conv2d(width // 2, outputs // 2, 1)
        kinds |= {
            "grouped": lambda: (nn.Conv2d(width, outputs, 3, padding=1, groups=2), outputs),
            "transposed and grouped": lambda: (nn.ConvTranspose2d(width, outputs, 1, groups=2), outputs),
            "halves": lambda: (Halves(half, "chunk"), width // 2 + outputs // 2),
            "slices": lambda: (Halves(half, "slices"), width // 2 + outputs // 2),
            "shuffle": lambda: (Shuffle(2), width),
        }
        if width >= 8:
            kinds["gate"] = lambda: (Halves(nn.Identity(), "gate"), width // 2)
    return kinds[str(generator.choice(sorted(kinds)))]()


def draw_function(generator: np.random.Generator, width: int) -> nn.Module:
    """What is computed channel by channel, or position by position."""
    functions: list[Callable[[], nn.Module]] = [
        nn.Identity,
        nn.ReLU,
        lambda: nn.ReLU(inplace=True),
        nn.GELU,
        lambda: nn.PReLU(width),
        lambda: nn.Sequential(nn.BatchNorm2d(width), nn.ReLU()),
        lambda: nn.InstanceNorm2d(width, affine=True),
        lambda: nn.MaxPool2d(2, 1, padding=1),
        lambda: nn.AvgPool2d(3, 1, padding=1),
        lambda: nn.Upsample(scale_factor=2),
    ]
    return functions[int(generator.integers(len(functions)))]()

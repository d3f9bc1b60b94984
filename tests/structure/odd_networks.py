"""Networks as people write them whose wiring is unusual, each small, with inputs for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RoutedExperts(nn.Module):
    """Each row goes to its two best experts, which add to what is already there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 3), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = chosen == number
            rows = own.any(-1)
            if rows.any():
                y[rows] = y[rows] + expert(x[rows]) * (weights * own)[rows].sum(-1, keepdim=True)
        return self.out(x + y)


class RotaryLanguageModel(nn.Module):
    """Rotary positions, a gated feed-forward block, and an embedding that also gives the output."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.words, self.norm = heads, nn.Embedding(11, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down, self.head = nn.Linear(width, 24), nn.Linear(12, width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.words.weight

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
        angles = places / 100 ** (torch.arange(0, x.shape[3], 2, dtype=x.dtype) / x.shape[3])
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(turned, -1).flatten(-2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.reshape(batch, length, self.heads, -1).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        value, gate = self.up(x).chunk(2, -1)
        return self.head(x + self.down(value * F.silu(gate)))


class ShiftedWindows(nn.Module):
    """Attention inside windows that are shifted by one position, with a bias for every pair of positions."""

    def __init__(self, width: int = 12, heads: int = 3, window: int = 2) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        self.patches, self.norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, window**2, window**2) * 0.1)
        self.wide, self.narrow, self.head = nn.Linear(width, 20), nn.Linear(20, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        side = self.window
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(batch, height // side, side, width // side, side, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, side**2, channels)
        q, k, v = self.qkv(y).reshape(len(y), side**2, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.bias).softmax(-1)
        y = self.out((weights @ v).transpose(1, 2).reshape(len(y), side**2, -1))
        y = y.view(batch, height // side, width // side, side, side, channels).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(y.reshape(batch, height, width, channels), (1, 1), (1, 2))
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(x.mean((1, 2)))


class LearnedFunctions(nn.Module):
    """Every input through a family of bumps, as a Kolmogorov-Arnold network has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-1, 1, 5))
        self.first, self.straight, self.second = nn.Linear(4 * 5, 6), nn.Linear(4, 6), nn.Linear(6 * 5, 3)

    def spread(self, x: Tensor) -> Tensor:
        return torch.exp(-(((x[..., None] - self.grid) * 2) ** 2)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.spread(x)) + self.straight(F.silu(x)))
        return self.second(self.spread(x))


class Frequencies(nn.Module):
    """Channels mixed by complex numbers, frequency by frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 5, 1), nn.Linear(5, 2)
        self.mix = nn.Parameter(torch.randn(6, 6, 2) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        mixed = torch.einsum("bchw,co->bohw", torch.fft.rfft2(x), torch.complex(self.mix[..., 0], self.mix[..., 1]))
        x = torch.fft.irfft2(mixed, s=x.shape[-2:]) + x
        return self.head(F.gelu(self.second(x)).mean((2, 3)))


class GatedDilations(nn.Module):
    """A WaveNet: the last residual branch reaches no output."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 1), nn.Conv1d(7, 3, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**at) for at in range(2))
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(width, 7, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0
        for at, (both, residual, skip) in enumerate(zip(self.filters, self.residuals, self.skips, strict=True)):
            signal, gate = both(F.pad(x, (2**at, 0))).chunk(2, 1)
            y = torch.tanh(signal) * torch.sigmoid(gate)
            total, x = total + skip(y), x + residual(y)
        return self.last(F.relu(total))


class PyramidHeads(nn.Module):
    """Features at three sizes, added from coarse to fine, and heads that all of them share; lists in a dict."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 12, 16)
        self.stages = nn.ModuleList(nn.Conv2d(*widths[at : at + 2], 3, 2, 1) for at in range(3))
        self.lateral = nn.ModuleList(nn.Conv2d(width, 6, 1) for width in widths[1:])
        self.classes = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 1))
        self.boxes = nn.Conv2d(6, 8, 1)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        levels = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = F.silu(stage(x))
            levels.append(lateral(x))
        for at in (1, 0):
            levels[at] = levels[at] + F.interpolate(levels[at + 1], size=levels[at].shape[-2:])
        return {
            "classes": [self.classes(level).flatten(2).transpose(1, 2) for level in levels],
            "boxes": [self.boxes(level).permute(0, 2, 3, 1).reshape(len(level), -1, 4) for level in levels],
        }


@dataclass
class Estimate:
    logits: Tensor
    length: Tensor


class RepeatedBlock(nn.Module):
    """One block applied three times; what is given is an object of the model's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Estimate:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return Estimate(self.last(x), x.norm(dim=-1))


def draw(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


TOKENS = torch.tensor([[1, 4, 2, 10, 0], [3, 0, 2, 2, 9]])

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "experts chosen row by row": (RoutedExperts, draw(6), 2 * 8),  # the third is not asked
    "rotary positions, tied embedding": (RotaryLanguageModel, TOKENS, 12 + 4),
    "shifted windows": (ShiftedWindows, draw(3, 8, 8), 20 + 3),
    "learned functions": (LearnedFunctions, draw(4), 6),
    "complex numbers": (Frequencies, draw(1, 6, 6), 5),
    "gated dilations": (GatedDilations, draw(1, 12), 6 + 2 * 6 + 7),
    "pyramid": (PyramidHeads, draw(3, 16, 16), 8 + 12 + 16 + 6 + 6),
    "a block three times": (RepeatedBlock, draw(4), 8 + 12),
}
"""With inputs, and the number of units that can be removed."""

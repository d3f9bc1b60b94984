"""Models that differ in what they take, what they give and what of them is sliced, each with inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.core.plan import Plan
from critical_neurons.removal.rows import Inputs, call_model

ROWS = 10


@dataclass
class Prediction:
    """What some libraries return in place of a tuple."""

    mean: Tensor
    spread: Tensor
    name: str = "prediction"


class TwoInputs(nn.Module):
    """Categories and numbers; classes."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up, self.project, self.head = nn.Embedding(10, 8), nn.Linear(5, 8), nn.Linear(16, 3)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        found = torch.cat([torch.tanh(self.project(numbers)), self.look_up(category)], dim=1)
        return self.head(found)


class Named(nn.Module):
    """A dict of inputs, one of which is not read, and a nested dict of outputs, one with an input's name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(5, 8), nn.ModuleDict({"x": nn.Linear(8, 5), "boxes": nn.Linear(8, 4)})

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = functional.gelu(self.body(x))
        return {"x": self.heads["x"](hidden), "found": [self.heads["boxes"](hidden)], "count": 3}


class UNet(nn.Module):
    """Transposed convolutions, a skip connection, instance and group norms, PReLUs; images for images."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8))
        self.deep = nn.Sequential(nn.Conv2d(8, 12, 2, stride=2), nn.GroupNorm(6, 12), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2, bias=False)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        wide = self.down(image)
        return self.head(torch.cat([wide, torch.relu(self.up(self.deep(wide)))], dim=1))


class Grouped(nn.Module):
    """Grouped, depthwise and transposed grouped convolutions, norms without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8, affine=False), nn.ReLU()),
            *(nn.Conv1d(8, 8, 3, groups=8), nn.BatchNorm1d(8), nn.ReLU()),
            *(nn.Conv1d(8, 12, 1, groups=2), nn.ReLU(), nn.ConvTranspose1d(12, 8, 2, groups=2), nn.ReLU()),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(self.body(signal).mean(2))


class Tied(nn.Module):
    """Tokens in, scores of tokens out by the same weight; a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up, self.hidden, self.head = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(8, 12, bias=False)
        self.back, self.alias = nn.Linear(16, 8), self.hidden
        self.head.weight = self.look_up.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.back(torch.relu(self.hidden(self.look_up(tokens)))))


class Raw(nn.Module):
    """Parameters without a layer, a buffer that is not saved, and a dataclass of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.arange(8) / 8, persistent=False)
        self.mean, self.spread = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Prediction:
        hidden = torch.sigmoid(functional.linear(x, self.first) * self.scale + self.shift)
        return Prediction(self.mean(hidden), functional.softplus(self.spread(hidden)))


class Regression(nn.Module):
    """One number for every input. A batch norm behind the ReLU leaves constants: the last layer gains a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1, bias=False))
        self.layers[2].running_mean.uniform_(0.1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """An LSTM, which stays as it is, before a head that does not; a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.hidden, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, (last, _) = self.body(x)
        return self.head(torch.relu(self.hidden(steps))), last[0]


def _vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 5, generator=generator)


def _integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 10, (ROWS, *shape), generator=generator)


ANY: dict[str, tuple[type[nn.Module], Callable[[torch.Generator], Inputs]]] = {
    "two inputs": (TwoInputs, lambda g: (_vectors(g), _integers(g))),
    "dicts": (Named, lambda g: {"x": _vectors(g), "mask": torch.ones(ROWS, 5, dtype=torch.bool)}),
    "u-net": (UNet, lambda g: torch.randn(ROWS, 2, 8, 8, generator=g)),
    "grouped": (Grouped, lambda g: torch.randn(ROWS, 2, 9, generator=g)),
    "tied": (Tied, lambda g: _integers(g, 7)),
    "raw parameters": (Raw, _vectors),
    "regression": (Regression, _vectors),
    "recurrent": (Recurrent, lambda g: torch.randn(ROWS, 4, 5, generator=g)),
}


def build_any(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ANY[name][0]().eval()


def make_inputs(name: str, seed: int = 1) -> Inputs:
    return ANY[name][1](torch.Generator().manual_seed(seed))


def halve(model: nn.Module, inputs: Inputs) -> Plan:
    """Half of the units of every group go, at random, as many of every block."""
    structure = cn.inspect(model, inputs)
    generator, stays = np.random.default_rng(0), np.ones(structure.unit_count + 1, dtype=bool)
    for group in structure.groups:
        for units in group.units.reshape(group.blocks, -1):
            stays[generator.permutation(units)[: len(units) // 2]] = False
    return Plan(structure, stays, {}, "half", {})


def run(model: nn.Module, inputs: Inputs) -> Any:
    with torch.no_grad():
        return call_model(model, inputs)

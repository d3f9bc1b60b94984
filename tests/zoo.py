"""A zoo of tiny networks that covers every readable op, with inputs and labels; seeded throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critical_neurons.core.network import Network
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.readers import read_network
from tests.graphs import (
    Branched,
    Decoder,
    DenseNet,
    Joined,
    Leaky,
    Maxima,
    Padded,
    Permuted,
    Pooled,
    PreActivationResNet,
    ResNet,
    Tokens,
    add_behind_relus,
    add_by_function,
    add_in_place,
    add_three,
    add_to_itself,
    build_mobilenet,
    concatenate,
)

torch.set_num_threads(1)  # on networks this small further threads only get in each other's way


def leave_alone(logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True)
class Specimen:
    """`finish` is what the model does to its logits at the end; `gain` multiplies the weights of its layers."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    finish: Callable[[Tensor], Tensor] = leave_alone
    gain: float = 1.0


@dataclass(frozen=True)
class Case:
    """A model in float64 and evaluation mode, the network read from it, and a labelled batch."""

    model: nn.Module
    network: Network
    inputs: Floats
    labels: Ints


class Block(nn.Module):
    """Convolution, batch norm, ReLU in place, average pooling."""

    def __init__(self, inputs: int, outputs: int, *, functional: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AvgPool2d(2)
        self.functional = functional

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x))
        if self.functional:
            return F.avg_pool2d(F.relu(x, inplace=True), 2)
        return self.pool(self.relu(x))


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(Block(1, 2, functional=False), nn.Sequential(Block(2, 3, functional=True)))
        self.head = nn.ModuleDict({"hidden": nn.Linear(3, 3), "logits": nn.Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        return self.head["logits"](torch.relu(self.head["hidden"](x)))


class Reshaped(nn.Module):
    """A convolution whose output, 2 channels of 2 x 2, becomes a vector in the way given."""

    def __init__(self, reshape: Callable[[Tensor], Tensor], features: int = 8) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.hidden = nn.Linear(features, 3)
        self.logits = nn.Linear(3, 2)
        self.reshape = reshape

    def forward(self, x: Tensor) -> Tensor:
        x = self.reshape(self.convolution(x).relu_())
        return self.logits(F.dropout(F.relu(self.hidden(x)), training=self.training))


class Ended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.logits = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.logits(F.relu(self.hidden(x))), dim=1)


class Normalised(nn.Module):
    """Inputs brought to mean 0 and deviation 1 channel by channel, by buffers of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.6]).reshape(2, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.5, 0.8]).reshape(1, 2, 1, 1))
        self.convolution, self.logits = nn.Conv2d(2, 3, 2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.deviation
        return self.logits(F.relu(self.convolution(x)).flatten(1))


class Calculated(nn.Module):
    """Two hidden layers, and what is calculated with the activations of either, and with the logits."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.one, self.two, self.logits = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)
        self.first, self.second = first, second
        self.register_buffer("temperature", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.two(self.first(self.one(x))))
        return 0.1 - self.logits(x) / self.temperature


def shift_by_channel(x: Tensor) -> Tensor:
    return F.relu(x) + torch.tensor([0.3, -0.3, 0.1, 0.0])


def take_axes_away(x: Tensor) -> Tensor:
    return x.squeeze((3, 4))[:, :, 0].unflatten(1, (-1, 1)).flatten(1)


IMAGE = (1, 4, 4)
LARGE = (1, 6, 6)


def pool_after_relu(pool: nn.Module, features: int) -> nn.Module:
    """A convolution, 2 channels of 4 x 4, its ReLU and a pool, and a hidden layer behind them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3), nn.ReLU(), pool, nn.Flatten()),
        *(nn.Linear(features, 3), nn.ReLU(), nn.Linear(3, 2)),
    )


CHAINS: dict[str, Specimen] = {
    "mlp": Specimen(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (4,)
    ),
    "mlp of one hidden layer": Specimen(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,)),
    "mlp of three hidden layers": Specimen(
        lambda: nn.Sequential(
            *(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
        ),
        (3,),
    ),
    "mlp without biases": Specimen(
        lambda: nn.Sequential(
            *(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False), nn.ReLU()),
            nn.Linear(3, 3, bias=False),
        ),
        (4,),
    ),
    "mlp with batch norm and dropout": Specimen(
        lambda: nn.Sequential(
            *(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5)),
            *(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(3, 4)),
        ),
        (4,),
    ),
    "mlp with identities": Specimen(
        lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 4), nn.ReLU(), nn.Identity(), nn.Linear(4, 2)), (3,)
    ),
    "batch norm without parameters": Specimen(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Linear(4, 2)), (3,)
    ),
    "batch norm behind the relu": Specimen(
        lambda: nn.Sequential(
            *(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        ),
        (3,),
    ),
    "relu twice": Specimen(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2)),
        (3,),
    ),
    "stride, padding and dilation": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(2, 3, (2, 1), dilation=2, padding=(1, 0)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
        ),
        IMAGE,
    ),
    "padding same": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 2, padding="same"), nn.ReLU(), nn.Conv2d(2, 2, 3, padding="same", dilation=2)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)),
        ),
        (1, 3, 3),
    ),
    "groups": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)),
        ),
        (2, 3, 3),
    ),
    "convolution in one dimension": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU(), nn.AvgPool1d(2)),
            *(nn.Flatten(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2)),
        ),
        (2, 4),
    ),
    "adaptive pool in one dimension": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Dropout1d(0.5), nn.AdaptiveAvgPool1d(2)),
            *(nn.Flatten(), nn.Linear(6, 2)),
        ),
        (1, 4),
    ),
    "nest": Specimen(Nest, IMAGE),
    "pool that leaves padding out": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.5)),
            *(nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), nn.Flatten(), nn.Linear(8, 3)),
        ),
        IMAGE,
    ),
    "pool that rounds up": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AvgPool2d(2, ceil_mode=True, padding=1)),
            *(nn.Flatten(), nn.Linear(8, 2)),
        ),
        IMAGE,
    ),
    "adaptive pool": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2, affine=False), nn.ReLU(), nn.AdaptiveAvgPool2d((2, None))),
            *(nn.Flatten(), nn.Linear(12, 2)),
        ),
        IMAGE,
    ),
    "convolution to logits": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        ),
        (1, 3, 3),
    ),
    "flattened before the relu": Specimen(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.ReLU(), nn.Linear(8, 2)), IMAGE
    ),
    "batch norm on the flattened": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.BatchNorm1d(8), nn.ReLU()),
            *(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)),
        ),
        IMAGE,
    ),
    "flatten method": Specimen(lambda: Reshaped(lambda x: x.flatten(1)), IMAGE),
    "flatten function": Specimen(lambda: Reshaped(lambda x: torch.flatten(x, 1)), IMAGE),
    "view by size": Specimen(lambda: Reshaped(lambda x: x.view(x.size(0), -1)), IMAGE),
    "reshape by shape": Specimen(lambda: Reshaped(lambda x: x.reshape(x.shape[0], -1)), IMAGE),
    "reshape function": Specimen(lambda: Reshaped(lambda x: torch.reshape(x, (x.shape[0], -1))), IMAGE),
    "view by number": Specimen(lambda: Reshaped(lambda x: x.view(-1, 8)), IMAGE),
    "mean method": Specimen(lambda: Reshaped(lambda x: x.mean((2, 3)), 2), IMAGE),
    "mean function": Specimen(lambda: Reshaped(lambda x: torch.mean(x, dim=[-1, -2]), 2), IMAGE),
    "axes of size one": Specimen(
        lambda: Reshaped(lambda x: take_axes_away(x.mean((2, 3), keepdim=True).unsqueeze(-1)), 2), IMAGE
    ),
    "functional pools": Specimen(
        lambda: Reshaped(lambda x: F.adaptive_avg_pool2d(F.avg_pool2d(x, 2, stride=1), 1).flatten(1), 2), IMAGE
    ),
    "normalised input": Specimen(Normalised, (2, 3, 3)),
    "constants behind the relu": Specimen(
        lambda: Calculated(lambda x: (1 - F.relu(x) * 2).sub(0.5), lambda x: F.relu(-F.relu(x) + 0.5)), (3,)
    ),
    "constants of every channel": Specimen(
        lambda: Calculated(shift_by_channel, lambda x: F.relu(-0.5 * x) + 1), (3,)
    ),
    "zeros around positions": Specimen(
        lambda: nn.Sequential(
            *(nn.ZeroPad2d((0, 1, 1, 0)), nn.Conv2d(1, 2, 2), nn.ZeroPad2d(1), nn.ReLU(), nn.Conv2d(2, 2, 3, 2)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)),
        ),
        (1, 3, 3),
    ),
    "clamps": Specimen(lambda: Calculated(lambda x: x.clamp(min=0), nn.Hardtanh(0.0, 0.8)), (3,)),
    "softmax": Specimen(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(dim=1)),
        (3,),
        nn.Softmax(dim=1),
    ),
    "log softmax": Specimen(Ended, (3,), nn.LogSoftmax(dim=1)),
}
"""One layer after the other."""

GRAPHS: dict[str, Specimen] = {
    "resnet": Specimen(ResNet, IMAGE),
    "pre-activation resnet": Specimen(PreActivationResNet, IMAGE),
    "mobilenet": Specimen(build_mobilenet, LARGE, gain=3.0),
    "densenet": Specimen(DenseNet, LARGE),
    "addition in place": Specimen(lambda: Joined(add_in_place), (3,)),
    "addition by function": Specimen(lambda: Joined(add_by_function), (3,)),
    "sum of three": Specimen(lambda: Joined(add_three), (3,)),
    "addition to itself": Specimen(lambda: Joined(add_to_itself), (3,)),
    "addition behind relus": Specimen(lambda: Joined(add_behind_relus, normed=True), (3,)),
    "concatenation on a stream": Specimen(Branched, (3,)),
    "concatenation": Specimen(lambda: Joined(concatenate, 8), (3,), gain=3.0),
    "grouped convolutions": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)),
        ),
        IMAGE,
    ),
    "batch norm behind the relu of a convolution": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 2, bias=False), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(8, 2)),
        ),
        IMAGE,
    ),
    "batch norm behind the relu, then a pool": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(3, 3, 1, groups=3), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2)),
        ),
        IMAGE,
    ),
    "batch norm behind the relu, then padding": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(18, 2)),
        ),
        IMAGE,
    ),
    "shortcut of slices and zeros": Specimen(Padded, (1, 4, 4)),
    "channels behind positions": Specimen(Permuted, IMAGE),
    "decoder": Specimen(Decoder, IMAGE),
    "tokens": Specimen(Tokens, (3, 4)),
    "leaky relus": Specimen(Leaky, IMAGE),
    "maxima": Specimen(Maxima, (3,)),
}
"""Branches, and layers that share or group their units."""

MAX_POOLED: dict[str, Specimen] = {
    "vgg": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2)),
        ),
        IMAGE,
    ),
    "max pool before the relu": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)),
        ),
        IMAGE,
    ),
    "overlapping max pool": Specimen(lambda: pool_after_relu(nn.MaxPool2d(3, stride=1), 8), LARGE),
    "padded max pool": Specimen(lambda: pool_after_relu(nn.MaxPool2d(2, padding=1), 18), LARGE),
    "max pool that rounds up": Specimen(lambda: pool_after_relu(nn.MaxPool2d(3, 2, ceil_mode=True), 8), LARGE),
    "max pool in one dimension": Specimen(
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.MaxPool1d(2, stride=1, dilation=2, padding=1)),
            *(nn.Flatten(), nn.Linear(12, 2)),
        ),
        (2, 5),
    ),
    "adaptive max pool": Specimen(
        lambda: Reshaped(lambda x: F.adaptive_max_pool2d(x, (1, 2)).amax((2, 3)), 2), IMAGE
    ),
    "max pool of a relu6": Specimen(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)),
        IMAGE,
        gain=3.0,
    ),
    "max pool on a stream": Specimen(Pooled, LARGE),
    "two windows": Specimen(
        lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(2, 2)), (1, 3)
    ),
}

ZOO = CHAINS | GRAPHS | MAX_POOLED

CORE = (
    *("mlp", "stride, padding and dilation", "nest", "constants of every channel", "clamps"),
    *("resnet", "mobilenet", "densenet", "concatenation on a stream", "grouped convolutions"),
    *("batch norm behind the relu, then padding", "shortcut of slices and zeros", "channels behind positions"),
    *("decoder", "tokens", "leaky relus", "maxima", "vgg", "max pool on a stream"),
)
"""Those that differ in substance. The others differ from one of these in how they are written, which concerns reading
and removal alone."""

UNSCORED = {
    "groups": "0",
    "view by number": "convolution",
    "batch norm behind the relu, then padding": "0",
    "constants of every channel": "one",
    "shortcut of slices and zeros": "second",
    "decoder": "middle",
}
"""A hidden layer in front of a ReLU that has to go without scores."""


def build_model(name: str, seed: int = 0) -> nn.Module:
    """In float64 and evaluation mode, with batch norms that look trained."""
    torch.manual_seed(seed)
    model = ZOO[name].build().double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                module.weight.normal_(0.0, ZOO[name].gain * 1.5 / module.weight[0].numel() ** 0.5)
                if module.bias is not None:
                    module.bias.normal_(0.0, 0.3)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0.0, 0.3)
                module.running_var.uniform_(0.3, 2.0)
                if module.affine:
                    module.weight.normal_(0.5, 1.0)  # some of them negative
                    module.bias.normal_(0.0, 0.3)
    return model


def draw_inputs(name: str, count: int, seed: int = 0) -> Tensor:
    """Most of them in [0, 1], some outside on either side."""
    generator = torch.Generator().manual_seed(seed)
    return 0.5 + torch.randn(count, *ZOO[name].shape, generator=generator, dtype=torch.float64)


def draw_case(name: str, count: int = 3, seed: int = 0) -> Case:
    model = build_model(name, seed)
    inputs = draw_inputs(name, count, seed)
    network = read_network(model, inputs)
    labels = np.random.default_rng(seed).integers(network.class_count, size=count)
    return Case(model, network, inputs.numpy(), labels)


def first_or_slow(*values: Any, first: int = 1) -> list[Any]:
    """Parameters of a test that only try it again, as seeds do: the first by default, the others as slow tests."""
    return [*values[:first], *(pytest.param(value, marks=pytest.mark.slow) for value in values[first:])]


share_case = cache(draw_case)
"""The same case again and again, for tests that only look at it."""

"""Sets, graphs, pairs and fields, and unusual fully connected networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from architectures.blocks import dense
from architectures.registry import BATCH, Architecture, Inputs, vector

GEOMETRY, DENSE = "sets, graphs, pairs", "fully connected"


class TNet(nn.Module):
    """Qi et al. 2017: predicts a transformation matrix for every point cloud."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(size, 64, 1), nn.Conv1d(64, 128, 1), nn.Conv1d(128, 1024, 1)
        self.fc1, self.fc2, self.fc3 = nn.Linear(1024, 512), nn.Linear(512, 256), nn.Linear(256, size * size)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in (64, 128, 1024, 512, 256))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.conv1(x)))
        x = F.relu(self.norms[1](self.conv2(x)))
        x = F.relu(self.norms[2](self.conv3(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 1024)
        x = F.relu(self.norms[3](self.fc1(x)))
        x = F.relu(self.norms[4](self.fc2(x)))
        identity = torch.eye(self.size, device=x.device).flatten()
        return (self.fc3(x) + identity).view(-1, self.size, self.size)


class PointNet(nn.Module):
    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.stn = TNet(3)
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(3, 64, 1), nn.Conv1d(64, 128, 1), nn.Conv1d(128, 1024, 1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(64), nn.BatchNorm1d(128), nn.BatchNorm1d(1024)
        self.fc1, self.fc2, self.fc3 = nn.Linear(1024, 512), nn.Linear(512, 256), nn.Linear(256, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        transform = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), transform).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x = torch.max(x, 2)[0]
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return F.log_softmax(self.fc3(x), dim=1), transform


class Siamese(nn.Module):
    """Koch et al. 2015: one encoder for both images, a classifier of the distance between their codes."""

    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(2)
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 64, 10), nn.ReLU(), pool, nn.Conv2d(64, 128, 7), nn.ReLU(), pool),
            *(nn.Conv2d(128, 128, 4), nn.ReLU(), pool, nn.Conv2d(128, 256, 4), nn.ReLU()),
        )
        self.fc, self.out = nn.Linear(9216, 4096), nn.Linear(4096, 1)

    def encode(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return torch.sigmoid(self.fc(x.view(x.size()[0], -1)))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.out(torch.abs(self.encode(first) - self.encode(second)))


class DeepSets(nn.Module):
    """Zaheer et al. 2017: a sum over the set."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = dense(3, 128, 128, 128, act=nn.ELU), dense(128, 128, 10, act=nn.ELU)

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(self.phi(x).sum(dim=1))


class GCN(nn.Module):
    """Kipf and Welling 2017 with a dense adjacency; weights are bare parameters."""

    def __init__(self, features: int = 100, hidden: int = 64, classes: int = 7) -> None:
        super().__init__()
        self.weight1, self.bias1 = (
            nn.Parameter(torch.randn(features, hidden) * 0.1),
            nn.Parameter(torch.zeros(hidden)),
        )
        self.weight2 = nn.Parameter(torch.randn(hidden, classes) * 0.1)
        self.bias2 = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(torch.spmm(adjacency, torch.mm(x, self.weight1)) + self.bias1)
        x = torch.spmm(adjacency, torch.mm(x, self.weight2)) + self.bias2
        return F.log_softmax(x, dim=1)


class GAT(nn.Module):
    """Veličković et al. 2018 with a dense adjacency: neighbours weighted by attention, several heads."""

    def __init__(self, features: int = 100, hidden: int = 16, heads: int = 4, classes: int = 7) -> None:
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.lift, self.last = nn.Linear(features, heads * hidden, bias=False), nn.Linear(heads * hidden, classes)
        self.source, self.target = nn.Parameter(torch.randn(heads, hidden)), nn.Parameter(torch.randn(heads, hidden))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.lift(x).view(-1, self.heads, self.hidden)
        scores = (x * self.source).sum(-1)[:, None] + (x * self.target).sum(-1)[None]
        scores = F.leaky_relu(scores, 0.2).masked_fill(adjacency[..., None] == 0, float("-inf"))
        x = torch.einsum("ijh,jhd->ihd", torch.softmax(scores, dim=1), x)
        return adjacency @ self.last(F.elu(x.flatten(1)))


class Highway(nn.Module):
    """Srivastava et al. 2015."""

    def __init__(self, width: int = 50, depth: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, width), nn.Linear(width, 10)
        self.transform = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gate = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for transform, gate in zip(self.transform, self.gate, strict=True):
            share = torch.sigmoid(gate(x))
            x = share * F.relu(transform(x)) + (1 - share) * x
        return self.last(x)


class Maxout(nn.Module):
    """Goodfellow et al. 2013: the maximum of several linear functions."""

    def __init__(self, pieces: int = 5) -> None:
        super().__init__()
        self.pieces = pieces
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 240 * pieces), nn.Linear(240, 240 * pieces), nn.Linear(240, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x).view(x.size(0), -1, self.pieces).max(dim=2)[0]
        x = self.fc2(x).view(x.size(0), -1, self.pieces).max(dim=2)[0]
        return self.fc3(x)


class SwiGLU(nn.Module):
    """Shazeer 2020: one linear layer for both halves of the gated unit."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, 3)
        self.up = nn.ModuleList(nn.Linear(width, 2 * 172) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(172, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            gate, value = up(x).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * value)
        return self.last(x)


def glu_mlp() -> nn.Module:
    """Dauphin et al. 2017: nn.GLU halves the number of features."""
    return nn.Sequential(nn.Linear(20, 256), nn.GLU(), nn.Linear(128, 256), nn.GLU(dim=-1), nn.Linear(128, 3))


def weight_norm_mlp() -> nn.Module:
    """Salimans and Kingma 2016."""
    first, second = weight_norm(nn.Linear(784, 256)), weight_norm(nn.Linear(256, 256))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), weight_norm(nn.Linear(256, 10)))


class NeRF(nn.Module):
    """Mildenhall et al. 2020: Fourier features of position and direction; the position again half way."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(63, width), *(nn.Linear(width, width) for _ in range(4))])
        self.second = nn.ModuleList([nn.Linear(width + 63, width), *(nn.Linear(width, width) for _ in range(2))])
        self.alpha, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.views, self.rgb = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    @staticmethod
    def encode(x: Tensor, frequencies: int) -> Tensor:
        return torch.cat([x, *(f(x * 2**at) for at in range(frequencies) for f in (torch.sin, torch.cos))], -1)

    def forward(self, position: Tensor, direction: Tensor) -> Tensor:
        start = x = self.encode(position, 10)
        for layer in self.first:
            x = F.relu(layer(x))
        x = torch.cat([start, x], -1)
        for layer in self.second:
            x = F.relu(layer(x))
        colour = F.relu(self.views(torch.cat([self.feature(x), self.encode(direction, 4)], -1)))
        return torch.cat([torch.sigmoid(self.rgb(colour)), self.alpha(x)], -1)


class Siren(nn.Module):
    """Sitzmann et al. 2020: sine activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256 if at else 2, 256) for at in range(4))
        self.last = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.last(x)


def images() -> Inputs:
    return torch.randn(BATCH, 1, 105, 105), torch.randn(BATCH, 1, 105, 105)


def graph() -> Inputs:
    linked = (torch.rand(30, 30) < 0.2).float()
    linked = torch.maximum(torch.maximum(linked, linked.t()), torch.eye(30))
    return torch.randn(30, 100), linked / linked.sum(1, keepdim=True)


def rays() -> Inputs:
    return torch.randn(64, 3), F.normalize(torch.randn(64, 3), dim=-1)


ARCHITECTURES = [
    Architecture(name, family, make, inputs, outputs)
    for name, family, make, inputs, outputs in (
        ("pointnet", GEOMETRY, PointNet, vector(3, 256), ("fc3", "stn.fc3")),
        ("siamese", GEOMETRY, Siamese, images, ("out",)),
        ("deep_sets", GEOMETRY, DeepSets, vector(20, 3), ("rho.2",)),
        ("gcn_dense", GEOMETRY, GCN, graph, ("weight2", "bias2")),
        ("gat_dense", GEOMETRY, GAT, graph, ("last",)),
        ("highway", DENSE, Highway, vector(784), ("last",)),
        ("maxout", DENSE, Maxout, vector(784), ("fc3",)),
        ("swiglu_mlp", DENSE, SwiGLU, vector(20), ("last",)),
        ("glu_mlp", DENSE, glu_mlp, vector(20), ("4",)),
        ("weight_norm_mlp", DENSE, weight_norm_mlp, vector(784), ("5",)),
        ("nerf", DENSE, NeRF, rays, ("rgb", "alpha")),
        ("siren", DENSE, Siren, vector(2), ("last",)),
    )
]

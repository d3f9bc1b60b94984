"""Tabular data and recommendation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import dense
from architectures.registry import BATCH, Architecture, Inputs, vector

TABULAR, RECOMMENDING = "tabular", "recommendation"


class TabularBlock(nn.Module):
    """Gorishniy et al. 2021."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(self.norm(x))))))


def tabular_resnet() -> nn.Module:
    blocks = (TabularBlock(128, 256) for _ in range(4))
    return nn.Sequential(nn.Linear(30, 128), *blocks, nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 2))


class EntityMLP(nn.Module):
    """Guo and Berkhahn 2016: embedded categories and numbers concatenated; batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(size, width) for size, width in ((12, 6), (7, 4), (50, 25)))
        self.bn_cont = nn.BatchNorm1d(8)
        layers: list[nn.Module] = []
        for inputs, outputs in ((43, 200), (200, 100)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.BatchNorm1d(outputs), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers, nn.Linear(100, 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = torch.cat([embed(categories[:, at]) for at, embed in enumerate(self.embeds)], 1)
        return self.layers(torch.cat([x, self.bn_cont(numbers)], 1))


class SharedBottom(nn.Module):
    """Caruana 1997, multi-task: a shared trunk, three heads, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(dense(30, 128, 64), nn.ReLU())
        self.towers = nn.ModuleDict({"age": dense(64, 32, 1), "income": dense(64, 32, 2), "region": dense(64, 32, 8)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.trunk(x)
        return {task: tower(x) for task, tower in self.towers.items()}


class MixtureOfExperts(nn.Module):
    """Ma et al. 2018: all experts are computed and weighted by a gate."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(dense(30, 64, 32) for _ in range(experts))
        self.gate, self.tower = nn.Linear(30, experts), dense(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([expert(x) for expert in self.experts], dim=1)
        weights = torch.softmax(self.gate(x), dim=1).unsqueeze(-1)
        return self.tower((stacked * weights).sum(dim=1))


class WideAndDeep(nn.Module):
    """Cheng et al. 2016; the input is a dict of features."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(100, 1)
        self.embeddings = nn.ModuleDict({"user": nn.Embedding(500, 16), "item": nn.Embedding(300, 16)})
        self.deep = dense(16 + 16 + 13, 256, 128, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        embedded = [self.embeddings[name](batch[name]) for name in ("user", "item")]
        deep = self.deep(torch.cat([*embedded, batch["numbers"]], dim=1))
        return torch.sigmoid(self.wide(batch["crossed"]) + deep).squeeze(1)


class MatrixFactorisation(nn.Module):
    """Koren et al. 2009: a product of embeddings and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(500, 64), nn.Embedding(300, 64)
        self.user_bias, self.item_bias = nn.Embedding(500, 1), nn.Embedding(300, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        score = (self.user(user) * self.item(item)).sum(1, keepdim=True)
        return (score + self.user_bias(user) + self.item_bias(item)).squeeze()


class NeuralCF(nn.Module):
    """He et al. 2017: matrix factorisation and an MLP, each with its own embeddings, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(500, 32), nn.Embedding(300, 32)
        self.user_mlp, self.item_mlp = nn.Embedding(500, 64), nn.Embedding(300, 64)
        self.mlp = nn.Sequential(dense(128, 64, 32), nn.ReLU())
        self.predict = nn.Linear(64, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.user_gmf(user) * self.item_gmf(item)
        joined = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.predict(torch.cat((product, joined), -1)).view(-1)


class DeepFM(nn.Module):
    """Guo et al. 2017: a factorisation machine and an MLP on the same field embeddings."""

    def __init__(self, fields: int = 10, values: int = 100, width: int = 16) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Embedding(fields * values, 1), nn.Embedding(fields * values, width)
        self.mlp = dense(fields * width, 128, 64, 1)
        self.register_buffer("offsets", torch.arange(fields) * values)
        self.flat = fields * width

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offsets.unsqueeze(0)
        embedded = self.embedding(x)
        pairs = (embedded.sum(1) ** 2 - (embedded**2).sum(1)).sum(1, keepdim=True) * 0.5
        return (self.linear(x).sum(1) + pairs + self.mlp(embedded.view(-1, self.flat))).squeeze(1)


def categories_and_numbers() -> Inputs:
    return torch.stack([torch.randint(size, (BATCH,)) for size in (12, 7, 50)], 1), torch.randn(BATCH, 8)


def features_by_name() -> Inputs:
    ids = {"user": torch.randint(500, (BATCH,)), "item": torch.randint(300, (BATCH,))}
    return ({**ids, "crossed": torch.rand(BATCH, 100).round(), "numbers": torch.randn(BATCH, 13)},)


def pair() -> Inputs:
    return {"user": torch.randint(500, (BATCH,)), "item": torch.randint(300, (BATCH,))}


_TASKS = ("towers.age.2", "towers.income.2", "towers.region.2")

ARCHITECTURES = [
    Architecture(name, family, make, inputs, outputs)
    for name, family, make, inputs, outputs in (
        ("tabular_resnet", TABULAR, tabular_resnet, vector(30), ("7",)),
        ("tabular_entity_mlp", TABULAR, EntityMLP, categories_and_numbers, ("layers.8",)),
        (
            "shared_bottom_tasks",
            TABULAR,
            SharedBottom,
            vector(30),
            _TASKS,
        ),
        ("mixture_of_experts", TABULAR, MixtureOfExperts, vector(30), ("tower.2",)),
        ("wide_and_deep", RECOMMENDING, WideAndDeep, features_by_name, ("wide", "deep.4")),
        ("matrix_factorisation", RECOMMENDING, MatrixFactorisation, pair, ("user_bias", "item_bias")),
        ("neural_collaborative_filtering", RECOMMENDING, NeuralCF, pair, ("predict",)),
        ("deep_fm", RECOMMENDING, DeepFM, lambda: torch.randint(100, (BATCH, 10)), ("linear", "mlp.4")),
    )
]

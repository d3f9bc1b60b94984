"""The objective (equations 4 to 7): sparsity of the scores plus loss_weight times the softmax term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse
from scipy.optimize import brentq

from critical_neurons.costs import Measure, count_cost, differentiate_cost
from critical_neurons.errors import InvalidSettingError
from critical_neurons.network import Floats, Network
from critical_neurons.program import Rows
from critical_neurons.settings import BUDGETS, ObjectiveName


@dataclass(frozen=True)
class Objective:
    """`published` weighs each layer by its own size and averages the softmax term over the data points, as the
    authors' code does; `paper` divides by the number of all units and sums, as printed."""

    name: ObjectiveName = "published"
    loss_weight: float = 5.0
    rescale: float = 2.0

    def layer_weights(self, sizes: tuple[int, ...]) -> Floats:
        """What one score of each layer counts in the sparsity term."""
        counts = np.array(sizes, dtype=np.float64)
        return 1.0 / counts if self.name == "published" else np.full(len(sizes), 1.0 / counts.sum())

    def softmax_weight(self, batch_size: int) -> float:
        return self.loss_weight / batch_size if self.name == "published" else self.loss_weight

    def compute(self, sizes: tuple[int, ...], scores: Floats, losses: Floats) -> float:
        """Equations 5 to 7 by their definition: what the program minimises, without the program."""
        layers = np.split(scores - self.rescale, np.cumsum(sizes)[:-1])
        sums = self.layer_weights(sizes) * [layer.sum() for layer in layers]
        sparsity = sums.sum() - (sums.min() if len(sizes) > 1 else 0.0)
        return float(sparsity + self.softmax_weight(len(losses)) * losses.sum())


@dataclass(frozen=True, eq=False)
class Budget:
    """At most so much kept, in place of the sparsity term: weights (rows, units) · scores <= limits.

    What is minimised is the softmax term alone, averaged over the data points.
    """

    weights: Floats
    limits: Floats

    def compute(self, sizes: tuple[int, ...], scores: Floats, losses: Floats) -> float:
        return float(losses.mean())


Goal: TypeAlias = Objective | Budget


def find_floor(goal: Goal, sizes: tuple[int, ...]) -> float:
    """What no scores fall below: every unit removed, and nothing lost."""
    return goal.compute(sizes, np.zeros(sum(sizes)), np.zeros(1))


def read_budget(network: Network, budget: Mapping[str, Any]) -> Budget:
    """The budget that `score` is told."""
    measure = next(name for name in BUDGETS if name in budget)
    return budget_network(network, measure, budget[measure], by_layer=budget.get("scope", "layer") == "layer")


def budget_network(network: Network, measure: Measure, share: float, *, by_layer: bool) -> Budget:
    """The share of the units, of every group or of all, or of the parameters or multiply-adds of the network.

    Those are products of what two neighbouring layers keep; they are linearised where every unit is kept by the same
    part and the whole is the share.
    """
    units = network.unit_count
    if measure == "units":
        starts = np.repeat(np.arange(len(network.groups)), network.groups)
        rows = np.eye(len(network.groups))[:, starts] if by_layer else np.ones((1, units))
        return Budget(rows, np.floor(share * rows.sum(axis=1) + 1e-9))

    def cost(part: float) -> float:
        return count_cost(network.wirings, _keep(part, units), measure)

    limit = share * cost(1.0)
    if cost(0.0) > limit:
        raise InvalidSettingError(
            f"budget: {measure} cannot fall to {share:.4g} of what they are; what is not scored alone takes "
            f"{cost(0.0) / cost(1.0):.4g}."
        )
    part = float(brentq(lambda p: cost(p) - limit, 0.0, 1.0))
    slope = differentiate_cost(network.wirings, _keep(part, units), measure)[:units]
    slope /= slope.max()
    return Budget(slope[None], np.array([part * slope.sum()]))


def _keep(part: float, units: int) -> Floats:
    return np.append(np.full(units, part), 1.0)


def encode_sparsity(objective: Objective, sizes: tuple[int, ...], column: int, column_count: int) -> Rows:
    """Equation 5: t >= sum over all layers but l of w (s - rescale), for every l; all layers if there is only one.

    The scores are the first columns, layer after layer; `column` is that of t.
    """
    weights = objective.layer_weights(sizes)
    layer_count = len(sizes)
    left_in = 1.0 - np.eye(layer_count) if layer_count > 1 else np.ones((1, 1))
    coefficients = np.zeros((layer_count, column_count))
    coefficients[:, : sum(sizes)] = -np.repeat(left_in * weights, sizes, axis=1)
    coefficients[:, column] = 1.0
    lower = -objective.rescale * left_in @ (weights * np.array(sizes))
    return Rows(sparse.csr_array(coefficients), lower, np.full(layer_count, np.inf))

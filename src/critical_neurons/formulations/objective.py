"""The objective (equations 4 to 7): sparsity of the scores plus loss_weight times the softmax term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
from scipy import sparse
from scipy.optimize import brentq

from critical_neurons.core.budget import Budget
from critical_neurons.core.costs import count_cost, differentiate_cost
from critical_neurons.core.formulation import ObjectiveName
from critical_neurons.core.network import Network
from critical_neurons.core.program import Rows
from critical_neurons.core.structure import Floats
from critical_neurons.errors import InvalidSettingError


@dataclass(frozen=True)
class Objective:
    """How the scores of a layer are weighted, and whether the softmax term is a mean or a sum over the data points.

    * `balanced`: the sum of a layer's scores is divided by its number of units, so that all layers weigh the
      same; the softmax term is a mean.
    * `authors`: divided by the layer's neurons as the authors' code counts them, units times kernel height times
      kernel width; a mean.
    * `paper`: divided by the number of all units; a sum. As printed.

    >>> cn.Objective("balanced", loss_weight=5.0).layer_weights(cn.read_network(model, inputs))
    array([0.25 , 0.125])
    """

    name: ObjectiveName = "balanced"
    loss_weight: float = 5.0
    rescale: float = 2.0

    def layer_weights(self, network: Network) -> Floats:
        """The weight of one score of each group in the sparsity term."""
        sizes = np.array(network.group_sizes, dtype=np.float64)
        match self.name:
            case "balanced":
                return 1.0 / sizes
            case "authors":
                return 1.0 / (sizes * network.kernels)
            case "paper":
                return np.full(len(sizes), 1.0 / sizes.sum())
            case _:
                assert_never(self.name)

    def softmax_weight(self, batch_size: int) -> float:
        return self.loss_weight if self.name == "paper" else self.loss_weight / batch_size

    def compute(self, network: Network, scores: Floats, losses: Floats) -> float:
        """Equations 5 to 7 by their definition: what the program minimises, without the program."""
        layers = np.split(scores - self.rescale, np.cumsum(network.group_sizes)[:-1])
        sums = self.layer_weights(network) * [layer.sum() for layer in layers]
        sparsity = sums.sum() - (sums.min() if len(sums) > 1 else 0.0)
        return float(sparsity + self.softmax_weight(len(losses)) * losses.sum())


@dataclass(frozen=True, eq=False)
class BudgetRows:
    """A budget in place of the sparsity term: weights (rows, units) · scores <= limits.

    Only the softmax term is minimised, averaged over the data points.
    """

    weights: Floats
    limits: Floats

    def compute(self, network: Network, scores: Floats, losses: Floats) -> float:
        return float(losses.mean())


Goal: TypeAlias = Objective | BudgetRows


def find_floor(goal: Goal, network: Network) -> float:
    """A lower bound of the objective: every unit removed, at no loss."""
    return goal.compute(network, np.zeros(network.unit_count), np.zeros(1))


def budget_network(network: Network, budget: Budget) -> BudgetRows:
    """A budget as linear rows in the scores.

    Parameters and multiply-adds are products of what neighbouring layers keep. They are linearised at the point where
    every unit is kept to the same fraction and the cost equals the budget.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs[:3].double().numpy())
    >>> half = cn.budget_network(network, cn.Budget(units=0.5))
    >>> cn.solve(cn.encode(network, bounds, labels[:3].numpy(), half)).status
    <Status.OPTIMAL: 'optimal'>
    """
    units, measure, share = network.unit_count, budget.measure, budget.share
    if measure == "units":
        starts = np.repeat(np.arange(len(network.group_sizes)), network.group_sizes)
        rows = np.eye(len(network.group_sizes))[:, starts] if budget.by_layer else np.ones((1, units))
        return BudgetRows(rows, np.floor(share * rows.sum(axis=1) + 1e-9))

    if measure == "latency":
        raise InvalidSettingError("budget: latency is for compress, which measures it. Give units, params or macs.")

    def cost(part: float) -> float:
        return count_cost(network.structure, _keep(part, units), measure)

    limit = share * cost(1.0)
    if cost(0.0) > limit:
        raise InvalidSettingError(
            f"budget: {measure} cannot fall to {share:.4g} of what they are; what is not scored alone takes "
            f"{cost(0.0) / cost(1.0):.4g}."
        )
    part = float(brentq(lambda p: cost(p) - limit, 0.0, 1.0))
    slope = differentiate_cost(network.structure, _keep(part, units), measure)[:units]
    slope /= slope.max()
    return BudgetRows(slope[None], np.array([part * slope.sum()]))


def _keep(part: float, units: int) -> Floats:
    return np.append(np.full(units, part), 1.0)


def encode_sparsity(objective: Objective, network: Network, column: int, column_count: int) -> Rows:
    """Equation 5: t >= sum over all layers but l of w (s - rescale), for every l; a single layer is not left out.

    The scores are the first columns, layer by layer; `column` is that of t.
    """
    weights, sizes = objective.layer_weights(network), network.group_sizes
    layer_count = len(sizes)
    left_in = 1.0 - np.eye(layer_count) if layer_count > 1 else np.ones((1, 1))
    coefficients = np.zeros((layer_count, column_count))
    coefficients[:, : sum(sizes)] = -np.repeat(left_in * weights, sizes, axis=1)
    coefficients[:, column] = 1.0
    lower = -objective.rescale * left_in @ (weights * np.array(sizes))
    return Rows(sparse.csr_array(coefficients), lower, np.full(layer_count, np.inf))

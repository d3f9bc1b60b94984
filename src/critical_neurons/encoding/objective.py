"""The objective (equations 4 to 7): sparsity of the scores plus loss_weight times the softmax term."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from critical_neurons.network import Floats
from critical_neurons.program import Rows
from critical_neurons.settings import ObjectiveName


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

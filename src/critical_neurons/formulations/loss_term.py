"""The loss as a convex term of a program (equation 6): its value and tangents at every data point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import sparse

from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.loss import Loss
from critical_neurons.core.program import Rows, widen
from critical_neurons.core.structure import Floats, Ints


class LogitModel(Protocol):
    """Logits as an affine function of a program's columns."""

    def logits(self, point: Floats) -> Floats:
        """(batch, classes)."""

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        """Coefficients of seeds[r] · logits[samples[r]]."""


@dataclass(frozen=True)
class FollowedLogits:
    """The logits of a model of which the network is a span: the tail applied to the span's last value."""

    span: LogitModel
    tail: Tail

    def logits(self, point: Floats) -> Floats:
        return self.tail.apply(self.span.logits(point))

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        return self.span.differentiate_logits(self.tail.adjoint(seeds, samples), samples)


def follow(model: LogitModel, tail: Tail | None) -> LogitModel:
    return model if tail is None else FollowedLogits(model, tail)


@dataclass(frozen=True)
class LossTerm:
    model: LogitModel
    loss: Loss
    columns: slice
    column_count: int

    def logits(self, point: Floats) -> Floats:
        return self.model.logits(point)

    def values(self, point: Floats) -> Floats:
        return self.loss.values(self.model.logits(point))

    def cuts(self, point: Floats, which: Ints) -> Rows:
        """f(x') >= f(x) + g · (x' - x), written as t - g · x' >= f(x) - g · x."""
        seeds = self.loss.choose(which).gradients(self.model.logits(point)[which])
        slopes = widen(self.model.differentiate_logits(seeds, which), self.column_count)
        epigraph = sparse.csr_array(
            (np.ones(len(which)), (np.arange(len(which)), self.columns.start + which)), shape=slopes.shape
        )
        lower = self.values(point)[which] - slopes @ point
        return Rows(sparse.csr_array(epigraph - slopes), lower, np.full(len(which), np.inf))

    def affine_forms(self) -> tuple[sparse.csr_array, Floats, Loss]:
        batch, classes = len(self.loss), self.model.logits(np.zeros(self.column_count)).shape[1]
        samples = np.repeat(np.arange(batch), classes)
        seeds = np.tile(np.eye(classes), (batch, 1))
        matrix = widen(self.model.differentiate_logits(seeds, samples), self.column_count)
        offset = self.model.logits(np.zeros(self.column_count)).reshape(-1)
        return matrix, offset, self.loss

"""The softmax term (equation 6): log-sum-exp of the logits minus the label's logit, for every data point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import sparse
from scipy.special import logsumexp, softmax

from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.network import Floats, Ints
from critical_neurons.core.program import Rows, widen


class LogitModel(Protocol):
    """Logits as an affine function of a program's columns."""

    def logits(self, point: Floats) -> Floats:
        """(batch, classes)."""

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        """Coefficients of seeds[r] · logits[samples[r]]."""


@dataclass(frozen=True)
class FollowedLogits:
    """The logits of a model of which the network is a span: its last value, followed by the tail."""

    span: LogitModel
    tail: Tail

    def logits(self, point: Floats) -> Floats:
        return self.tail.apply(self.span.logits(point))

    def differentiate_logits(self, seeds: Floats, samples: Ints) -> sparse.csr_array:
        return self.span.differentiate_logits(self.tail.adjoint(seeds, samples), samples)


def follow(model: LogitModel, tail: Tail | None) -> LogitModel:
    return model if tail is None else FollowedLogits(model, tail)


@dataclass(frozen=True)
class SoftmaxTerm:
    model: LogitModel
    labels: Ints
    columns: slice
    column_count: int

    def logits(self, point: Floats) -> Floats:
        return self.model.logits(point)

    def values(self, point: Floats) -> Floats:
        logits = self.model.logits(point)
        result: Floats = logsumexp(logits, axis=1) - logits[np.arange(len(logits)), self.labels]
        return np.maximum(result, 0.0)

    def cuts(self, point: Floats, which: Ints) -> Rows:
        """f(x') >= f(x) + g · (x' - x), written as t - g · x' >= f(x) - g · x."""
        logits = self.model.logits(point)[which]
        seeds = softmax(logits, axis=1)
        seeds[np.arange(len(which)), self.labels[which]] -= 1.0
        slopes = widen(self.model.differentiate_logits(seeds, which), self.column_count)
        epigraph = sparse.csr_array(
            (np.ones(len(which)), (np.arange(len(which)), self.columns.start + which)), shape=slopes.shape
        )
        lower = self.values(point)[which] - slopes @ point
        return Rows(sparse.csr_array(epigraph - slopes), lower, np.full(len(which), np.inf))

    def affine_forms(self) -> tuple[sparse.csr_array, Floats, Ints]:
        batch, classes = len(self.labels), self.model.logits(np.zeros(self.column_count)).shape[1]
        samples = np.repeat(np.arange(batch), classes)
        seeds = np.tile(np.eye(classes), (batch, 1))
        matrix = widen(self.model.differentiate_logits(seeds, samples), self.column_count)
        offset = self.model.logits(np.zeros(self.column_count)).reshape(-1)
        return matrix, offset, self.labels

"""Linear suffix: the rest of a model behind a span, linearised at every data point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from critical_neurons.core.structure import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Tail:
    """At data point d the logits are offset[d] + slopes[d] · v, where v is the output of the span.

    offset (batch, classes), slopes (batch, classes, features); the features are v, flat.
    """

    offset: Floats
    slopes: Floats

    @property
    def class_count(self) -> int:
        return int(self.offset.shape[1])

    def apply(self, values: Floats) -> Floats:
        """The logits (batch, classes) at outputs of the span (batch, ...)."""
        flat = values.reshape(len(values), -1, 1)
        logits: Floats = (self.slopes @ flat)[:, :, 0] + self.offset
        return logits

    def adjoint(self, seeds: Floats, samples: Ints) -> Floats:
        """(rows, features): seeds[r] · slopes[samples[r]]."""
        pulled = np.empty((len(samples), self.slopes.shape[2]))
        for row, sample in enumerate(samples):  # avoids a copy of the slopes for every row
            pulled[row] = seeds[row] @ self.slopes[sample]
        return pulled

    def choose(self, points: Bools) -> Tail:
        """The tail at some of the data points."""
        return Tail(self.offset[points], self.slopes[points])

"""Bounds: an interval for every pre-activation, data point by data point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from critical_neurons.network import Floats


@dataclass(frozen=True)
class Interval:
    """Element-wise lower and upper ends. The same array twice when the interval is a point."""

    lower: Floats
    upper: Floats

    def __post_init__(self) -> None:
        if self.lower is not self.upper and not np.all(self.lower <= self.upper):
            raise ValueError("an interval has a lower end above its upper end")


@dataclass(frozen=True)
class Bounds:
    """`inputs` and, by the index of each ReLU and max pool in `Network.ops`, the interval (batch, *shape) read."""

    inputs: Floats
    radius: float
    before_relu: Mapping[int, Interval]
    before_pool: Mapping[int, Interval]
    pruned: bool = False
    """Whether they hold whatever the scores are."""

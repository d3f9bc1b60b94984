"""Bounds: an interval for every pre-activation, data point by data point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from critical_neurons.core.network import MaxPool, Network, Relu
from critical_neurons.core.structure import Bools, Floats
from critical_neurons.errors import InvalidSettingError

SOUND = 1e-9
"""Tolerance of the test whether a value is inside its interval, relative to the largest value."""

PROBES = 4
"""Number of random masks or points of the input boxes to test bounds with."""


@dataclass(frozen=True)
class Interval:
    """Element-wise lower and upper ends, float64. The same array twice when the interval is a point.

    >>> cn.Interval(lower=[-1.0, 0.0], upper=[1.0, 2.0]).is_point
    False
    """

    lower: Floats
    upper: Floats

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        if self.lower is not self.upper and not np.all(self.lower <= self.upper):
            raise InvalidSettingError("an interval has a lower end above its upper end, or NaN")

    @property
    def is_point(self) -> bool:
        return self.lower is self.upper or np.array_equal(self.lower, self.upper)

    def at(self, points: Bools) -> Interval:
        """The part for some of the data points."""
        lower = self.lower[points]
        return Interval(lower, lower if self.lower is self.upper else self.upper[points])


@dataclass(frozen=True)
class Bounds:
    """`inputs` and, by the index of each ReLU and max pool in `Network.ops`, the interval (batch, *shape) read.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs[:3].double().numpy())
    >>> [interval.lower.shape for interval in bounds.before_relu.values()]
    [(3, 4, 4, 4), (3, 8)]
    """

    inputs: Floats
    radius: float
    before_relu: Mapping[int, Interval]
    before_pool: Mapping[int, Interval]
    pruned: bool = False
    """Whether they hold for all scores."""
    box: Interval | None = None
    """What the inputs range over, (batch, *shape), where that is not `radius` around them."""

    def at(self, points: Bools) -> Bounds:
        """The part for some of the data points."""
        relus, pools = (
            {index: interval.at(points) for index, interval in part.items()}
            for part in (self.before_relu, self.before_pool)
        )
        box = None if self.box is None else self.box.at(points)
        return replace(self, inputs=self.inputs[points], before_relu=relus, before_pool=pools, box=box)

    def check(self, network: Network) -> None:
        """Whether they fit the network, and hold wherever it was tried: at the data points; at points of the boxes
        around them; if `pruned`, with every unit removed and with units removed at random."""
        self._check_shapes(network)
        intervals = {**self.before_relu, **self.before_pool}
        for where, inputs, kept in self._draw_probes(network):
            values = network.evaluate(inputs, kept)
            for index, interval in intervals.items():
                op = network.ops[index]
                assert isinstance(op, Relu | MaxPool)
                _check_inside(f"bounds: {op.name}", where, values[op.source], interval)

    def _check_shapes(self, network: Network) -> None:
        if self.inputs.shape[1:] != network.input_shape:
            raise InvalidSettingError(
                f"bounds: found inputs of shape {self.inputs.shape[1:]}. Accepted: {network.input_shape}."
            )
        if self.box is not None:
            self._check_box(self.box)
        for kind, part, name in ((Relu, self.before_relu, "before_relu"), (MaxPool, self.before_pool, "before_pool")):
            ops = {index: op for index, op in enumerate(network.ops) if isinstance(op, kind)}
            if set(part) != set(ops):
                wanted = ", ".join(f"{index} ({op.name})" for index, op in ops.items()) or "none"
                raise InvalidSettingError(
                    f"bounds: {name} has intervals for the ops {sorted(part)}. Accepted: one for each of {wanted}, "
                    "by its index in network.ops."
                )
            for index, op in ops.items():
                expected = (len(self.inputs), *network.ops[op.sources[0]].shape)
                for end in (part[index].lower, part[index].upper):
                    if np.shape(end) != expected:
                        raise InvalidSettingError(
                            f"bounds: {name}, op {index} ({op.name}): found shape {np.shape(end)}. Accepted: "
                            f"{expected}, data points first."
                        )
                    if not np.isfinite(end).all():
                        raise InvalidSettingError(f"bounds: {name}, op {index} ({op.name}): NaN or infinite ends.")

    def _check_box(self, box: Interval) -> None:
        if box.lower.shape != self.inputs.shape or not np.isfinite([box.lower, box.upper]).all():
            raise InvalidSettingError(
                f"bounds: found a box of shape {box.lower.shape}. Accepted: finite ends of the shape of the inputs, "
                f"{self.inputs.shape}."
            )
        _check_inside("bounds: box", "", self.inputs, box)

    def _draw_probes(self, network: Network) -> Iterator[tuple[str, Floats, Floats | None]]:
        """For every probe: its description in messages, the inputs, and the factor of every unit (None: all 1)."""
        yield "", self.inputs, None
        generator = np.random.default_rng(0)
        if self.pruned:
            yield ", all units removed", self.inputs, np.zeros(network.unit_count)
        for _ in range(PROBES if self.pruned or self.radius or self.box else 0):
            corner = self._draw_corner(generator)
            kept = generator.integers(0, 2, network.unit_count) if self.pruned else np.ones(network.unit_count)
            removed = np.flatnonzero(kept == 0).tolist()
            where = f", units {removed} removed" if self.pruned else ", a corner of its box"
            yield where, corner, kept.astype(np.float64)

    def _draw_corner(self, generator: np.random.Generator) -> Floats:
        signs = generator.choice([-1.0, 1.0], self.inputs.shape)
        if self.box is None:
            return self.inputs + self.radius * signs
        return np.where(signs > 0, self.box.upper, self.box.lower)


def _check_inside(name: str, where: str, values: Floats, interval: Interval) -> None:
    slack = SOUND * max(1.0, float(np.abs(values).max()))
    outside = np.argwhere((values < interval.lower - slack) | (values > interval.upper + slack))
    if len(outside):
        point, *element = first = tuple(outside[0].tolist())
        raise InvalidSettingError(
            f"{name}, data point {point}{where}, element {tuple(element)}: the network has {values[first]:.9g}, "
            f"outside [{interval.lower[first]:.9g}, {interval.upper[first]:.9g}]. Bounds must hold; widen them, or "
            "use those of bound_network."
        )

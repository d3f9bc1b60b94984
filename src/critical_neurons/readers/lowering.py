"""Lowering: readings of calls to ops, while tracking the channels of every value."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import numpy as np
from torch import nn

from critical_neurons.core.network import Affine, Concat, Input, MaxPool, Op, Relu, Shape, Sum
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import InvalidSettingError
from critical_neurons.readers.linear_maps import GatherMap, ReshapeMap, ScaleMap
from critical_neurons.readers.maxima import write_difference, write_max_pool
from critical_neurons.readers.provisional_units import Channels
from critical_neurons.readers.registry import (
    SLICEABLE,
    Adds,
    Concatenates,
    Ends,
    Filters,
    KeepsChannels,
    Mixes,
    Passes,
    PoolsMaximum,
    Reading,
    Rearranges,
    Rectifies,
    Reshapes,
    Scales,
    TakesMaximum,
    TracedCall,
)
from critical_neurons.readers.scorable_layers import ChannelTracker


class OpCollector:
    """`ops` and the `channels` of their values."""

    def __init__(self) -> None:
        self.tracker = ChannelTracker()
        self.ops: list[Op] = []
        self.channels: list[Channels] = []
        self._called: set[str] = set()
        self._outside: set[str] = set()
        self._parameters: dict[int, str] = {}

    def start(self, shape: Shape) -> int:
        return self.add(Input(shape), self.tracker.start(shape))

    def note(self, call: TracedCall, reading: Reading, sources: tuple[int, ...]) -> int:
        """Add the ops of a call. Returns the index of its value."""
        name, shape, source = call.name, call.output_shape, sources[0]
        incoming, tracker = self.channels[source], self.tracker
        match reading:
            case Mixes():
                self._call_once(call)
                obstacle = reading.obstacle or _obstacle(call)
                channels = tracker.mix(
                    *(incoming, name, shape[reading.axis], shape),
                    axis=reading.axis,
                    padded=reading.padded,
                    obstacle=obstacle,
                )
                return self.add(Affine(name, source, shape, reading.map), channels)
            case Filters():
                self._call_once(call)
                channels = tracker.filter(incoming, name, shape[0], shape, padded=reading.padded)
                return self.add(Affine(name, source, shape, reading.map, keeps_channels=True), channels)
            case Scales():
                scale, offset = reading.scale, reading.offset
                if reading.obstacle:
                    tracker.block(incoming, f"it feeds {name}, {reading.obstacle}")
                if call.module is None:
                    channels = tracker.calculate(incoming, name, scale, offset)
                else:
                    self._call_once(call)
                    channels = tracker.scale(incoming, name, scale, offset)
                op = Affine(name, source, shape, ScaleMap(scale, offset), keeps_channels=True)
                return self.add(op, channels)
            case KeepsChannels():
                if obstacle := _obstacle(call):
                    tracker.block(incoming, f"it feeds {name}, {obstacle}")
                channels = tracker.average(
                    incoming, name, shape, keeps_constants=reading.keeps_constants, axes=reading.axes
                )
                return self.add(Affine(name, source, shape, reading.map, keeps_channels=True), channels)
            case Reshapes():
                channels = tracker.reshape(incoming, shape, reading.obstacle)
                reshape = ReshapeMap(incoming.shape, shape)
                return self.add(Affine(name, source, shape, reshape, keeps_channels=True), channels)
            case Rearranges():
                channels = incoming.gather(reading.elements)
                gather = GatherMap(reading.elements, incoming.shape)
                return self.add(Affine(name, source, shape, gather, keeps_channels=True), channels)
            case Rectifies():
                if obstacle := reading.obstacle or (_obstacle(call) if np.ndim(reading.slope) else ""):
                    tracker.block(incoming, f"it feeds {name}, {obstacle}")
                if call.module is not None and any(p.numel() for p in call.module.parameters()):
                    self._call_once(call)
                    tracker.note_module(name)
                return self._rectify(name, source, reading)
            case PoolsMaximum():
                channels = tracker.average(incoming, name, shape, keeps_constants=True)
                return self.add(MaxPool(name, source, shape, reading.windows), channels)
            case Adds():
                added = (source, self._negate(name, sources[1])) if reading.difference else sources
                channels = tracker.add([self.channels[index] for index in added], name)
                return self.add(Sum(name, added, shape), channels)
            case TakesMaximum():
                channels = tracker.compare([self.channels[index] for index in sources], name, smaller=reading.smaller)
                return self._compare(name, sources, channels, smaller=reading.smaller)
            case Concatenates():
                channels = tracker.concatenate([self.channels[index] for index in sources])
                return self.add(Concat(name, sources, shape), channels)
            case Passes() | Ends():
                return source
            case _:
                assert_never(reading)

    def _rectify(self, name: str, source: int, reading: Rectifies) -> int:
        """The positive part of x and, times the slope, the negative part, both gated by the same units.

        A ReLU behind a max pool is moved before it, which is equivalent, since both are monotone.
        """
        op = self.ops[source]
        if isinstance(op, MaxPool) and reading.is_relu and not self.channels[source].nonnegative:
            inside = self._rectify(name, op.source, reading)
            channels = self.tracker.average(self.channels[inside], name, op.shape, keeps_constants=True)
            return self.add(replace(op, source=inside), channels)
        channels, units = self.tracker.rectify(self.channels[source], reading)
        above = self._clip(name, source, units, channels, reading.ceiling)
        if reading.is_relu:
            return above
        negated = self._scale(name, source, -1.0)
        below = self._scale(name, self._clip(name, negated, units, channels, reading.depth), -reading.slope)
        return self.add(Sum(name, (above, below), op.shape), channels)

    def _clip(self, name: str, source: int, units: Ints, channels: Channels, ceiling: float | None) -> int:
        """max(0, x), or min(max(0, x), c) = max(0, x) - max(0, x - c)."""
        shape = channels.shape
        rectified = self.add(Relu(name, source, shape, units), channels)
        if ceiling is None:
            return rectified
        lowered = self._scale(name, source, 1.0, -ceiling)
        minus = self._scale(name, self.add(Relu(name, lowered, shape, units), channels), -1.0)
        return self.add(Sum(name, (rectified, minus), shape, ceiling), channels)

    def _compare(self, name: str, sources: tuple[int, ...], channels: Channels, *, smaller: bool) -> int:
        """max(a, b) = b + max(0, a - b) and min(a, b) = b - max(0, b - a), by a ReLU without units."""
        a, b = sources
        over, under = (b, a) if smaller else (a, b)
        first, shape = len(self.ops), channels.shape
        for op in write_difference(name, shape, over, under, first):
            self.add(op, channels)
        gained = len(self.ops) - 1
        return self.add(Sum(name, (self._scale(name, gained, -1.0) if smaller else gained, b), shape), channels)

    def _negate(self, name: str, source: int) -> int:
        channels, ones = self.channels[source], np.ones(self.ops[source].shape[0])
        negated = self._scale(name, source, -1.0)
        self.channels[negated] = self.tracker.calculate(channels, name, -ones, 0.0 * ones)
        return negated

    def _scale(self, name: str, source: int, factor: float | Floats, offset: float = 0.0) -> int:
        """A factor and an offset inside another reading, which tracks the channels."""
        shape, zeros = self.ops[source].shape, np.zeros(self.ops[source].shape[0])
        scale = ScaleMap(zeros + factor, zeros + offset)
        return self.add(Affine(name, source, shape, scale, keeps_channels=True), self.channels[source])

    def pass_by(self, name: str, module: nn.Module) -> None:
        """A module called outside the span must not be one of its layers, which may lose units."""
        self._outside.add(name)
        users = {self._parameters.setdefault(id(parameter), name) for parameter in module.parameters()}
        for other in sorted({name, *users} & self._called):
            raise InvalidSettingError(
                f"stop: {name} lies outside the span and shares weights with {other} in it. Layers that share "
                "weights are not read."
            )

    def keep_reachable(self, last: int) -> list[Op]:
        """The ops that a value depends on, renumbered. Max pools of values that may be negative become ReLUs."""
        wanted = {0, last}
        for index in range(last, -1, -1):
            if index in wanted:
                wanted.update(self.ops[index].sources)
        number: dict[int, int] = {}
        ops: list[Op] = []
        for index in sorted(wanted):
            op = _renumber(self.ops[index], number)
            if isinstance(op, MaxPool) and not self.channels[self.ops[index].sources[0]].nonnegative:
                ops += write_max_pool(op, ops[op.source].shape, len(ops))
            else:
                ops.append(op)
            number[index] = len(ops) - 1
        return ops

    def add(self, op: Op, channels: Channels) -> int:
        self.ops.append(op)
        self.channels.append(channels)
        return len(self.ops) - 1

    def _call_once(self, call: TracedCall) -> None:
        if call.name in self._called | self._outside:
            raise call.refuse("this module is called more than once", "Layers that share weights are not read.")
        self._called.add(call.name)
        for parameter in call.module.parameters() if call.module is not None else ():
            other = self._parameters.setdefault(id(parameter), call.name)
            if other != call.name:
                raise call.refuse(f"it shares weights with {other}", "Layers that share weights are not read.")


def _renumber(op: Op, number: dict[int, int]) -> Op:
    match op:
        case Input():
            return op
        case Sum() | Concat():
            return replace(op, sources=tuple(number[source] for source in op.sources))
        case Affine() | Relu() | MaxPool():
            return replace(op, source=number[op.source])
        case _:
            assert_never(op)


def _obstacle(call: TracedCall) -> str:
    """Why the channels around a call must stay, if so: its parameters cannot be sliced."""
    if call.module is None or isinstance(call.module, SLICEABLE) or not call.module.state_dict():
        return ""
    return f"a {type(call.module).__name__}, whose parameters cannot be sliced"

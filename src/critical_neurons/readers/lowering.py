"""Lowering: readings of calls, one after the other, to ops and channels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import assert_never

import numpy as np
from torch import Tensor, nn

from critical_neurons.core.network import Affine, Concat, Input, MaxPool, Op, Relu, Shape, Sum
from critical_neurons.errors import InvalidSettingError, UnreadableModelError
from critical_neurons.readers.channels import Channels, ChannelTracker, Cost
from critical_neurons.readers.linear_maps import ReshapeMap, ScaleMap
from critical_neurons.readers.registry import (
    SLICEABLE,
    SPAN_ADVICE,
    Adds,
    Call,
    Concatenates,
    Ends,
    Filters,
    KeepsChannels,
    Mixes,
    Passes,
    PoolsMaximum,
    Reading,
    Rectifies,
    Reshapes,
    Scales,
)


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
        return self.add(Input(shape), self.tracker.start(shape[0]))

    def note(self, call: Call, reading: Reading, sources: tuple[int, ...]) -> int:
        """Add the ops of a call; the index of its value."""
        name, shape, source = call.name, call.output_shape, sources[0]
        incoming, tracker = self.channels[source], self.tracker
        kind = type(call.module).__name__
        match reading:
            case Mixes():
                self._call_once(call)
                obstacle = reading.obstacle or _obstacle(call)
                cost = _cost(call, reading.groups)
                channels = tracker.mix(incoming, name, kind, cost, padded=reading.padded, obstacle=obstacle)
                return self.add(Affine(name, source, shape, reading.map), channels)
            case Filters():
                self._call_once(call)
                cost = _cost(call, call.input_shape[0])
                channels = tracker.filter(incoming, name, kind, cost, padded=reading.padded)
                return self.add(Affine(name, source, shape, reading.map, keeps_channels=True), channels)
            case Scales():
                scale, offset = reading.scale, reading.offset
                if reading.obstacle:
                    tracker.block(incoming, f"it feeds {name}, {reading.obstacle}")
                if call.module is None:
                    channels = tracker.calculate(incoming, name, scale, offset)
                else:
                    self._call_once(call)
                    parameters = len(list(call.module.parameters()))
                    channels = tracker.scale(incoming, name, scale, offset, parameters=parameters)
                op = Affine(name, source, shape, ScaleMap(scale, offset), keeps_channels=True)
                return self.add(op, channels)
            case KeepsChannels():
                if obstacle := _obstacle(call):
                    tracker.block(incoming, f"it feeds {name}, {obstacle}")
                channels = tracker.average(incoming, name, keeps_constants=reading.keeps_constants)
                return self.add(Affine(name, source, shape, reading.map, keeps_channels=True), channels)
            case Reshapes():
                channels = tracker.reshape(incoming, call.input_shape, shape, reading.obstacle)
                reshape = ReshapeMap(call.input_shape, shape)
                return self.add(Affine(name, source, shape, reshape, keeps_channels=True), channels)
            case Rectifies():
                return self._rectify(name, source, reading.ceiling)
            case PoolsMaximum():
                return self.add(MaxPool(name, source, shape, reading.windows), incoming)
            case Adds():
                channels = tracker.add([self.channels[index] for index in sources], name)
                return self.add(Sum(name, sources, shape), channels)
            case Concatenates():
                channels = tracker.concatenate([self.channels[index] for index in sources])
                return self.add(Concat(name, sources, shape), channels)
            case Passes() | Ends():
                return source
            case _:
                assert_never(reading)

    def _rectify(self, name: str, source: int, ceiling: float | None) -> int:
        """max(0, x), or min(max(0, x), c) = max(0, x) - max(0, x - c), both gated by the same units.

        A ReLU behind a max pool is put before it, which is the same: both keep the order of numbers.
        """
        op = self.ops[source]
        if isinstance(op, MaxPool) and not self.channels[source].nonnegative:
            inside = self._rectify(name, op.source, ceiling)
            return self.add(replace(op, source=inside), self.channels[inside])
        shape, incoming = op.shape, self.channels[source]
        channels, units = self.tracker.rectify(incoming, shape, ceiling)
        rectified = self.add(Relu(name, source, shape, units), channels)
        if ceiling is None:
            return rectified
        ones = np.ones(shape[0])
        lowered = Affine(name, source, shape, ScaleMap(ones, -ceiling * ones), keeps_channels=True)
        above = self.add(Relu(name, self.add(lowered, incoming), shape, units), channels)
        negated = Affine(name, above, shape, ScaleMap(-ones, 0 * ones), keeps_channels=True)
        minus = self.add(negated, channels)
        return self.add(Sum(name, (rectified, minus), shape, ceiling), channels)

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
        """The ops that a value depends on, numbered anew."""
        wanted = {0, last}
        for index in range(last, -1, -1):
            if index in wanted:
                wanted.update(self.ops[index].sources)
        order = sorted(wanted)
        number = {old: new for new, old in enumerate(order)}
        for index in order:
            op = self.ops[index]
            if isinstance(op, MaxPool) and not self.channels[op.source].nonnegative:
                raise UnreadableModelError(
                    f"{op.name}: a max pool on values that may be negative. It is read behind a ReLU, or "
                    f"right before one. {SPAN_ADVICE}"
                )
        return [_renumber(self.ops[index], number) for index in order]

    def add(self, op: Op, channels: Channels) -> int:
        self.ops.append(op)
        self.channels.append(channels)
        return len(self.ops) - 1

    def _call_once(self, call: Call) -> None:
        if call.name in self._called | self._outside:
            raise call.refuse("this module is called more than once", "Layers that share weights are not read.")
        self._called.add(call.name)
        for parameter in call.module.parameters() if call.module is not None else ():
            other = self._parameters.setdefault(id(parameter), call.name)
            if other != call.name:
                raise call.refuse(f"it shares weights with {other}", "Layers that share weights are not read.")


def _cost(call: Call, groups: int) -> Cost:
    """Weights per pair of channels, and how often each is used."""
    weight = getattr(call.module, "weight", None)
    return Cost(
        size=call.output_shape[0],
        kernel=math.prod(weight.shape[2:]) if isinstance(weight, Tensor) else 0,
        positions=math.prod(call.output_shape[1:]),
        groups=groups,
        extras=int(getattr(call.module, "bias", None) is not None),
    )


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


def _obstacle(call: Call) -> str:
    """Why the channels around a call must stay, if so: its parameters cannot be sliced."""
    if call.module is None or isinstance(call.module, SLICEABLE) or not call.module.state_dict():
        return ""
    return f"a {type(call.module).__name__}, whose parameters cannot be sliced"

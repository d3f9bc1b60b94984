"""Scorable layers: which layers a program can score.

The units of every layer get provisional numbers, which are tracked with the elements (`provisional_units.Channels`)
through batch norms, pools, slices, ReLUs and concatenations to the layers that read them. On the way there may be a
reason why a layer gets no scores. Which units are removed together is decided by the structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from critical_neurons.core.network import Op, Relu, Shape
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints, Structure
from critical_neurons.readers.provisional_units import Channels, join, make_channels
from critical_neurons.readers.registry import Rectifies


@dataclass(frozen=True)
class ScorableLayers:
    """`reasons` why layers get no scores, the provisional `units` of every layer that was read, and all `modules`
    that were read."""

    reasons: dict[str, str]
    units: dict[str, Ints]
    modules: frozenset[str]

    def number(self, structure: Structure, ops: Iterable[Op]) -> tuple[Op, ...]:
        """The ops with the structure's units instead of provisional ones."""
        count = sum(len(units) for units in self.units.values())
        number = np.full(count + 1, NO_UNIT)  # the last entry stands for NO_UNIT itself
        units = {layer.name: layer.units for layer in structure.layers}
        for name, provisional in self.units.items():
            number[provisional] = units[name]
        return tuple(replace(op, units=number[op.units]) if isinstance(op, Relu) else op for op in ops)


@dataclass(frozen=True, eq=False)
class _Read:
    """A layer, its provisional units, and the reason if they get no scores."""

    name: str
    units: Ints
    reason: str


class ChannelTracker:
    def __init__(self) -> None:
        self._layers: list[_Read] = []
        self._firsts: list[int] = []
        self._count = 0
        self._modules: set[str] = set()

    def start(self, shape: Shape) -> Channels:
        return make_channels(np.full(shape[0], NO_UNIT), rectified=True).spread(shape)

    def mix(
        self,
        incoming: Channels,
        name: str,
        size: int,
        shape: Shape,
        *,
        axis: int = 0,
        padded: bool,
        obstacle: str = "",
    ) -> Channels:
        """A layer that computes new units, of a value of this `shape`, from the incoming channels along the same
        `axis`. `obstacle`: why both must stay, if so."""
        incoming = self._take_along(incoming, name, axis)
        self._require_rectified(incoming, name)
        if padded:
            self._refuse_shifted(incoming, name)
        if obstacle:
            self._block(incoming.units, f"it feeds {name}, {obstacle}")
        units = np.arange(self._count, self._count + size)
        self._add_layer(name, size, f"it is {obstacle}" if obstacle else "")
        return make_channels(units).spread(shape, axis)

    def filter(self, incoming: Channels, name: str, size: int, shape: Shape, *, padded: bool) -> Channels:
        """A depthwise convolution: a layer whose units are those of the channels it reads."""
        incoming = self._take_along(incoming, name)
        units = np.arange(self._count, self._count + size)
        read = np.repeat(incoming.units, size // len(incoming.units))
        stays = bool((read == NO_UNIT).any())
        self._add_layer(name, size, "it filters channels that must stay, one by one" if stays else "")
        if stays:
            self._block(incoming.units, f"{name} filters it along with channels that must stay")
        self._require_rectified(incoming, name)
        if padded:
            self._refuse_shifted(incoming, name)
        return make_channels(units).spread(shape)

    def scale(self, value: Channels, name: str, scale: Floats, offset: Floats) -> Channels:
        """A module with a factor and an offset per channel."""
        incoming = self._take_along(value, name)
        self._modules.add(name)
        constants = np.where(incoming.rectified, scale * incoming.constants + offset, 0.0)
        return replace(
            incoming,
            shifted=incoming.rectified,
            constants=constants,
            nonnegative=False,
        ).spread(value.shape)

    def note_module(self, name: str) -> None:
        """A module whose parameters are never sliced."""
        self._modules.add(name)

    def calculate(self, incoming: Channels, name: str, scale: Floats, offset: Floats) -> Channels:
        """A factor and an offset per channel that belong to no module.

        A removed channel is zero before its ReLU, which an offset would undo.
        """
        aligned = (-1, *[1] * (len(incoming.shape) - 1))
        scale, offset = scale.reshape(aligned), offset.reshape(aligned)
        moved = offset != 0
        open_units = np.where(moved & ~incoming.rectified, incoming.units, NO_UNIT)
        self._block(open_units, f"no ReLU stands between it and the constant of {name}")
        return replace(
            incoming,
            shifted=incoming.rectified & (incoming.shifted | moved),
            constants=np.where(incoming.rectified, scale * incoming.constants + offset, 0.0),
            nonnegative=incoming.nonnegative and bool((scale >= 0).all() and (offset >= 0).all()),
        )

    def average(
        self,
        incoming: Channels,
        name: str,
        shape: Shape,
        *,
        keeps_constants: bool,
        axes: tuple[int, int] = (0, 0),
    ) -> Channels:
        """Pooling: every channel by itself, from all its positions; `axes` as in `registry.KeepsChannels`."""
        channels = self._take_along(incoming, name, axes[0])
        if not keeps_constants:
            self._refuse_shifted(channels, name)
        return channels.spread(shape, axes[1])

    def reshape(self, incoming: Channels, shape: Shape, obstacle: str) -> Channels:
        if obstacle:
            self._block(incoming.units, f"it feeds {obstacle}")
        return incoming.reshape(shape)

    def rectify(self, incoming: Channels, reading: Rectifies) -> tuple[Channels, Ints]:
        """The channels behind an activation, and the units it gates: those that were not gated before."""
        shape = incoming.shape
        gated = np.where(incoming.rectified, NO_UNIT, incoming.units)
        constants = np.where(incoming.rectified, reading.apply(incoming.constants), 0.0)
        shifted = incoming.shifted & incoming.rectified
        always = np.ones((1,) * len(shape), dtype=bool)
        outgoing = Channels(shape, incoming.units, always, shifted, constants, nonnegative=reading.nonnegative)
        by_channel = math.prod(gated.shape[1:]) == 1
        return outgoing, np.broadcast_to(gated, (shape[0], *gated.shape[1:]) if by_channel else shape).copy()

    def add(self, incoming: Sequence[Channels], name: str) -> Channels:
        """Channels that are added are removed together."""
        channels, constants = self._meet(incoming, f"{name} adds")
        nonnegative = all(each.nonnegative for each in incoming)
        return replace(channels, constants=constants.sum(axis=0) * channels.rectified, nonnegative=nonnegative)

    def compare(self, incoming: Sequence[Channels], name: str, *, smaller: bool) -> Channels:
        """So are channels of which the maximum or minimum is taken; of zeros it is zero."""
        channels, constants = self._meet(incoming, f"{name} compares")
        nonnegative = (all if smaller else any)(each.nonnegative for each in incoming)
        chosen = constants.min(axis=0) if smaller else constants.max(axis=0)
        return replace(channels, constants=chosen * channels.rectified, nonnegative=nonnegative)

    def _meet(self, incoming: Sequence[Channels], what: str) -> tuple[Channels, Floats]:
        """The joined channels, without constants, and the constants of each input."""
        units, rectified, shifted, constants = (
            np.stack(np.broadcast_arrays(*arrays))
            for arrays in zip(*(channels.arrays for channels in incoming), strict=True)
        )
        everywhere: Bools = np.logical_and.reduce(rectified)
        stays = (units == NO_UNIT).any(axis=0)
        self._block(np.where(stays, units, NO_UNIT), f"{what} it to channels that must stay")
        lost = ~everywhere & (rectified & shifted).any(axis=0)
        self._block(np.where(lost, units, NO_UNIT), f"{what} the constant its removal would leave before a ReLU")
        met = Channels(
            incoming[0].shape,
            np.where(stays, NO_UNIT, units[0]),
            everywhere,
            everywhere & np.logical_or.reduce(shifted),
            np.zeros_like(constants[0]),
        )
        return met, constants

    def concatenate(self, incoming: Sequence[Channels]) -> Channels:
        return join(incoming)

    def block(self, channels: Channels, reason: str) -> None:
        """Give the layers that own the channels a reason to stay, unless they have one."""
        self._block(channels.units, reason)

    def finish(self, outgoing: Channels, reason: str) -> ScorableLayers:
        """`reason`: why the outgoing channels must stay."""
        self._block(outgoing.units, reason)
        return ScorableLayers(
            {layer.name: layer.reason for layer in self._layers if layer.reason},
            {layer.name: layer.units for layer in self._layers},
            frozenset(self._modules),
        )

    def _add_layer(self, name: str, size: int, reason: str) -> None:
        self._modules.add(name)
        self._layers.append(_Read(name, np.arange(self._count, self._count + size), reason))
        self._firsts.append(self._count)
        self._count += size

    def _take_along(self, incoming: Channels, name: str, axis: int = 0) -> Channels:
        """The channels along the axis; units that share an index of it with others must stay."""
        channels, mixed = incoming.along(axis)
        self._block(mixed, f"its channels are mixed with positions where {name} reads them")
        return channels

    def _require_rectified(self, incoming: Channels, name: str) -> None:
        self._block(incoming.units[~incoming.rectified], f"no ReLU stands between it and {name}")

    def _refuse_shifted(self, incoming: Channels, name: str) -> None:
        """A constant cannot be moved into a bias if the input is zero-padded."""
        self._block(incoming.units[incoming.shifted], f"{name} pads the constant its removal would leave")

    def _behind(self, units: Ints) -> list[int]:
        """Indices of the layers that own the given units."""
        owned = np.unique(units[units != NO_UNIT])
        owners = np.searchsorted(np.array(self._firsts), owned, side="right") - 1
        return [int(index) for index in np.unique(owners)]

    def _block(self, units: Ints, reason: str) -> None:
        for index in self._behind(units):
            if not self._layers[index].reason:
                self._layers[index] = replace(self._layers[index], reason=reason)

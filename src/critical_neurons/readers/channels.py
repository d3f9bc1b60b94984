"""Channels: which unit stands behind every channel of every value, and which layers can lose units.

Every layer gives its units provisional numbers, which travel with the channels through batch norms, pools,
flattening, ReLUs and concatenations up to the layers that read them. Units that meet in an addition or pass through a
depthwise convolution become one. On the way a layer may meet a reason to be left alone. When all is read, the units
of the remaining layers are numbered through.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from critical_neurons.core.network import NO_UNIT, Bools, Floats, Hold, Ints, Layer, Op, Relu, Shape, Wiring


@dataclass(frozen=True, eq=False)
class Channels:
    """Of one value, channel by channel: its provisional unit; whether a ReLU has been applied since the layer that
    made it; whether a batch norm or a constant has shifted it since then, and what it so carries once its unit is
    removed.

    `holds` are the modules that computed what no ReLU has been applied to yet. `nonnegative`: no element can be below
    zero.
    """

    units: Ints
    rectified: Bools
    shifted: Bools
    constants: Floats
    holds: tuple[Hold, ...] = ()
    nonnegative: bool = False


@dataclass(frozen=True)
class Cost:
    """The output channels of a layer, and the numbers of `network.Wiring`."""

    size: int
    kernel: int
    positions: int
    groups: int
    extras: int


@dataclass(frozen=True)
class Findings:
    """What is known of the units when all is read."""

    ops: tuple[Op, ...]
    layers: tuple[Layer, ...]
    groups: tuple[int, ...]
    wirings: tuple[Wiring, ...]
    holds: tuple[Hold, ...]


class ChannelTracker:
    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._firsts: list[int] = []
        self._count = 0
        self._wirings: list[Wiring] = []
        self._holds: dict[str, Hold] = {}
        self._same: list[tuple[Ints, Ints]] = []

    @property
    def layer_names(self) -> list[str]:
        return [layer.name for layer in self._layers]

    def start(self, channel_count: int) -> Channels:
        never = np.zeros(channel_count, dtype=bool)
        return Channels(np.full(channel_count, NO_UNIT), ~never, never, np.zeros(channel_count))

    def mix(
        self,
        incoming: Channels,
        name: str,
        kind: str,
        cost: Cost,
        *,
        padded: bool,
        obstacle: str = "",
    ) -> Channels:
        """A layer reads the incoming channels, all of them or block by block, and makes new units."""
        size, groups = cost.size, cost.groups
        self._require_rectified(incoming, name)
        if padded:
            self._refuse_shifted(incoming, name)
        if groups > 1:
            self._require_blocks(incoming, groups, name)
        if obstacle:
            self._block(incoming.units, f"it feeds {name}, {obstacle}")
        units = np.arange(self._count, self._count + size)
        self._add_layer(name, kind, size, reason=f"it is {obstacle}" if obstacle else "", blocks=groups)
        return self._compute(incoming, name, units, cost)

    def filter(self, incoming: Channels, name: str, kind: str, cost: Cost, *, padded: bool) -> Channels:
        """A depthwise convolution: a layer whose units are those of the channels it reads."""
        size = cost.size
        units = np.arange(self._count, self._count + size)
        read = np.repeat(incoming.units, size // len(incoming.units))
        stays = bool((read == NO_UNIT).any())
        self._add_layer(name, kind, size, reason="it filters channels that must stay, one by one" if stays else "")
        if stays:
            self._block(incoming.units, f"{name} filters it along with channels that must stay")
        else:
            self._same.append((read, units))
        self._require_rectified(incoming, name)
        if padded:
            self._refuse_shifted(incoming, name)
        return self._compute(incoming, name, units, cost)

    def scale(self, incoming: Channels, name: str, scale: Floats, offset: Floats, *, parameters: int) -> Channels:
        """A module with a factor and an offset per channel."""
        nothing = np.zeros(len(incoming.units))
        self._wirings.append(
            Wiring(name, incoming.units, incoming.units, nothing.astype(bool), nothing, extras=parameters)
        )
        open_units = np.where(incoming.rectified, NO_UNIT, incoming.units)
        constants = np.where(incoming.rectified, scale * incoming.constants + offset, 0.0)
        return replace(
            incoming,
            shifted=incoming.rectified,
            constants=constants,
            holds=(Hold(name, open_units),),
            nonnegative=False,
        )

    def calculate(self, incoming: Channels, name: str, scale: Floats, offset: Floats) -> Channels:
        """A factor and an offset per channel that belong to no module.

        Before a ReLU a channel is held at zero where a module computed it, which an offset would undo.
        """
        moved = offset != 0
        open_units = incoming.units[moved & ~incoming.rectified]
        self._block(open_units, f"no ReLU stands between it and the constant of {name}")
        return replace(
            incoming,
            shifted=incoming.rectified & (incoming.shifted | moved),
            constants=np.where(incoming.rectified, scale * incoming.constants + offset, 0.0),
            nonnegative=incoming.nonnegative and bool((scale >= 0).all() and (offset >= 0).all()),
        )

    def average(self, incoming: Channels, name: str, *, keeps_constants: bool) -> Channels:
        if not keeps_constants:
            self._refuse_shifted(incoming, name)
        return incoming

    def reshape(self, incoming: Channels, before: Shape, after: Shape, obstacle: str) -> Channels:
        if obstacle:
            self._block(incoming.units, f"it feeds {obstacle}")
        if after == before:
            return incoming
        element = np.repeat(np.arange(before[0]), math.prod(before[1:])).reshape(after[0], -1)
        if (element != element[:, :1]).any():
            self._block(incoming.units, "a reshape mixes its channels with its positions")
        chosen = element[:, 0]
        return replace(
            incoming,
            units=incoming.units[chosen],
            rectified=incoming.rectified[chosen],
            shifted=incoming.shifted[chosen],
            constants=incoming.constants[chosen],
        )

    def rectify(self, incoming: Channels, shape: Shape, ceiling: float | None) -> tuple[Channels, Ints]:
        """The channels behind a ReLU, and the units it gates: those that no ReLU has gated before."""
        gated = np.where(incoming.rectified, NO_UNIT, incoming.units)
        for hold in incoming.holds:
            self._holds[hold.module] = hold
        constants = np.where(incoming.rectified, np.clip(incoming.constants, 0.0, ceiling), 0.0)
        shifted = incoming.shifted & incoming.rectified
        outgoing = Channels(incoming.units, np.ones(len(gated), dtype=bool), shifted, constants, nonnegative=True)
        return outgoing, gated.reshape(-1, *[1] * (len(shape) - 1))

    def add(self, incoming: Sequence[Channels], name: str) -> Channels:
        """Channels that meet in an addition live or die together."""
        units = np.stack([channels.units for channels in incoming])
        rectified = np.stack([channels.rectified for channels in incoming])
        shifted = np.stack([channels.shifted for channels in incoming])
        constants = np.stack([channels.constants for channels in incoming])
        everywhere: Bools = np.logical_and.reduce(rectified)
        stays = (units == NO_UNIT).any(axis=0)
        self._block(units[:, stays], f"{name} adds it to channels that must stay")
        lost = ~everywhere & (rectified & shifted).any(axis=0)
        self._block(units[:, lost], f"{name} adds the constant its removal would leave before a ReLU")
        for other in units[1:]:
            self._same.append((units[0][~stays], other[~stays]))
        return Channels(
            np.where(stays, NO_UNIT, units[0]),
            everywhere,
            everywhere & np.logical_or.reduce(shifted),
            np.where(everywhere, constants.sum(axis=0), 0.0),
            tuple(hold for channels in incoming for hold in channels.holds),
            all(channels.nonnegative for channels in incoming),
        )

    def concatenate(self, incoming: Sequence[Channels]) -> Channels:
        return Channels(
            np.concatenate([channels.units for channels in incoming]),
            np.concatenate([channels.rectified for channels in incoming]),
            np.concatenate([channels.shifted for channels in incoming]),
            np.concatenate([channels.constants for channels in incoming]),
            tuple(hold for channels in incoming for hold in channels.holds),
            all(channels.nonnegative for channels in incoming),
        )

    def block(self, channels: Channels, reason: str) -> None:
        """Leave the layers behind the channels alone, unless they have a reason already."""
        self._block(channels.units, reason)

    def finish(self, outgoing: Channels, reason: str, ops: Iterable[Op], ignore: Collection[str]) -> Findings:
        """Number the units that are left and write the numbers wherever units are named.

        `reason`: why the outgoing channels must stay.
        """
        self._block(outgoing.units, reason)
        for index, layer in enumerate(self._layers):
            if layer.name in ignore:
                self._layers[index] = replace(layer, reason="ignored, as asked")
        merged, group_of_layer = self._merge()
        self._check_blocks(merged, group_of_layer)
        self._share_reasons(group_of_layer)
        number = np.full(self._count + 1, NO_UNIT)  # the last entry answers for NO_UNIT itself
        groups: list[int] = []
        for group in dict.fromkeys(group_of_layer.tolist()):
            members = [layer for layer, g in zip(self._layers, group_of_layer, strict=True) if g == group]
            if members[0].scored:
                own = np.concatenate([layer.units for layer in members])
                _, position, inverse = np.unique(merged[own], return_index=True, return_inverse=True)
                number[own] = sum(groups) + np.argsort(np.argsort(position))[inverse]  # in order of appearance
                groups.append(len(position))
        return Findings(
            tuple(replace(op, units=number[op.units]) if isinstance(op, Relu) else op for op in ops),
            tuple(replace(layer, units=number[layer.units]) for layer in self._layers),
            tuple(groups),
            tuple(replace(w, inputs=number[w.inputs], outputs=number[w.outputs]) for w in self._wirings),
            tuple(Hold(hold.module, number[hold.units]) for hold in self._holds.values()),
        )

    def _compute(self, incoming: Channels, name: str, units: Ints, cost: Cost) -> Channels:
        self._wirings.append(
            Wiring(
                name,
                incoming.units,
                units,
                incoming.shifted,
                incoming.constants,
                kernel=cost.kernel,
                positions=cost.positions,
                groups=cost.groups,
                extras=cost.extras,
            )
        )
        never = np.zeros(len(units), dtype=bool)
        return Channels(units, never, never, np.zeros(len(units)), (Hold(name, units),))

    def _add_layer(self, name: str, kind: str, size: int, *, reason: str, blocks: int = 1) -> None:
        self._layers.append(Layer(name, kind, np.arange(self._count, self._count + size), reason, blocks))
        self._firsts.append(self._count)
        self._count += size

    def _require_rectified(self, incoming: Channels, name: str) -> None:
        self._block(incoming.units[~incoming.rectified], f"no ReLU stands between it and {name}")

    def _refuse_shifted(self, incoming: Channels, name: str) -> None:
        """Zeros beside a constant: no bias makes up for it at the border."""
        self._block(incoming.units[incoming.shifted], f"{name} pads the constant its removal would leave")

    def _require_blocks(self, incoming: Channels, groups: int, name: str) -> None:
        """A grouped convolution reads one whole layer, which then loses as many units in every block."""
        owners = self._behind(incoming.units)
        if len(owners) == 1 and np.array_equal(self._layers[owners[0]].units, incoming.units):
            layer = self._layers[owners[0]]
            self._layers[owners[0]] = replace(layer, blocks=math.lcm(layer.blocks, groups))
        else:
            self._block(incoming.units, f"the grouped convolution {name} reads it along with other channels")

    def _merge(self) -> tuple[Ints, Ints]:
        """One number for all units that became one, and one for all layers that share such a unit."""
        ends = (
            np.concatenate([np.stack(pair) for pair in self._same], axis=1) if self._same else np.zeros((2, 0), int)
        )
        merged = _components(ends[0], ends[1], self._count)
        owner = np.repeat(np.arange(len(self._layers)), [layer.size for layer in self._layers])
        count = len(self._layers)
        grouped = _components(owner, count + merged, count + self._count)
        return merged, grouped[:count]

    def _check_blocks(self, merged: Ints, group_of_layer: Ints) -> None:
        """Layers that share units can lose them block by block only if the blocks are the same in all."""
        for group in np.unique(group_of_layer):
            members = [self._layers[index] for index in np.flatnonzero(group_of_layer == group)]
            first = merged[members[0].units]
            alike = all(np.array_equal(merged[layer.units], first) for layer in members)
            if not alike and any(layer.blocks > 1 for layer in members):
                self._block(
                    members[0].units, "a grouped convolution deals its channels otherwise than they are shared"
                )

    def _share_reasons(self, group_of_layer: Ints) -> None:
        """A layer that shares units with one that is left alone is left alone too."""
        for group in np.unique(group_of_layer):
            members = np.flatnonzero(group_of_layer == group)
            blocks = math.lcm(*(self._layers[index].blocks for index in members))
            alone = next((self._layers[index] for index in members if not self._layers[index].scored), None)
            for index in members:
                layer = replace(self._layers[index], blocks=blocks)
                if alone is not None and layer.scored:
                    layer = replace(layer, reason=f"it shares its channels with {alone.name}: {alone.reason}")
                self._layers[index] = layer

    def _behind(self, units: Ints) -> list[int]:
        """Indices of the layers that own the given units."""
        owned = np.unique(units[units != NO_UNIT])
        owners = np.searchsorted(np.array(self._firsts), owned, side="right") - 1
        return [int(index) for index in np.unique(owners)]

    def _block(self, units: Ints, reason: str) -> None:
        for index in self._behind(units):
            if self._layers[index].scored:
                self._layers[index] = replace(self._layers[index], reason=reason)


def _components(one: Ints, other: Ints, count: int) -> Ints:
    graph = sparse.coo_array((np.ones(len(one)), (one, other)), shape=(count, count))
    return np.asarray(connected_components(graph, directed=False)[1], dtype=np.int64)

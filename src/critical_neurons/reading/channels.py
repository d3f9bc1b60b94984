"""Channels: which unit stands behind every channel of every value, and which layers can lose units.

Every layer gives its units provisional numbers, which travel with the channels through batch norms, pools,
flattening and ReLUs up to the layers that read them. On the way a layer may meet a reason to be left alone.
When all is read, the units of the remaining layers are numbered through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from critical_neurons.network import NO_UNIT, Ints, Layer, Op, Relu, Shape, Wiring


@dataclass(frozen=True)
class Channels:
    """Of one value: the provisional unit behind each channel, whether a ReLU has been applied since the layer
    that made it, and the last module with parameters that computed it."""

    units: Ints
    rectified: bool = False
    computed_by: str = ""


class ChannelTracker:
    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._firsts: list[int] = []
        self._count = 0
        self._wirings: list[Wiring] = []

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(self._layers)

    def start(self, channel_count: int) -> Channels:
        return Channels(np.full(channel_count, NO_UNIT))

    def mix(self, incoming: Channels, name: str, kind: str, size: int, obstacle: str) -> Channels:
        """A layer reads all incoming channels and makes `size` new ones."""
        if not incoming.rectified:
            self.block(incoming, f"no ReLU stands between it and {name}")
        if obstacle:
            self.block(incoming, f"it feeds {name}, {obstacle}")
        units = np.arange(self._count, self._count + size)
        self._layers.append(Layer(name, kind, size, reason=f"it is {obstacle}" if obstacle else ""))
        self._firsts.append(self._count)
        self._count += size
        self._wirings.append(Wiring(name, incoming.units, units))
        return Channels(units, computed_by=name)

    def scale(self, incoming: Channels, name: str) -> Channels:
        """A module with parameters per channel."""
        if incoming.rectified:
            self.block(
                incoming,
                f"batch norm {name} stands behind its ReLU, so a removed unit would still emit a constant",
            )
        self._wirings.append(Wiring(name, incoming.units, incoming.units))
        return replace(incoming, computed_by=name)

    def reshape(self, incoming: Channels, before: Shape, after: Shape, obstacle: str) -> Channels:
        if obstacle:
            self.block(incoming, f"it feeds {obstacle}")
        if after == before:
            return incoming
        elements = np.repeat(incoming.units, int(np.prod(before[1:], dtype=int))).reshape(after[0], -1)
        if (elements != elements[:, :1]).any():
            self.block(incoming, "a reshape mixes its channels with its positions")
        return replace(incoming, units=elements[:, 0])

    def rectify(self, incoming: Channels, shape: Shape) -> tuple[Channels, Ints]:
        """The channels behind a ReLU, and the units it gates: those that no ReLU has gated before."""
        gated = np.full_like(incoming.units, NO_UNIT) if incoming.rectified else incoming.units
        for index in self._behind(gated):
            layer = self._layers[index]
            held_at = self._wiring_size(incoming.computed_by)
            if held_at != layer.size:
                self.block(incoming, f"it is flattened before {incoming.computed_by}")
            self._layers[index] = replace(self._layers[index], held_at=incoming.computed_by)
        return replace(incoming, rectified=True), gated.reshape(-1, *[1] * (len(shape) - 1))

    def finish(
        self, outgoing: Channels, ops: Iterable[Op], ignore: Collection[str]
    ) -> tuple[tuple[Op, ...], tuple[Layer, ...], tuple[Wiring, ...]]:
        """Number the units that are left and write the numbers into ops and wirings."""
        self.block(outgoing, "it gives the network's output")
        for index, layer in enumerate(self._layers):
            if layer.name in ignore:
                self._layers[index] = replace(layer, reason="ignored, as asked")
        number = np.full(self._count + 1, NO_UNIT)  # the last entry answers for NO_UNIT itself
        scored = [
            np.arange(first, first + layer.size)
            for first, layer in zip(self._firsts, self._layers, strict=True)
            if layer.scored
        ]
        if scored:
            chosen = np.concatenate(scored)
            number[chosen] = np.arange(len(chosen))
        return (
            tuple(replace(op, units=number[op.units]) if isinstance(op, Relu) else op for op in ops),
            tuple(self._layers),
            tuple(Wiring(w.module, number[w.inputs], number[w.outputs]) for w in self._wirings),
        )

    def _behind(self, units: Ints) -> list[int]:
        """Indices of the layers that own the given units."""
        owned = np.unique(units[units != NO_UNIT])
        owners = np.searchsorted(np.array(self._firsts), owned, side="right") - 1
        return [int(index) for index in np.unique(owners)]

    def block(self, channels: Channels, reason: str) -> None:
        """Leave the layers behind the channels alone, unless they have a reason already."""
        for index in self._behind(channels.units):
            if self._layers[index].scored:
                self._layers[index] = replace(self._layers[index], reason=reason)

    def _wiring_size(self, module: str) -> int:
        return next(len(w.outputs) for w in reversed(self._wirings) if w.module == module)

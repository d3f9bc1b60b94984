"""Structure: which channels of a model must be removed together, what to slice for that, and what must stay.

A *unit* is a neuron of a linear layer or a feature map of a convolution, or several of them that can only be removed
together: channels that are added, the two halves of a gated unit. Units are numbered consecutively, group by group;
`NO_UNIT` marks channels that must stay. Arrays over units have a last entry for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from critical_neurons.core.documents import Count, Number, from_plain, to_plain

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

Counted: TypeAlias = Literal["units", "params", "macs"]
Measure: TypeAlias = Literal[Counted, "latency"]

NO_UNIT = -1

OUTSIDE = "it lies outside the span"

SIZE = -1
"""Instead of an axis: the slice is of an integer attribute of a module, its number of channels."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer, convolution or embedding, and the unit of each output channel.

    If there is a `reason`, no channel can be removed. The units of its group form `blocks` equal blocks, as in
    grouped convolutions, and each must lose equally many. `stays`: why some channels must stay, if others need not.
    """

    name: str
    kind: str
    units: Ints
    reason: str = ""
    blocks: Number = 1
    stays: str = ""

    @property
    def removable(self) -> bool:
        """Whether it has units that can be removed."""
        return not self.reason

    @property
    def size(self) -> int:
        return len(self.units)


@dataclass(frozen=True, eq=False)
class Slice:
    """The unit of every index along one axis of a parameter or buffer.

    `units` is (size of the axis,), or (blocks, size) if each block of the tensor's first axis has its own units.
    """

    tensor: str
    axis: int
    units: Ints


@dataclass(frozen=True, eq=False)
class Wiring:
    """A linear layer or convolution, and the unit of every input and output channel.

    Every pair of an input and an output channel in the same one of `groups` has `kernel` weights, each used at
    `positions` positions. `constants` are what removed inputs leave if a function behind the unit is not zero at
    zero; they are added to the module's bias. `alone`: the module is called by itself and only once, so that hooks
    see all that it does. A batch norm has a `kernel` of 0.
    """

    module: str
    inputs: Ints
    outputs: Ints
    constants: Floats
    kernel: Count = 1
    positions: Count = 1
    groups: Number = 1
    biased: bool = True
    alone: bool = True

    @property
    def depthwise(self) -> bool:
        """Whether every output channel reads one input channel, whose unit it shares."""
        return self.groups > 1 and self.groups == len(self.inputs)

    @property
    def reads_units(self) -> bool:
        """Whether refitting the module can compensate removed units. A depthwise convolution passes units through."""
        return self.alone and self.kernel > 0 and not self.depthwise and bool((self.inputs >= 0).any())


@dataclass(frozen=True, eq=False)
class Product:
    """A cost of a module that is proportional to the kept share of each of its `axes` (units by index):
    amount * Π mean(kept[axis])."""

    module: str
    amount: Count
    axes: tuple[Ints, ...]


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a model: of its parameter names and shapes, and of their values."""

    architecture: str
    weights: str


@dataclass(frozen=True, eq=False)
class Group:
    """Units that compete with each other: those of a layer, or of layers that share some. They form consecutive
    `blocks` of equal size, each of which must lose equally many units and keep at least one."""

    layers: tuple[str, ...]
    units: Ints
    blocks: int

    def __len__(self) -> int:
        return len(self.units)

    @property
    def least(self) -> int:
        """The smallest number of units to keep: one per block."""
        return self.blocks

    def choose(self, values: Floats, count: int) -> Bools:
        """Mark the `count` units with the highest values, equally many per block; of equal values the first."""
        return choose_highest(values, count, self.blocks)


@dataclass(frozen=True)
class KeptStream:
    """Channels that must stay: the layers that write them, and those that read them."""

    writers: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True, repr=False, eq=False)
class Structure:
    """What can be removed from a model. Units are numbered group by group, with `group_sizes` units each. `params`,
    `macs` and, if measured, `latency` in nanoseconds are the costs of the whole model. `kept_streams` say where
    channels without units go."""

    layers: tuple[Layer, ...]
    group_sizes: tuple[Number, ...]
    slices: tuple[Slice, ...]
    wirings: tuple[Wiring, ...]
    params: tuple[Product, ...]
    macs: tuple[Product, ...]
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()
    latency: tuple[Product, ...] = ()
    kept_streams: tuple[KeptStream, ...] = ()

    @property
    def unit_count(self) -> int:
        return sum(self.group_sizes)

    @cached_property
    def removable(self) -> tuple[Layer, ...]:
        """The layers with units that can be removed."""
        return tuple(layer for layer in self.layers if layer.removable)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        found, first = [], 0
        for size in self.group_sizes:
            units = np.arange(first, first + size)
            members = [layer for layer in self.removable if np.isin(layer.units, units).any()]
            found.append(Group(tuple(layer.name for layer in members), units, members[0].blocks))
            first += size
        return tuple(found)

    def __repr__(self) -> str:
        return f"Structure({len(self.layers)} layers, {self.unit_count} units that can be removed)"

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.kind:<8} {layer.size:>5} units  {self.describe(layer)}"
            for layer in self.layers
        ]
        return "\n".join([*lines, *self.notes])

    def describe(self, layer: Layer) -> str:
        """Whether its units can be removed, together with which layers, or why not."""
        if not layer.removable:
            return layer.reason
        own = np.unique(layer.units[layer.units != NO_UNIT])
        others = [other.name for other in self.removable if other is not layer and np.isin(other.units, own).any()]
        kept = int((layer.units == NO_UNIT).sum())
        words = f"yes, together with {', '.join(others)}" if others else "yes"
        why = f" ({layer.stays})" if layer.stays else ""
        return f"{words}; {kept} of its channels must stay{why}" if kept else words

    def find_readers(self, units: Ints) -> tuple[str, ...]:
        """The linear layers and convolutions that read any of these units, in the order of calls."""
        return tuple(each.module for each in self.wirings if each.kernel and np.isin(each.inputs, units).any())

    def restrict(self, reasons: Mapping[str, str]) -> tuple[Structure, Ints]:
        """Keep the groups of the layers in `reasons` whole. Returns the structure and the new number of every unit. A
        given reason replaces the one that a layer had."""
        gone = {id(group): name for group in self.groups for name in group.layers if name in reasons}
        number, sizes, first = np.full(self.unit_count + 1, NO_UNIT), [], 0
        why, kept = dict(reasons), list(self.kept_streams)
        for group in self.groups:
            if (name := gone.get(id(group))) is None:
                number[group.units] = np.arange(first, first + len(group))
                sizes.append(len(group))
                first += len(group)
            else:
                shared = f"it shares its channels with {name}: {reasons[name]}"
                why = {**dict.fromkeys(group.layers, shared), **why}
                kept.append(KeptStream(group.layers, self.find_readers(group.units)))
        layers = tuple(
            replace(layer, units=number[layer.units], reason=why.get(layer.name, layer.reason))
            for layer in self.layers
        )
        found = replace(
            self,
            layers=layers,
            group_sizes=tuple(sizes),
            slices=tuple(replace(each, units=number[each.units]) for each in self.slices),
            wirings=tuple(replace(w, inputs=number[w.inputs], outputs=number[w.outputs]) for w in self.wirings),
            params=_renumber(self.params, number),
            macs=_renumber(self.macs, number),
            latency=_renumber(self.latency, number),
            kept_streams=tuple(kept),
        )
        return found, number

    def within(self, modules: Collection[str]) -> Structure:
        """The structure with only the layers and costs of these modules; other layers lose nothing."""
        outside = {layer.name: OUTSIDE for layer in self.removable if layer.name not in modules}
        found, _ = self.restrict(outside)
        return replace(
            found,
            layers=tuple(layer for layer in found.layers if layer.name in modules),
            wirings=tuple(wiring for wiring in found.wirings if wiring.module in modules),
            params=tuple(product for product in found.params if product.module in modules),
            macs=tuple(product for product in found.macs if product.module in modules),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Structure:
        """The inverse of `to_dict`; raises ValueError on an inconsistent structure."""
        found = from_plain(cls, data)
        found.check()
        return found

    def check(self) -> None:
        """Raise a ValueError unless all units are within the groups and every group has a layer."""
        if any(len(wiring.constants) != len(wiring.inputs) for wiring in self.wirings):
            raise ValueError("a module with another number of constants than of inputs")
        if any(layer.units.ndim != 1 for layer in self.layers):
            raise ValueError("a layer whose units are no list")
        arrays = [layer.units for layer in self.layers] + [each.units for each in self.slices]
        arrays += [axis for wiring in self.wirings for axis in (wiring.inputs, wiring.outputs)]
        arrays += [axis for product in (*self.params, *self.macs, *self.latency) for axis in product.axes]
        if any(((units < NO_UNIT) | (units >= self.unit_count)).any() for units in arrays):
            raise ValueError(f"a unit outside 0 to {self.unit_count - 1}")
        covered = np.zeros(self.unit_count + 1, dtype=bool)
        for layer in self.removable:
            covered[layer.units] = True
        if not covered[:-1].all():
            raise ValueError("a unit of no layer")
        if any(len(group.units) % group.blocks for group in self.groups):
            raise ValueError("a group whose units do not fall into its blocks")


def choose_highest(values: Floats, count: int, blocks: int = 1) -> Bools:
    """Mark the `count` highest values, equally many per block; of equal values the first."""
    dealt = values.reshape(blocks, -1)
    best = np.argsort(-dealt, axis=1, kind="stable")[:, : count // blocks]
    chosen = np.zeros(dealt.shape, dtype=bool)
    np.put_along_axis(chosen, best, True, axis=1)
    return chosen.reshape(-1)


def _renumber(products: tuple[Product, ...], number: Ints) -> tuple[Product, ...]:
    return tuple(replace(each, axes=tuple(number[axis] for axis in each.axes)) for each in products)

"""Plan: which units stay, and why. A plan can be printed, saved and compared before anything is removed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from critical_neurons.core.documents import Count, Document, from_plain
from critical_neurons.core.hooks import Shown, call_hook
from critical_neurons.core.span import WHOLE, Span
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Ints, Structure
from critical_neurons.errors import InvalidSettingError, PlanMismatchError


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The channels of one layer that stay, in ascending order, and why."""

    name: str
    kept: Ints
    total: int
    reason: str

    @property
    def removed(self) -> Ints:
        return np.setdiff1d(np.arange(self.total), self.kept)


@dataclass(frozen=True)
class _LayerDocument:
    """A layer of a plan in a file, to be read and edited by people."""

    name: str
    kept: tuple[Count, ...]
    total: Count
    reason: str


@dataclass(frozen=True)
class _PlanDocument:
    layers: tuple[_LayerDocument, ...]
    rule: str
    provenance: Mapping[str, Any]
    span: Span
    seen: tuple[str, ...]
    structure: Structure


@dataclass(frozen=True, eq=False)
class Plan(Shown, Document):
    """Which units stay, and why.

    `stays` has an entry for every unit of the structure and a last one, True, for NO_UNIT. `rule` describes how the
    plan was made, `reasons` the same for every layer; `span` is the part of the model that was scored; `seen` are
    digests of the data points used for the scores and the choice of the plan. `provenance` records the settings.

    >>> print(plan)
    0          2 of 4     at most 0.5 of the units kept, by layer
    3          4 of 8     at most 0.5 of the units kept, by layer
    5          3 of 3     it gives the network's output
    units      6 of 12    at most 0.5 of the units kept, by layer
    >>> plan.save("plan.json")
    >>> cn.Plan.load("plan.json").removed.keys() == plan.removed.keys()
    True
    """

    FORMAT: ClassVar = "critical_neurons plan"
    FORMAT_VERSION: ClassVar = 2

    structure: Structure
    stays: Bools
    reasons: Mapping[str, str]
    rule: str
    provenance: Mapping[str, Any]
    span: Span = WHOLE
    seen: frozenset[str] = frozenset()

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        return tuple(
            LayerPlan(
                layer.name,
                np.flatnonzero(self.stays[layer.units]),
                layer.size,
                layer.reason or self.reasons.get(layer.name, "kept"),
            )
            for layer in self.structure.layers
        )

    @property
    def architecture(self) -> str:
        """The digest of the network's architecture."""
        return self.structure.fingerprint.architecture

    @property
    def kept(self) -> dict[str, Ints]:
        return {layer.name: layer.kept for layer in self.layers}

    @property
    def removed(self) -> dict[str, Ints]:
        """The removed channels of every layer that loses any."""
        return {layer.name: layer.removed for layer in self.layers if len(layer.kept) < layer.total}

    def random(self, seed: int = 0) -> Plan:
        """A plan that removes equally many units of every layer, at random."""
        generator = np.random.default_rng(seed)
        return self.preferred(generator.random(self.structure.unit_count), f"random, seed {seed}")

    def critical(self, scores: Mapping[str, Floats]) -> Plan:
        """A plan that removes equally many units of every layer, those with the highest scores."""
        preference = np.zeros(self.structure.unit_count + 1)
        for layer in self.structure.layers:
            if layer.name in self.removed and (layer.name not in scores or len(scores[layer.name]) != layer.size):
                raise PlanMismatchError(
                    f"{layer.name}: the plan removes units of it, but these scores are not of that layer."
                )
            if layer.name in scores:
                preference[layer.units] = -scores[layer.name]
        return self.preferred(preference[:-1], "highest-scored removed")

    def preferred(self, preference: Floats, rule: str) -> Plan:
        """A plan that removes equally many units of every layer, those with the smallest `preference`, one number per
        unit.

        `rule` describes where the numbers come from; it is put before the reasons of this plan.
        """
        count = self.structure.unit_count
        if np.shape(preference) != (count,) or not np.isfinite(preference).all():
            raise PlanMismatchError(
                f"{rule}: found numbers of shape {np.shape(preference)}. Accepted: a finite one for each of the "
                f"{count} units of the plan."
            )
        stays, rule = self.stays.copy(), f"{rule}, counts of: "
        for group in self.structure.groups:
            kept = int(stays[group.units].sum())
            stays[group.units] = group.choose(preference[group.units], kept)
        reasons = {name: rule + self.reasons.get(name, "") for name in self.removed}
        return replace(self, stays=stays, reasons={**self.reasons, **reasons}, rule=rule + self.rule)

    def _count(self) -> tuple[int, int]:
        """Kept units and all units; those that layers share count once."""
        return int(self.stays[:-1].sum()), self.structure.unit_count

    def __str__(self) -> str:
        kept, total = self._count()
        rows = [(layer.name, len(layer.kept), layer.total, layer.reason) for layer in self.layers]
        rows.append(("units", kept, total, self.rule))
        width = max(len(name) for name, *_ in rows)
        return "\n".join(f"{name:<{width}}  {kept:>5} of {total:<5} {why}" for name, kept, total, why in rows)

    def __repr__(self) -> str:
        kept, total = self._count()
        return f"Plan({self.rule}: {total - kept} of {total} units removed)"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": self.FORMAT,
            "version": self.FORMAT_VERSION,
            "layers": [{**vars(layer), "kept": layer.kept.tolist()} for layer in self.layers],
            "rule": self.rule,
            "provenance": dict(self.provenance),
            "span": vars(self.span),
            "seen": sorted(self.seen),
            "structure": self.structure.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; raises ValueError unless the plan can be carried out."""
        read = from_plain(_PlanDocument, data)
        structure = read.structure
        structure.check()
        sizes = [(layer.name, layer.size) for layer in structure.layers]
        if [(each.name, each.total) for each in read.layers] != sizes:
            raise ValueError("its layers are not those of its structure")
        stays = np.ones(structure.unit_count + 1, dtype=bool)
        for layer, each in zip(structure.layers, read.layers, strict=True):
            kept = np.zeros(layer.size, dtype=bool)
            if any(channel >= layer.size for channel in each.kept) or list(each.kept) != sorted(set(each.kept)):
                raise ValueError(f"{layer.name}: the kept units are not ascending numbers below {layer.size}")
            kept[list(each.kept)] = True
            if (layer.units[~kept] == NO_UNIT).any():
                why = layer.reason or "they are used together with something that cannot be made smaller"
                raise ValueError(f"{layer.name}: it removes channels that must stay: {why}")
            stays[layer.units[~kept]] = False
        reasons = {each.name: each.reason for each in read.layers}
        plan = cls(structure, stays, reasons, read.rule, read.provenance, read.span, frozenset(read.seen))
        for found, each in zip(plan.layers, read.layers, strict=True):
            if found.kept.tolist() != list(each.kept):
                raise ValueError(f"{each.name}: it keeps channels that it shares with removed ones")
        plan.check()
        return plan

    def check(self, *, removes: bool = True) -> None:
        """Raise a ValueError unless the plan fits its structure. If it `removes` units rather than masking them,
        every layer must keep channels, equally many in every block."""
        count = self.structure.unit_count
        if self.stays.shape != (count + 1,) or not self.stays[NO_UNIT]:
            raise ValueError(f"{self.rule}: found no entry for each of {count} units and a last, True")
        if not removes:
            return
        for group in self.structure.groups:
            counts = self.stays[group.units].reshape(group.blocks, -1).sum(axis=1)
            if (counts != counts[0]).any():
                raise ValueError(
                    f"{', '.join(group.layers)}: it keeps {', '.join(map(str, counts))} channels of its blocks; a "
                    "grouped convolution needs as many of each"
                )
        for layer in self.structure.layers:
            if not self.stays[layer.units].any():
                raise ValueError(f"{layer.name}: it removes all units; a layer is never emptied")

    def as_masks(self, model: Any) -> dict[tuple[str, str], Any]:
        """See `critical_neurons.as_masks`."""
        masks: dict[tuple[str, str], Any] = call_hook("as_masks", self, model)
        return masks

    def plot(self, axes: Any = None) -> Any:
        """Draw the width of every layer before and after. Returns matplotlib axes; needs the extra `plot`."""
        return call_hook("plot", self, axes)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trust_edited: bool = False) -> Plan:
        """Read a file that `save` wrote. `trust_edited`: accept a file that was edited by hand, for instance to keep
        other channels; whether the plan can be carried out is always checked."""
        return cls._read(path, trust_edited=trust_edited)


def check_plan(plan: object, *, removes: bool = True) -> None:
    """Raise unless it is a `Plan`, not scores by mistake, that can be carried out. For `removes` see `Plan.check`."""
    if not isinstance(plan, Plan):
        raise InvalidSettingError(
            f"plan: found {type(plan).__name__}. Accepted: a Plan, as cn.plan(scores, ...) and Plan.load return."
        )
    try:
        plan.check(removes=removes)
    except ValueError as error:
        raise PlanMismatchError(f"plan: {error}.") from error

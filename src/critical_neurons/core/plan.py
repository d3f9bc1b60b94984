"""Plan: which units stay, and why. A plan can be printed, saved and compared before anything is cut."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from critical_neurons.core.files import load_json, write_atomically
from critical_neurons.core.network import NO_UNIT, Bools, Floats, Hold, Ints
from critical_neurons.core.span import WHOLE, Span
from critical_neurons.errors import InvalidSettingError, PlanMismatchError

FORMAT = "critical_neurons plan"
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The channels of one layer that stay, in ascending order; `units` and `blocks` as in `network.Layer`."""

    name: str
    units: Ints
    kept: Ints
    reason: str
    blocks: int = 1

    @property
    def total(self) -> int:
        return len(self.units)

    @property
    def removed(self) -> Ints:
        return np.setdiff1d(np.arange(self.total), self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**vars(self), "units": self.units.tolist(), "kept": self.kept.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerPlan:
        return cls(
            **{
                **data,
                "units": np.array(data["units"], dtype=np.int64),
                "kept": np.array(data["kept"], dtype=np.int64),
            }
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """`rule` is what the plan was made by; `architecture` the digest of the network it is for; `groups` and `holds`
    as in `network.Network`; `span` the part of the model that was scored."""

    layers: tuple[LayerPlan, ...]
    groups: tuple[int, ...]
    holds: tuple[Hold, ...]
    rule: str
    architecture: str
    provenance: Mapping[str, Any]
    span: Span = WHOLE

    @property
    def kept(self) -> dict[str, Ints]:
        return {layer.name: layer.kept for layer in self.layers}

    @property
    def removed(self) -> dict[str, Ints]:
        """The layers that lose units, and which."""
        return {layer.name: layer.removed for layer in self.layers if len(layer.kept) < layer.total}

    @property
    def stays(self) -> Bools:
        """One entry per unit, and a last one, True, that answers for NO_UNIT."""
        stays = np.ones(sum(self.groups) + 1, dtype=bool)
        for layer in self.layers:
            removed = layer.units[layer.removed]
            if (removed == NO_UNIT).any():
                raise PlanMismatchError(
                    f"{layer.name}: the plan removes units of it, but they must stay: {layer.reason}."
                )
            stays[removed] = False
        return stays

    @property
    def seen(self) -> frozenset[str]:
        """The data points the scores come from and those the plan was chosen by: see `batch.digest_rows`."""
        scored = self.provenance.get("settings", {}).get("inputs", ())
        return frozenset([*scored, *self.provenance.get("drop", {}).get("judged_on", ())])

    def random(self, seed: int = 0) -> Plan:
        """As many units removed, layer by layer, at random without replacement."""
        generator = np.random.default_rng(seed)
        return self.preferred(generator.random(sum(self.groups)), f"random, seed {seed}")

    def critical(self, scores: Mapping[str, Floats]) -> Plan:
        """As many units removed, layer by layer, the highest-scored ones."""
        preference = np.zeros(sum(self.groups))
        for layer in self.layers:
            if layer.name in self.removed and (layer.name not in scores or len(scores[layer.name]) != layer.total):
                raise PlanMismatchError(
                    f"{layer.name}: the plan removes units of it, but these scores are not of that layer."
                )
            if layer.name in scores:
                preference[layer.units] = -scores[layer.name]
        return self.preferred(preference, "highest-scored removed")

    def preferred(self, preference: Floats, rule: str) -> Plan:
        """As many units removed, layer by layer, the least preferred ones: `preference` has a number for every unit.

        `rule` says where the numbers come from; the reasons name it before those of this plan.
        """
        count = sum(self.groups)
        if np.shape(preference) != (count,) or not np.isfinite(preference).all():
            raise PlanMismatchError(
                f"{rule}: found numbers of shape {np.shape(preference)}. Accepted: a finite one for each of the "
                f"{count} units of the plan."
            )
        stays, rule = self.stays, f"{rule}, counts of: "
        for units, blocks in group_units(self.layers, self.groups):
            count = int(stays[units].sum())
            stays[units] = choose_highest(preference[units], count, blocks)
        layers = tuple(
            replace(layer, kept=np.flatnonzero(stays[layer.units]), reason=rule + layer.reason)
            if len(layer.kept) < layer.total
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers, rule=rule + self.rule)

    def _count(self) -> tuple[int, int]:
        """Units that stay, and all units; those that layers share count once."""
        removed = [layer.units[layer.removed] for layer in self.layers]
        total = sum(self.groups)
        return total - len(np.setdiff1d(np.concatenate(removed), NO_UNIT)), total

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
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "layers": [layer.to_dict() for layer in self.layers],
            "groups": list(self.groups),
            "holds": [hold.to_dict() for hold in self.holds],
            "rule": self.rule,
            "architecture": self.architecture,
            "provenance": dict(self.provenance),
            "span": vars(self.span),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        layers = tuple(map(LayerPlan.from_dict, data["layers"]))
        count = sum(data["groups"])
        for layer, given in zip(layers, data["layers"], strict=True):
            if given["kept"] != np.intersect1d(layer.kept, np.arange(layer.total)).tolist():
                raise ValueError(f"{layer.name}: the kept units are not ascending numbers below {layer.total}")
            if ((layer.units < NO_UNIT) | (layer.units >= count)).any():
                raise ValueError(f"{layer.name}: units outside 0 to {count - 1}")
        holds = tuple(map(Hold.from_dict, data["holds"]))
        return cls(
            layers,
            tuple(data["groups"]),
            holds,
            data["rule"],
            data["architecture"],
            data["provenance"],
            Span(**data.get("span", {})),
        )

    def as_masks(self, model: Any) -> dict[tuple[str, str], Any]:
        """As `critical_neurons.as_masks`."""
        interop = import_module("critical_neurons.io.interop")  # by its name: nouns know no torch
        masks: dict[tuple[str, str], Any] = interop.as_masks(self, model)
        return masks

    def save(self, path: str | os.PathLike[str]) -> None:
        write_atomically(path, json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        return load_json(path, FORMAT, FORMAT_VERSION, cls.from_dict)


def check_plan(plan: object) -> None:
    """Raise unless it is a plan: scores are easily given in place of one."""
    if not isinstance(plan, Plan):
        raise InvalidSettingError(
            f"plan: found {type(plan).__name__}. Accepted: a Plan, as cn.plan(scores, ...) and Plan.load return."
        )


def group_units(layers: tuple[Any, ...], groups: tuple[int, ...]) -> list[tuple[Ints, int]]:
    """The units of every group, in order, and into how many equal blocks they fall."""
    ends = np.cumsum(groups)
    result = []
    for end, size in zip(ends, groups, strict=True):
        units = np.arange(end - size, end)
        blocks = next(layer.blocks for layer in layers if np.isin(layer.units, units).any())
        result.append((units, blocks))
    return result


def choose_highest(values: Floats, count: int, blocks: int = 1) -> Bools:
    """Which are the `count` highest values, as many from every block; among equals the ones that come first."""
    dealt = values.reshape(blocks, -1)
    best = np.argsort(-dealt, axis=1, kind="stable")[:, : count // blocks]
    chosen = np.zeros(dealt.shape, dtype=bool)
    np.put_along_axis(chosen, best, True, axis=1)
    return chosen.reshape(-1)

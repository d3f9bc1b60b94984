"""Plan: which units stay, and why. A plan can be printed, saved and compared before anything is cut."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from critical_neurons.errors import PlanMismatchError
from critical_neurons.files import load_json, write_atomically
from critical_neurons.network import Floats, Ints

FORMAT = "critical_neurons plan"
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The units of one layer that stay, in ascending order. `held_at` as in `network.Layer`."""

    name: str
    total: int
    kept: Ints
    reason: str
    held_at: str

    @property
    def removed(self) -> Ints:
        return np.setdiff1d(np.arange(self.total), self.kept)


@dataclass(frozen=True, eq=False)
class Plan:
    """`rule` is what the plan was made by; `architecture` the digest of the network it is for."""

    layers: tuple[LayerPlan, ...]
    rule: str
    architecture: str
    provenance: Mapping[str, Any]

    @property
    def kept(self) -> dict[str, Ints]:
        return {layer.name: layer.kept for layer in self.layers}

    @property
    def removed(self) -> dict[str, Ints]:
        """The layers that lose units, and which."""
        return {layer.name: layer.removed for layer in self.layers if len(layer.kept) < layer.total}

    def random(self, seed: int = 0) -> Plan:
        """As many units removed from every layer, at random without replacement."""
        generator = np.random.default_rng(seed)
        return self._choose(
            lambda layer: generator.permutation(layer.total)[: len(layer.kept)], f"random, seed {seed}, counts of: "
        )

    def critical(self, scores: Mapping[str, Floats]) -> Plan:
        """As many units removed from every layer, the highest-scored ones."""

        def keep_lowest(layer: LayerPlan) -> Ints:
            if layer.name not in scores or len(scores[layer.name]) != layer.total:
                raise PlanMismatchError(
                    f"{layer.name}: the plan removes units of it, but these scores are not of that layer."
                )
            return np.argsort(scores[layer.name], kind="stable")[: len(layer.kept)]

        return self._choose(keep_lowest, "highest-scored removed, counts of: ")

    def _choose(self, choose: Callable[[LayerPlan], Ints], rule: str) -> Plan:
        layers = tuple(
            replace(layer, kept=np.sort(choose(layer)), reason=rule + layer.reason)
            if len(layer.kept) < layer.total
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers, rule=rule + self.rule)

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [
            f"{layer.name:<{width}}  {len(layer.kept):>5} of {layer.total:<5} {layer.reason}" for layer in self.layers
        ]
        kept, total = sum(len(layer.kept) for layer in self.layers), sum(layer.total for layer in self.layers)
        return "\n".join([*lines, f"{'all':<{width}}  {kept:>5} of {total:<5} {self.rule}"])

    def __repr__(self) -> str:
        return f"Plan({self.rule}: {sum(map(len, self.removed.values()))} units removed)"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "layers": [{**vars(layer), "kept": layer.kept.tolist()} for layer in self.layers],
            "rule": self.rule,
            "architecture": self.architecture,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        layers = tuple(
            LayerPlan(**{**layer, "kept": np.array(layer["kept"], dtype=np.int64)}) for layer in data["layers"]
        )
        for layer, given in zip(layers, data["layers"], strict=True):
            if given["kept"] != np.intersect1d(layer.kept, np.arange(layer.total)).tolist():
                raise ValueError(f"{layer.name}: the kept units are not ascending numbers below {layer.total}")
        return cls(layers, data["rule"], data["architecture"], data["provenance"])

    def save(self, path: str | os.PathLike[str]) -> None:
        write_atomically(path, json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        return load_json(path, FORMAT, FORMAT_VERSION, cls.from_dict)

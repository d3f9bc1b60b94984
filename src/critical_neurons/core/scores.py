"""Scores: the importance of every unit, with the solver's status, objective and bound."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from critical_neurons.core.budget import Budget
from critical_neurons.core.documents import Amount, Count, Document, from_plain, to_plain
from critical_neurons.core.files import write_atomically
from critical_neurons.core.formulation import read_formulation
from critical_neurons.core.hooks import Shown, call_hook
from critical_neurons.core.search_history import SearchHistory
from critical_neurons.core.settings import Compensation, Plain
from critical_neurons.core.solution import Dual, Status, Step, relative_gap
from critical_neurons.core.solver import Solver
from critical_neurons.core.span import WHOLE, Span
from critical_neurons.core.structure import NO_UNIT, Fingerprint, Floats, Layer, Structure

TYPES: Mapping[str, Callable[[Mapping[str, Any]], Plain]] = {
    "formulation": read_formulation,
    "solver": Solver.from_dict,
}
"""How settings that are types are read from plain data."""

CSV_COLUMNS = ("layer", "channel", "unit", "score", "reason")


@dataclass(frozen=True)
class LayerChoice:
    """The choice of a search in one layer, or in layers that share their units.

    `error` is the least-squares error of the consumers, refitted to the kept units and weighted by Fisher matrices,
    beyond what removals in other layers cost; no choice of equally many units has one below `bound`. Neither bounds
    the network's loss."""

    layers: tuple[str, ...]
    error: float
    bound: float | None

    @property
    def gap(self) -> float | None:
        """The largest share of the error that a better choice could save."""
        if self.bound is None:
            return None
        return max(0.0, 1 - self.bound / self.error) if self.error > 0 else 0.0

    def __str__(self) -> str:
        bound = "unknown" if self.bound is None else f"{self.bound:.3g}"
        gap = "unknown" if self.gap is None else f"{self.gap:.0%}"
        return f"{', '.join(self.layers)}: least-squares error {self.error:.3g}, bound {bound}, gap {gap}"


@dataclass(frozen=True)
class Incumbent:
    """The exact program's verdict on a given plan: the plan's objective, and a lower bound for all scores of 0 or
    1."""

    rule: str
    objective: float
    bound: float

    @property
    def gap(self) -> float | None:
        return relative_gap(self.objective, self.bound)

    def __str__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.2%}"
        return (
            f"the plan given ({self.rule}) has objective {self.objective:.6g}; no scores of 0 or 1 that the program "
            f"allows fall below {self.bound:.6g}, which is better by {max(0.0, self.objective - self.bound):.4g} "
            f"(gap {gap})"
        )


@dataclass(frozen=True, eq=False)
class Scores(Shown, Document, Mapping[str, Floats]):
    """The importance of every unit: `scores["features.0"]` are the scores of that layer, one in [0, 1] per unit.

    Averaged scores have no objective and no bound of their own; they keep the worst status and the largest gap of
    their `parts`. `layer_choices` come from a search that plans for refitting, `incumbent` from a plan given to the
    exact program, `dual` from loss_weight=cn.Lagrangian(...); the objective is then that at the loss weight found.

    The scores were found for the `budget`, if there is one, and for refitting as `compensate` says. `span` is the
    part of the model that was scored, `inputs` are digests of the data points, `settings` a record. `history` has
    the steps of a solver, `search_history` the course of a search.

    >>> cn.score(model, inputs[:3], labels[:3])["3"].shape
    (8,)
    """

    FORMAT: ClassVar = "critical_neurons scores"
    FORMAT_VERSION: ClassVar = 2

    values_by_layer: Mapping[str, Floats]
    structure: Structure
    status: Status
    objective: float | None
    bound: float | None
    gap: Amount | None
    seconds: Amount
    settings: Mapping[str, Any]
    history: tuple[Step, ...]
    sizes: Mapping[str, Count]
    logit_error: Amount
    notes: tuple[str, ...] = ()
    parts: tuple[Scores, ...] = ()
    layer_choices: tuple[LayerChoice, ...] = ()
    incumbent: Incumbent | None = None
    dual: Dual | None = None
    budget: Budget | None = None
    compensate: Compensation = "none"
    span: Span = WHOLE
    inputs: tuple[str, ...] = ()
    search_history: SearchHistory | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.structure.layers

    @property
    def fingerprint(self) -> Fingerprint:
        return self.structure.fingerprint

    @property
    def per_unit(self) -> Floats:
        """One score per unit; units that several layers share appear once."""
        values = np.zeros(self.structure.unit_count + 1)
        for layer in self.structure.removable:
            values[layer.units] = self[layer.name]
        return values[:-1]

    def __getitem__(self, layer: str) -> Floats:
        if layer not in self.values_by_layer:
            raise KeyError(f"no scores for {layer!r}. Scored layers: {', '.join(self.values_by_layer)}")
        return self.values_by_layer[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_layer)

    def __len__(self) -> int:
        return len(self.values_by_layer)

    def __repr__(self) -> str:
        gap = "none" if self.gap is None else f"{self.gap:.1e}"
        return f"Scores({len(self)} layers, {self.structure.unit_count} units, {self.status.value}, gap {gap})"

    @property
    def plain_settings(self) -> dict[str, Any]:
        """The settings as plain data, ready for JSON."""
        return {name: value.to_dict() if isinstance(value, Plain) else value for name, value in self.settings.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = to_plain(replace(self, values_by_layer={}, settings=self.plain_settings, parts=(), budget=None))
        del plain["values_by_layer"]
        return {
            "format": self.FORMAT,
            "version": self.FORMAT_VERSION,
            "scores": {name: values.tolist() for name, values in self.items()},
            **plain,
            "budget": None if self.budget is None else self.budget.to_dict(),
            "parts": [part.to_dict() for part in self.parts],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scores:
        """The inverse of `to_dict`; raises ValueError or KeyError unless the scores fit their structure."""
        read = from_plain(cls, {**data, "values_by_layer": data["scores"], "parts": (), "budget": None})
        scores = replace(
            read,
            settings=_read_settings(read.settings),
            budget=None if data["budget"] is None else Budget.from_dict(data["budget"]),
            parts=tuple(map(cls.from_dict, data["parts"])),
        )
        scores.structure.check()
        sizes = {layer.name: layer.size for layer in scores.layers if layer.removable}
        if sizes != {name: len(values) for name, values in scores.items()}:
            raise ValueError("the scores do not fit the layers")
        if not all(((values >= 0) & (values <= 1)).all() for values in scores.values()):
            raise ValueError("a score outside [0, 1]")
        return scores

    def as_torch_pruning(self, model: Any = None, *, max_pruning_ratio: float = 1.0) -> Any:
        """See `critical_neurons.as_torch_pruning`."""
        return call_hook("as_torch_pruning", self, model, max_pruning_ratio=max_pruning_ratio)

    def plot(self, axes: Any = None) -> Any:
        """Draw the scores, sorted within each layer. Returns matplotlib axes; needs the extra `plot`."""
        return call_hook("plot", self, axes)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a table with one line per channel: layer, channel, unit, score, reason.

        Channels with the same unit are removed together. A channel without a score has no unit, but a reason.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for layer in self.layers:
            for channel, unit in enumerate(layer.units.tolist()):
                scored = unit != NO_UNIT
                score = repr(float(self[layer.name][channel])) if scored else ""
                writer.writerow([layer.name, channel, unit if scored else "", score, layer.reason])
        write_atomically(path, text.getvalue().encode())


def _read_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `plain_settings`."""
    typed = {name: TYPES[name](value) for name, value in data.items() if name in TYPES and value is not None}
    return {**data, **typed}


def average_scores(
    parts: Sequence[Scores], *, settings: Mapping[str, Any], seconds: float, notes: tuple[str, ...] = ()
) -> Scores:
    """The mean scores of the parts, with each of their notes once, except those that `notes` repeat in detail."""
    of_parts = dict.fromkeys(note for part in parts for note in part.notes)
    gaps = [part.gap for part in parts]
    known = [gap for gap in gaps if gap is not None]
    return replace(
        parts[0],
        values_by_layer={name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]},
        status=max((part.status for part in parts), key=lambda status: status.rank),
        objective=None,
        bound=None,
        gap=max(known) if len(known) == len(gaps) else None,
        seconds=seconds,
        settings=settings,
        inputs=tuple(each for part in parts for each in part.inputs),
        history=(),
        sizes={key: sum(each.sizes.get(key, 0) for each in parts) for part in parts for key in part.sizes},
        logit_error=max(part.logit_error for part in parts),
        notes=(*(note for note in of_parts if not any(more.startswith(note) for more in notes)), *notes),
        parts=tuple(parts),
        layer_choices=(),
        incumbent=None,
        dual=None,
        search_history=None,
    )


def spread_scores(structure: Structure, per_unit: Floats) -> dict[str, Floats]:
    """Scores by layer; channels that must stay have 1."""
    spread = np.append(per_unit, 1.0)  # the last entry is that of NO_UNIT
    return {layer.name: spread[layer.units] for layer in structure.removable}

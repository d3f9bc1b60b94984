"""Stability: which units are always off or always on for all inputs of a box, each with its proof."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from critical_neurons.core.bounds import Interval
from critical_neurons.core.documents import Amount, Count, Document, from_plain
from critical_neurons.core.structure import Fingerprint, Structure
from critical_neurons.errors import PlanMismatchError

ProofMethod: TypeAlias = Literal["interval", "backward", "linear program", "integer program", "points", "none"]
"""How a unit was decided: interval arithmetic, backward substitution, a linear program, branch and bound, or points
of the box at which it is on and off. "none": it is undecided."""


class State(Enum):
    OFF = "off"
    ON = "on"
    UNSTABLE = "unstable"
    UNDECIDED = "undecided"

    @property
    def sentence(self) -> str:
        return {
            State.OFF: "its pre-activations are never above 0",
            State.ON: "its pre-activations are never below 0",
            State.UNSTABLE: "it is on at one point and off at another",
            State.UNDECIDED: "neither proved nor refuted in time",
        }[self]


@dataclass(frozen=True)
class UnitStability:
    """Proved bounds [`lower`, `upper`] of the unit's pre-activations, at all positions, over the whole box, and the
    `lowest` and `highest` values reached at points of it; None if unknown. `programs`: linear programs solved."""

    unit: Count
    state: State
    method: ProofMethod
    lower: float | None
    upper: float | None
    lowest: float | None
    highest: float | None
    programs: Count = 0

    @property
    def gap(self) -> float | None:
        """The difference between proved and reached values at the decisive bound; None if undecided or unstable."""
        ends = {State.OFF: (self.upper, self.highest), State.ON: (self.lowest, self.lower)}
        above, below = ends.get(self.state, (None, None))
        return None if above is None or below is None else above - below


@dataclass(frozen=True)
class LayerChange:
    """What a layer lost: units that are always `off`, units `merged` into others, or the whole layer if it
    `collapsed` into the next. `note` explains what could not be done."""

    name: str
    units: Count
    off: Count = 0
    merged: Count = 0
    collapsed: bool = False
    note: str = ""

    @property
    def sentence(self) -> str:
        if not self.off + self.merged:
            return "no unit can go without loss"
        return f"{self.off} always off, {self.merged} folded into the next layer"

    @property
    def kept(self) -> int:
        return 0 if self.collapsed else self.units - self.off - self.merged


@dataclass(frozen=True, eq=False)
class Stability(Document):
    """The state of every unit of one network, identified by its `fingerprint`, on boxes identified by a digest.

    `layers` holds the units of every layer. `stopped` says what ended the search before all units were decided, if
    anything did. `changes` lists what was done to the smaller network, if one was built.

    >>> found = cn.lossless(model, (0.0, 1.0), inputs=inputs, time_limit=5)
    >>> {name: len(units) for name, units in found.stability.layers.items()}
    {'0': 4, '3': 8}
    """

    FORMAT: ClassVar = "critical_neurons stability"
    FORMAT_VERSION: ClassVar = 1

    fingerprint: Fingerprint
    boxes: str
    layers: Mapping[str, tuple[Count, ...]]
    units: tuple[UnitStability, ...]
    seconds: Amount
    stopped: str = ""
    changes: tuple[LayerChange, ...] = ()

    def count(self, layer: str | None = None) -> Counter[State]:
        """Units in every state, in one layer or in all."""
        chosen = range(len(self.units)) if layer is None else self.layers[layer]
        return Counter(self.units[unit].state for unit in chosen)

    def count_methods(self) -> Counter[ProofMethod]:
        return Counter(unit.method for unit in self.units)

    def check(self, structure: Structure, boxes: str) -> None:
        """Raise unless it is about this network and these boxes."""
        if structure.fingerprint != self.fingerprint or structure.unit_count != len(self.units):
            raise PlanMismatchError("the record is of another network, or of other weights. Give another file.")
        if boxes != self.boxes:
            raise PlanMismatchError("the record is of another box. Give another file.")

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Per layer: name, units, how many are off, on, unstable and undecided; kept units and a note, if the smaller
        network was built."""
        changes = {change.name: change for change in self.changes}
        rows = []
        for name, units in self.layers.items():
            counted = self.count(name)
            row = (name, str(len(units)), *(str(counted[state]) for state in State))
            change = changes.get(name)
            rows.append((*row, *((str(change.kept), change.note) if change else ("", ""))))
        return rows

    def __str__(self) -> str:
        head = ("layer", "units", *(state.value for state in State), "kept", "")
        table = [head, *self.rows]
        widths = [max(len(row[at]) for row in table) for at in range(len(head))]
        lines = [
            "  ".join(
                text.ljust(widths[at]) if at in (0, 7) else text.rjust(widths[at]) for at, text in enumerate(row)
            )
            for row in table
        ]
        return "\n".join([*(line.rstrip() for line in lines), self.summary])

    @property
    def summary(self) -> str:
        methods = self.count_methods()
        by = ", ".join(f"{methods[method]} by {method}" for method in get_args(ProofMethod)[:-1] if methods[method])
        programs = sum(unit.programs for unit in self.units)
        ended = f"; stopped: {self.stopped}" if self.stopped else ""
        return f"settled {by or 'none'}; {programs} linear programs, {self.seconds:.1f} s{ended}"

    def __repr__(self) -> str:
        counted = self.count()
        states = ", ".join(f"{counted[state]} {state.value}" for state in State)
        return f"Stability({len(self.units)} units: {states})"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stability:
        """The inverse of `to_dict`; raises ValueError on an inconsistent record."""
        found = from_plain(cls, data)
        if [unit.unit for unit in found.units] != list(range(len(found.units))):
            raise ValueError("its units are not numbered one after the other")
        if not all(unit < len(found.units) for owned in found.layers.values() for unit in owned):
            raise ValueError("a layer with units that it has no record of")
        for unit in found.units:
            if unit.state in (State.OFF, State.ON) and (unit.lower is None or unit.upper is None):
                raise ValueError(f"unit {unit.unit}: a state without a proof")
        return found


def digest_boxes(boxes: Interval) -> str:
    """A digest that identifies boxes in a record."""
    ends = [np.ascontiguousarray(end, dtype=np.float64) for end in (boxes.lower, boxes.upper)]
    digest = hashlib.sha256(str(ends[0].shape).encode())
    for end in ends:
        digest.update((end + 0.0).tobytes())  # -0.0 and 0.0 are one
    return digest.hexdigest()

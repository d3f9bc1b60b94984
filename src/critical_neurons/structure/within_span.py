"""Within span: the part of a structure between two modules."""

from __future__ import annotations

import numpy as np

from critical_neurons.core.structure import NO_UNIT, Structure
from critical_neurons.errors import InvalidSettingError


def select_span(structure: Structure, start: str | None, stop: str | None) -> Structure:
    """The part between two modules, both included, in the order of calls. Units read outside of it must stay."""
    if start is None and stop is None:
        return structure
    order = [wiring.module for wiring in structure.wirings]
    first = 0 if start is None else _find_place(order, "start", start)[0]
    last = len(order) - 1 if stop is None else _find_place(order, "stop", stop)[-1]
    if first > last:
        raise InvalidSettingError(f"start, stop: {start} comes behind {stop}. Give them in the order of the calls.")
    inside = set(order[first : last + 1])
    read = [wiring.inputs for wiring in structure.wirings if wiring.module not in inside and wiring.kernel]
    outer = np.concatenate(read) if read else np.zeros(0, dtype=np.int64)
    reasons = {
        layer.name: "it feeds what lies outside the span"
        for layer in structure.removable
        if np.isin(layer.units[layer.units != NO_UNIT], outer).any()
    }
    return structure.within(inside).restrict(reasons)[0]


def _find_place(order: list[str], setting: str, name: str) -> list[int]:
    found = [place for place, module in enumerate(order) if module == name or module.startswith(f"{name}.")]
    if not found:
        raise InvalidSettingError(
            f"{setting}: no layer is called {name} or lies in a module of that name. Layers: {', '.join(order)}."
        )
    return found

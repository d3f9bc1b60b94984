"""Score settings: from a cell's settings, plain data that identifies stored results, to arguments of `cn.score`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import critical_neurons as cn
from critical_neurons.core.formulation import FORMULATIONS
from critical_neurons.core.settings import list_settings
from critical_neurons.errors import InvalidSettingError

SOLVER = {each.name for each in list_settings(cn.Solver)} - {"name"}

KNOWN = (
    SOLVER
    | {each.name for kind in FORMULATIONS.values() for each in list_settings(kind)}
    | {"formulation", "by_class", "budget", "solver"}
)


def read_score_settings(settings: Mapping[str, Any], *, threads: int | None = 1) -> dict[str, Any]:
    """Keyword arguments for `cn.score`, with `threads` solver threads.

    A cell has the settings of all formulations in one mapping, so that a variant need only change `formulation`.
    Settings that the named formulation does not have are ignored, such as `input_radius` for the linearised one.
    """
    unknown = sorted(set(settings) - KNOWN)
    if unknown:
        raise InvalidSettingError(f"score: unknown: {', '.join(unknown)}. Accepted: {', '.join(sorted(KNOWN))}.")
    kind = FORMULATIONS[settings.get("formulation", "paper")]
    known = {each.name for each in list_settings(kind)}
    formulation = kind(**{name: value for name, value in settings.items() if name in known})
    limits = {name: value for name, value in settings.items() if name in SOLVER}
    return {
        "formulation": cn.ByClass(formulation) if settings.get("by_class") else formulation,
        "budget": cn.Budget(**settings["budget"]) if "budget" in settings else None,
        "solver": cn.Solver(settings.get("solver", "auto"), **{"threads": threads, **limits}),
    }

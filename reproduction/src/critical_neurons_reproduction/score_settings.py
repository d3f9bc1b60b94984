"""Score settings: those of a cell, plain data by which stored results are found, to what `cn.score` takes."""

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
    """Keywords for `cn.score`, on so many threads.

    A cell tells what all formulations have in one mapping, and may change the formulation alone: what the one it
    names does not have, such as the box and the gates of the linearised one, is left out.
    """
    unknown = sorted(set(settings) - KNOWN)
    if unknown:
        raise InvalidSettingError(f"score: {', '.join(unknown)} is no setting. Accepted: {', '.join(sorted(KNOWN))}.")
    kind = FORMULATIONS[settings.get("formulation", "paper")]
    known = {each.name for each in list_settings(kind)}
    formulation = kind(**{name: value for name, value in settings.items() if name in known})
    limits = {name: value for name, value in settings.items() if name in SOLVER}
    return {
        "formulation": cn.ByClass(formulation) if settings.get("by_class") else formulation,
        "budget": cn.Budget(**settings["budget"]) if "budget" in settings else None,
        "solver": cn.Solver(settings.get("solver", "auto"), **{"threads": threads, **limits}),
    }

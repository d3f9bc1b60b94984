"""Settings of `cn.score` by the names of their fields alone, for tests that put them together from several places."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import critical_neurons as cn
from critical_neurons.core.formulation import FORMULATIONS

OWN = ("budget", "ignore", "start", "stop", "progress")
SOLVER = [each.name for each in fields(cn.Solver) if each.name != "name"]
BY_CLASS = ("workers", "earlier")


def settle(
    *, formulation: str = "paper", by_class: bool = False, solver: str = "auto", **given: Any
) -> dict[str, Any]:
    """Keywords for `cn.score`; whatever is neither its own nor the solver's is the formulation's."""
    own, limits, pieces = (
        {name: given.pop(name) for name in names if name in given} for names in (OWN, SOLVER, BY_CLASS)
    )
    program = FORMULATIONS[formulation](**given)
    return {
        "formulation": cn.ByClass(program, **pieces) if by_class else program,
        "solver": cn.Solver(solver, **limits),
        **own,
    }

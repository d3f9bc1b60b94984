"""Importance scores for the units of a ReLU network from a mixed integer program, and smaller networks.

import critical_neurons as cn

scores = cn.score(model, inputs, labels)
smaller = cn.prune(model, cn.plan(scores, threshold=0.1), inputs)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from critical_neurons.network import Network
    from critical_neurons.pipeline import inspect, mask, plan, prune
    from critical_neurons.plans import Plan
    from critical_neurons.reading import reads
    from critical_neurons.scores import Scores
    from critical_neurons.scoring import score
    from critical_neurons.solution import Status, Step

_HOMES = {
    "Network": "network",
    "Plan": "plans",
    "Scores": "scores",
    "Status": "solution",
    "Step": "solution",
    "inspect": "pipeline",
    "mask": "pipeline",
    "plan": "pipeline",
    "prune": "pipeline",
    "reads": "reading",
    "score": "scoring",
}

__all__ = [
    "Network",
    "Plan",
    "Scores",
    "Status",
    "Step",
    "inspect",
    "mask",
    "plan",
    "prune",
    "reads",
    "score",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: torch takes seconds, `--help` must not."""
    if name in _HOMES:
        return getattr(import_module(f"critical_neurons.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

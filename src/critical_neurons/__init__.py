"""Importance scores for the units of a ReLU network from a mixed integer program, and smaller networks.

import critical_neurons as cn

scores = cn.score(model, inputs, labels)
smaller = cn.prune(model, cn.plan(scores, threshold=0.1), inputs)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from critical_neurons.adapting import as_masks, as_torch_pruning
    from critical_neurons.bounding import bound_network
    from critical_neurons.bounds import Bounds, Interval
    from critical_neurons.comparing import compare
    from critical_neurons.comparison import Comparison
    from critical_neurons.compressing import Compression, compress
    from critical_neurons.encoding import Objective, budget_network, encode
    from critical_neurons.keeping import export, load, save
    from critical_neurons.network import Network
    from critical_neurons.pipeline import inspect, mask, prune, solve
    from critical_neurons.planning import plan
    from critical_neurons.plans import Plan
    from critical_neurons.program import Program
    from critical_neurons.reading import read_network, reads
    from critical_neurons.scores import Scores
    from critical_neurons.scoring import score
    from critical_neurons.searching import search
    from critical_neurons.solution import Solution, Status, Step
    from critical_neurons.workers import Workers

_HOMES = {
    "Bounds": "bounds",
    "Comparison": "comparison",
    "Compression": "compressing",
    "Interval": "bounds",
    "Network": "network",
    "Objective": "encoding",
    "Plan": "plans",
    "Program": "program",
    "Scores": "scores",
    "Solution": "solution",
    "Status": "solution",
    "Step": "solution",
    "Workers": "workers",
    "as_masks": "adapting",
    "as_torch_pruning": "adapting",
    "bound_network": "bounding",
    "budget_network": "encoding",
    "compare": "comparing",
    "compress": "compressing",
    "encode": "encoding",
    "export": "keeping",
    "inspect": "pipeline",
    "load": "keeping",
    "mask": "pipeline",
    "plan": "planning",
    "prune": "pipeline",
    "read_network": "reading",
    "reads": "reading",
    "save": "keeping",
    "score": "scoring",
    "search": "searching",
    "solve": "pipeline",
}

__all__ = [
    "Bounds",
    "Comparison",
    "Compression",
    "Interval",
    "Network",
    "Objective",
    "Plan",
    "Program",
    "Scores",
    "Solution",
    "Status",
    "Step",
    "Workers",
    "as_masks",
    "as_torch_pruning",
    "bound_network",
    "budget_network",
    "compare",
    "compress",
    "encode",
    "export",
    "inspect",
    "load",
    "mask",
    "plan",
    "prune",
    "read_network",
    "reads",
    "save",
    "score",
    "search",
    "solve",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: torch takes seconds, `--help` must not."""
    if name in _HOMES:
        return getattr(import_module(f"critical_neurons.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Importance scores for the units of a ReLU network from a mixed integer program, and smaller networks.

import critical_neurons as cn

scores = cn.score(model, inputs, labels)
smaller = cn.prune(model, cn.plan(scores, threshold=0.1), inputs)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from critical_neurons.api.compare import compare
    from critical_neurons.api.compress import compress
    from critical_neurons.api.compression import Compression
    from critical_neurons.api.export import export
    from critical_neurons.api.from_onnx import from_onnx
    from critical_neurons.api.inspect import inspect
    from critical_neurons.api.load import load
    from critical_neurons.api.lossless import Lossless, lossless
    from critical_neurons.api.mask import mask
    from critical_neurons.api.plan import plan
    from critical_neurons.api.prune import prune
    from critical_neurons.api.report import report
    from critical_neurons.api.save import save
    from critical_neurons.api.score import score
    from critical_neurons.api.search import search
    from critical_neurons.api.solve import solve
    from critical_neurons.api.sweep import Sweep, sweep
    from critical_neurons.core.bounds import Bounds, Interval
    from critical_neurons.core.budget import Budget
    from critical_neurons.core.comparison import Comparison
    from critical_neurons.core.curve import Curve
    from critical_neurons.core.distillation import Distillation
    from critical_neurons.core.formulation import Bisection, ByClass, Exact, Lagrangian, Linearised, Paper
    from critical_neurons.core.network import Network
    from critical_neurons.core.plan import Plan
    from critical_neurons.core.program import Program
    from critical_neurons.core.scores import Scores
    from critical_neurons.core.solution import Solution, Status, Step
    from critical_neurons.core.solver import Solver
    from critical_neurons.core.stability import Stability
    from critical_neurons.core.workers import Workers
    from critical_neurons.formulations import Objective, budget_network, encode
    from critical_neurons.formulations.bound_propagation import bound_network
    from critical_neurons.io.interop import as_masks, as_torch_pruning
    from critical_neurons.readers import read_network, reads

_HOMES = {
    "Bisection": "core.formulation",
    "Bounds": "core.bounds",
    "Budget": "core.budget",
    "ByClass": "core.formulation",
    "Comparison": "core.comparison",
    "Compression": "api.compression",
    "Curve": "core.curve",
    "Distillation": "core.distillation",
    "Exact": "core.formulation",
    "Interval": "core.bounds",
    "Lagrangian": "core.formulation",
    "Linearised": "core.formulation",
    "Lossless": "api.lossless",
    "Network": "core.network",
    "Objective": "formulations",
    "Paper": "core.formulation",
    "Plan": "core.plan",
    "Program": "core.program",
    "Scores": "core.scores",
    "Solution": "core.solution",
    "Solver": "core.solver",
    "Stability": "core.stability",
    "Status": "core.solution",
    "Step": "core.solution",
    "Sweep": "api.sweep",
    "Workers": "core.workers",
    "as_masks": "io.interop",
    "as_torch_pruning": "io.interop",
    "bound_network": "formulations.bound_propagation",
    "budget_network": "formulations",
    "compare": "api.compare",
    "compress": "api.compress",
    "encode": "formulations",
    "export": "api.export",
    "from_onnx": "api.from_onnx",
    "inspect": "api.inspect",
    "load": "api.load",
    "lossless": "api.lossless",
    "mask": "api.mask",
    "plan": "api.plan",
    "prune": "api.prune",
    "read_network": "readers",
    "reads": "readers",
    "report": "api.report",
    "save": "api.save",
    "score": "api.score",
    "search": "api.search",
    "solve": "api.solve",
    "sweep": "api.sweep",
}

__all__ = [
    "Bisection",
    "Bounds",
    "Budget",
    "ByClass",
    "Comparison",
    "Compression",
    "Curve",
    "Distillation",
    "Exact",
    "Interval",
    "Lagrangian",
    "Linearised",
    "Lossless",
    "Network",
    "Objective",
    "Paper",
    "Plan",
    "Program",
    "Scores",
    "Solution",
    "Solver",
    "Stability",
    "Status",
    "Step",
    "Sweep",
    "Workers",
    "as_masks",
    "as_torch_pruning",
    "bound_network",
    "budget_network",
    "compare",
    "compress",
    "encode",
    "export",
    "from_onnx",
    "inspect",
    "load",
    "lossless",
    "mask",
    "plan",
    "prune",
    "read_network",
    "reads",
    "report",
    "save",
    "score",
    "search",
    "solve",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: torch takes seconds, `--help` must not."""
    if name in _HOMES:
        return getattr(import_module(f"critical_neurons.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

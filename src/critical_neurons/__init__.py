"""Importance scores for the units of a ReLU network from a mixed integer program, and smaller networks.

import critical_neurons as cn

scores = cn.score(model, inputs, labels)
smaller = cn.prune(model, cn.plan(scores, threshold=0.1), inputs)
"""

import critical_neurons.interrupted_start  # noqa: F401, I001  an interrupt may come while the next lines run

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

from critical_neurons.core.hooks import Hook, set_hook

if TYPE_CHECKING:
    from critical_neurons.api.compare import compare as compare
    from critical_neurons.api.compress import compress as compress
    from critical_neurons.api.compression import Compression as Compression
    from critical_neurons.api.export import export as export
    from critical_neurons.api.from_onnx import from_onnx as from_onnx
    from critical_neurons.api.inspect import inspect as inspect
    from critical_neurons.api.load import load as load
    from critical_neurons.api.lossless import Lossless as Lossless
    from critical_neurons.api.lossless import lossless as lossless
    from critical_neurons.api.mask import mask as mask
    from critical_neurons.api.plan import plan as plan
    from critical_neurons.api.prune import prune as prune
    from critical_neurons.api.report import report as report
    from critical_neurons.api.save import save as save
    from critical_neurons.api.score import score as score
    from critical_neurons.api.search import search as search
    from critical_neurons.api.solve import solve as solve
    from critical_neurons.api.sweep import Sweep as Sweep
    from critical_neurons.api.sweep import sweep as sweep
    from critical_neurons.core.bounds import Bounds as Bounds
    from critical_neurons.core.bounds import Interval as Interval
    from critical_neurons.core.budget import Budget as Budget
    from critical_neurons.core.comparison import Comparison as Comparison
    from critical_neurons.core.curve import Curve as Curve
    from critical_neurons.core.distillation import Distillation as Distillation
    from critical_neurons.core.formulation import Bisection as Bisection
    from critical_neurons.core.formulation import ByClass as ByClass
    from critical_neurons.core.formulation import Exact as Exact
    from critical_neurons.core.formulation import Lagrangian as Lagrangian
    from critical_neurons.core.formulation import Linearised as Linearised
    from critical_neurons.core.formulation import Paper as Paper
    from critical_neurons.core.network import Network as Network
    from critical_neurons.core.plan import Plan as Plan
    from critical_neurons.core.program import Program as Program
    from critical_neurons.core.progress import Progress as Progress
    from critical_neurons.core.scores import Scores as Scores
    from critical_neurons.core.solution import Solution as Solution
    from critical_neurons.core.solution import Status as Status
    from critical_neurons.core.solution import Step as Step
    from critical_neurons.core.solver import Solver as Solver
    from critical_neurons.core.stability import Stability as Stability
    from critical_neurons.core.workers import Workers as Workers
    from critical_neurons.formulations import Objective as Objective
    from critical_neurons.formulations import budget_network as budget_network
    from critical_neurons.formulations import encode as encode
    from critical_neurons.formulations.bound_propagation import bound_network as bound_network
    from critical_neurons.io.interop import as_masks as as_masks
    from critical_neurons.io.interop import as_torch_pruning as as_torch_pruning
    from critical_neurons.readers import read_network as read_network
    from critical_neurons.readers import reads as reads

_EXPORTS = {
    "api.compare": "compare",
    "api.compress": "compress",
    "api.compression": "Compression",
    "api.export": "export",
    "api.from_onnx": "from_onnx",
    "api.inspect": "inspect",
    "api.load": "load",
    "api.lossless": "Lossless lossless",
    "api.mask": "mask",
    "api.plan": "plan",
    "api.prune": "prune",
    "api.report": "report",
    "api.save": "save",
    "api.score": "score",
    "api.search": "search",
    "api.solve": "solve",
    "api.sweep": "Sweep sweep",
    "core.bounds": "Bounds Interval",
    "core.budget": "Budget",
    "core.comparison": "Comparison",
    "core.curve": "Curve",
    "core.distillation": "Distillation",
    "core.formulation": "Bisection ByClass Exact Lagrangian Linearised Paper",
    "core.network": "Network",
    "core.plan": "Plan",
    "core.program": "Program",
    "core.progress": "Progress",
    "core.scores": "Scores",
    "core.solution": "Solution Status Step",
    "core.solver": "Solver",
    "core.stability": "Stability",
    "core.workers": "Workers",
    "formulations": "Objective budget_network encode",
    "formulations.bound_propagation": "bound_network",
    "io.interop": "as_masks as_torch_pruning",
    "readers": "read_network reads",
}
_HOMES = {name: home for home, names in _EXPORTS.items() for name in names.split()}
_HOOKS = {**_HOMES, "plot": "reports.figures", "render_html": "reports.render"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: torch takes seconds, `--help` must not."""
    if name in _HOMES:
        return _find(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _find(name: str) -> Any:
    return getattr(import_module(f"critical_neurons.{_HOOKS[name]}"), name)


for _hook in get_args(Hook):
    set_hook(_hook, partial(_find, _hook))

"""The package: light to import, whole without its extras."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import critical_neurons as cn

WITHOUT_EXTRAS = """
import sys

for name in ("cvxpy", "clarabel", "datasets", "PIL", "sklearn", "onnx", "onnxruntime", "onnxscript", "torch_pruning"):
    sys.modules[name] = None  # as if not installed
for name in ("dask", "distributed", "joblib", "threadpoolctl"):
    sys.modules[name] = None
import torch
from torch import nn
import critical_neurons as cn
from critical_neurons.errors import MissingExtraError

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
inputs = torch.rand(3, 4)
scores = cn.score(model, inputs, solver=cn.Solver(threads=1))
assert scores.status is cn.Status.OPTIMAL
assert len(cn.score(model, inputs, torch.tensor([0, 1, 2]), formulation=cn.ByClass()).parts) == 3
for workers in (cn.Workers(2), cn.Workers(scheduler="tcp://127.0.0.1:1")):
    try:
        cn.score(model, inputs, torch.tensor([0, 1, 2]), formulation=cn.ByClass(workers=workers))
    except MissingExtraError as error:
        print(error)
plan = cn.plan(scores, units=0.5)
assert cn.prune(model, plan, inputs)[0].out_features == 3
assert cn.mask(model, plan)[0].out_features == 6
assert "it gives the network's output" in str(cn.inspect(model, inputs))
try:
    cn.score(model, inputs, solver="cvxpy:CLARABEL")
except MissingExtraError as error:
    assert isinstance(error, ImportError)
    print(error)
assert cn.as_masks(plan, model)["0", "bias"].sum() == 3
try:
    cn.as_torch_pruning(scores, model)
except MissingExtraError as error:
    print(error)
smaller = cn.prune(model, plan, inputs)
assert "torch._dynamo" not in sys.modules  # its import takes seconds
comparison = cn.compare(model, smaller, inputs, torch.tensor([0, 1, 2]), repeats=1)
assert comparison.after.onnx_bytes is None
assert "critical_neurons[onnx]" in str(comparison)
try:
    cn.export(smaller, "model.onnx", inputs)
except MissingExtraError as error:
    print(error)
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_does_not_import_torch():
    run(
        "import sys, critical_neurons\n"
        "dir(critical_neurons)\n"
        "heavy = {'torch', 'numpy', 'scipy', 'highspy', 'cvxpy', 'sklearn', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "critical_neurons.Status\n"
        "assert 'torch' not in sys.modules"
    )


def test_without_extras():
    assert run(WITHOUT_EXTRAS).splitlines() == [
        "joblib is not installed. Install it with: pip install 'critical_neurons[jobs]'",
        "dask is not installed. Install it with: pip install 'critical_neurons[dask]'",
        "cvxpy is not installed. Install it with: pip install 'critical_neurons[cvxpy]'",
        "torch-pruning is not installed. Install it with: pip install 'critical_neurons[torch-pruning]'",
        "onnx is not installed. Install it with: pip install 'critical_neurons[onnx]'",
    ]


def test_every_public_name_resolves():
    assert cn.__all__ == sorted(cn.__all__)
    for name in cn.__all__:
        found = getattr(cn, name)
        assert found.__name__ == name
        assert found.__module__.startswith("critical_neurons.")
    assert set(cn.__all__) == {
        *("Bisection", "Budget", "ByClass", "Distillation", "Exact", "Lagrangian", "Linearised", "Paper", "Solver"),
        *("Bounds", "Comparison", "Compression", "Curve", "Interval", "Lossless", "Network", "Objective", "Plan"),
        "Program",
        "Progress",
        *(
            "Scores",
            "Solution",
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
        ),
        *(
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
        ),
        *("save", "score", "search", "solve", "sweep"),
    }


def test_dir_lists_the_public_names():
    assert set(cn.__all__) <= set(dir(cn))


def test_star_import():
    names = {}
    exec("from critical_neurons import *", names)
    assert names["score"] is cn.score
    assert names["Plan"] is cn.Plan


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'critical_neurons' has no attribute 'prunes'"):
        cn.prunes  # noqa: B018


SOURCE = Path(cn.__file__).parent


def test_files_have_names_of_their_own():
    """Commands, and plans, are called as the public functions that they belong to."""
    found = Counter(path.name for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    twice = {name for name, count in found.items() if count > 1}
    assert twice <= {path.name for path in (SOURCE / "api").glob("*.py")}
    for name in twice:
        packages = {path.parent.name for path in SOURCE.rglob(name)}
        assert packages in ({"api", "cli"}, {"api", "core"})


def test_classes_have_names_of_their_own():
    texts = (path.read_text() for path in SOURCE.rglob("*.py"))
    found = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))
    assert [name for name, count in found.items() if count > 1] == []

"""Time limits: how long calls with a time limit really take, on networks that are large for the limit.

python benchmarks/time_limits.py run                    everything not stored in benchmarks/results/time_limits.jsonl
python benchmarks/time_limits.py run --only lossless    cases whose names contain this
python benchmarks/time_limits.py page                   the newest line of every case as docs/time-limits.md

Every case runs in a separate process, after a small warm-up call of its kind, since a first call also imports
packages. Weights and inputs are random.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "time_limits.jsonl"
PAGE = ROOT / "docs" / "time-limits.md"
LIMITS = (0.1, 1.0, 10.0)

TEMPLATE = """# Time limits

This page shows how long calls with a time limit take in fact. A call should exceed its limit by at most 1 s, or by
10 % if that is more. Cells in bold exceed it by more. The time includes reading the model, bounds, encoding, solving
and building the result. Some steps cannot be interrupted: one call of a layer, one addition of large sparse matrices,
and one step of a solver or of distillation.

If reading the model takes 0.7 s, or 7 %, longer than the limit, the call raises an error: "time_limit: 0.1 s were
over before the model was read". If the limit is reached before the program is built, every score is 1, with a note.
A conic solver of CVXPY is not started if ten of its steps would take longer than the remaining time; HiGHS is not
started if its presolve would.

The cells give wall-clock seconds, and processor seconds in parentheses, for limits of {limits} s. The load is the
load average on {cores} when the case began; a high load lengthens the wall-clock time. Networks have random weights.
The inputs are 10 random images of 32x32, for distillation 256. Versions: {versions}; {machine}; {date}.

Written by `python benchmarks/time_limits.py page` from `benchmarks/results/time_limits.jsonl`; `python
benchmarks/time_limits.py run` measures the cases that are not stored there.

| call | {heads} |
|---|{rules}|
{rows}
"""

CASES: dict[str, dict[str, Any]] = {
    "score: VGG-16, radius 0": {"model": "vgg16", "input_radius": 0.0},
    "score: VGG-16, radius 1e-5": {"model": "vgg16", "input_radius": 1e-5},
    "score: VGG-16, Lagrangian": {"model": "vgg16", "input_radius": 0.0, "loss_increase": 0.1, "integer": False},
    "score: VGG-16, exact": {"model": "vgg16", "kind": "exact"},
    "score: VGG-16, linearised": {"model": "vgg16", "kind": "linearised"},
    "score: VGG-16, CLARABEL": {"model": "vgg16", "solver": "cvxpy:CLARABEL", "input_radius": 1e-5, "integer": False},
    "score: ResNet-20, radius 1e-4": {"model": "resnet20", "input_radius": 1e-4},
    "score: LeNet-5, HiGHS": {"model": "lenet5", "solver": "highs", "input_radius": 1e-2},
    "score: LeNet-5, barrier": {"model": "lenet5", "solver": "barrier", "input_radius": 1e-2, "integer": False},
    "score: LeNet-5, SCIP": {"model": "lenet5", "solver": "scip", "input_radius": 1e-2},
    "score: LeNet-5, CLARABEL": {
        "model": "lenet5", "solver": "cvxpy:CLARABEL", "input_radius": 1e-2, "integer": False
    },
    "lossless: FC-3": {"model": "fc3"},
    "lossless: LeNet-5": {"model": "lenet5"},
    "lossless: VGG-16": {"model": "vgg16"},
    "distillation: ResNet-20": {"model": "resnet20"},
    "distillation: VGG-16": {"model": "vgg16"},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "one", "page"])
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--limit", type=float)
    given = parser.parse_args()
    chosen = [name for name in CASES if given.only in name]
    match given.action:
        case "run":
            stored = {(line["case"], line["limit"]) for line in read_lines()}
            for limit in LIMITS if given.limit is None else (given.limit,):
                for name in chosen:
                    if (name, limit) not in stored:
                        one = [sys.executable, __file__, "one", "--only", name, "--limit", str(limit)]
                        subprocess.run(one, check=True)
        case "one":
            measure(chosen[0], given.limit)
        case "page":
            PAGE.write_text(write_page(read_lines()))


def measure(name: str, limit: float) -> None:
    from storing import store_line

    kind, settings = name.partition(":")[0], dict(CASES[name])
    prepare = {"score": prepare_score, "lossless": prepare_lossless, "distillation": prepare_distillation}[kind]
    model = settings.pop("model")
    prepare("fc3", **settings)(2.0)
    call = prepare(model, **settings)
    load, began, used = os.getloadavg()[0], time.monotonic(), time.process_time()
    outcome = attempt(call, limit)
    seconds, processor = time.monotonic() - began, time.process_time() - used
    figures = {"seconds": round(seconds, 2), "processor_seconds": round(processor, 2), "load": round(load, 1)}
    store_line(RESULTS, {"case": name, "limit": limit, **figures, "outcome": outcome})


def attempt(call: Callable[[float], str], limit: float) -> str:
    from critical_neurons.errors import SolverError

    try:
        return call(limit)
    except SolverError as error:
        return str(error)


def make_model(name: str) -> Any:
    import torch

    from critical_neurons.io import builtin_models

    torch.manual_seed(0)
    return getattr(builtin_models, name)().eval()


def draw_inputs(count: int) -> Any:
    import torch

    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5


def prepare_score(
    model: str, *, kind: str = "paper", solver: str = "auto", loss_increase: float | None = None, **settings: Any
) -> Callable[[float], str]:
    import critical_neurons as cn

    weight = {} if loss_increase is None else {"loss_weight": cn.Lagrangian(loss_increase=loss_increase)}
    formulation = {"paper": cn.Paper, "exact": cn.Exact, "linearised": cn.Linearised}[kind](**settings, **weight)
    work = partial(cn.score, make_model(model), draw_inputs(10), formulation=formulation)

    def call(seconds: float) -> str:
        scores = work(solver=cn.Solver(solver, time_limit=seconds))
        return "; ".join([scores.status.value, *scores.notes])

    return call


def prepare_lossless(model: str) -> Callable[[float], str]:
    import critical_neurons as cn

    work = partial(cn.lossless, make_model(model), (-0.5, 0.5), inputs=draw_inputs(10))

    def call(seconds: float) -> str:
        found = work(time_limit=seconds)
        before, after = found.parameters
        return f"{found.stability.stopped or 'complete'}; {after / before:.3f} of the parameters left"

    return call


def prepare_distillation(model: str) -> Callable[[float], str]:
    """Distillation of a copy with other weights, called as in `prune`, whose other steps have no time limit."""
    import copy

    import torch

    import critical_neurons as cn
    from critical_neurons.removal.distil import distil, hold_out
    from critical_neurons.removal.imitation import Aim

    def square(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (found - wanted).square().mean()

    original, parts, reported = make_model(model), hold_out(draw_inputs(256), 0), []
    smaller = copy.deepcopy(original)
    with torch.no_grad():
        for values in smaller.parameters():
            values.mul_(1.1)

    def call(seconds: float) -> str:
        reported.clear()
        settings = cn.Distillation(seconds=seconds)
        aim = Aim(square, square)
        distil(original, smaller, *parts, aim, augment=lambda rows: rows, settings=settings, report=reported.append)
        return f"{sum('held-out' in str(each) for each in reported)} steps"

    return call


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def write_page(lines: list[dict[str, Any]]) -> str:
    newest = {(line["case"], line["limit"]): line for line in lines}
    rows = []
    for name in CASES:
        cells = [newest.get((name, limit)) for limit in LIMITS]
        rows.append(f"| {name} | {' | '.join(map(write_cell, cells))} |")
    last = lines[-1]
    return TEMPLATE.format(
        limits=", ".join(f"{limit:g}" for limit in LIMITS),
        heads=" | ".join(f"limit {limit:g} s" for limit in LIMITS),
        rules="|".join("---" for _ in LIMITS),
        rows="\n".join(rows),
        versions=", ".join(f"{name} {each}" for name, each in last["versions"].items()),
        machine=last["machine"],
        cores="two cores",
        date=last["date"],
    )


def write_cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "not measured"
    limit, mark = line["limit"], ""
    if line["seconds"] > limit + max(1.0, 0.1 * limit):
        mark = "**"
    figures = f"{mark}{line['seconds']:.2f} ({line['processor_seconds']:.2f}){mark}"
    return f"{figures}, load {line['load']:g}: {line['outcome']}"


if __name__ == "__main__":
    main()

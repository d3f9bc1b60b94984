"""Soak: many damaged files and many random networks, each of which must give what it should or one clear error.

python benchmarks/soak.py run --files 10000 --networks 2000     what is not stored yet; benchmarks/results/soak.jsonl
python benchmarks/soak.py report                                 what is stored, and every violation

Every batch of seeds is one stored line, so that a run that was stopped goes on where it was. The same seed gives the
same file or network, whatever ran before.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import CriticalNeuronsError
from storing import store_line
from tests.io.test_mutated_files import WRITERS, mutate
from tests.structure.checks import SAME
from tests.structure.drawn import draw_network

RESULTS = Path(__file__).parent / "results" / "soak.jsonl"
FILES_PER_LINE, NETWORKS_PER_LINE = 250, 20
CALIBRATION_ROWS = 24
EXPORTED = 10
"""One in so many networks is exported to ONNX as well, which takes longer than all the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--files", type=int, default=10_000, help="damaged files of every kind")
    parser.add_argument("--networks", type=int, default=2_000)
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.files, arguments.networks)
    report()


def run(files: int, networks: int) -> None:
    done = {(line["kind"], line["first"]) for line in read_lines()}
    for kind, check, total, size in list_kinds(files, networks):
        for first in range(0, total, size):
            if (kind, first) not in done:
                seeds = range(first, min(first + size, total))
                began = time.process_time()
                violations = [found for seed in seeds if (found := attempt(check, seed))]
                seconds = round(time.process_time() - began, 1)
                result = {"kind": kind, "first": first, "count": len(seeds), "cpu_seconds": seconds}
                store_line(RESULTS, result | {"violations": violations})


def list_kinds(files: int, networks: int) -> Iterator[tuple[str, Callable[[int], None], int, int]]:
    for name in WRITERS:
        yield f"file: {name}", partial(load_damaged, name), files, FILES_PER_LINE
    yield "network", go_the_whole_way, networks, NETWORKS_PER_LINE


def attempt(check: Callable[[int], None], seed: int) -> dict[str, Any] | None:
    """What went wrong, if anything did."""
    try:
        check(seed)
    except Exception as error:  # whatever it is, it is a violation
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"seed": seed, "error": f"{type(error).__name__}: {error}"[:300], "at": f"{frame.name}:{frame.lineno}"}
    return None


_written: dict[str, tuple[Path, Callable[[], Any], bytes, Any]] = {}


def load_damaged(kind: str, seed: int) -> None:
    """It gives what the whole file gives, or an error of the package."""
    if kind not in _written:
        path, load = WRITERS[kind](Path(tempfile.mkdtemp()))
        _written[kind] = path, load, path.read_bytes(), load()
    path, load, content, expected = _written[kind]
    path.write_bytes(mutate(content, random.Random(f"{kind} {seed}")))
    try:
        found = load()
    except CriticalNeuronsError:
        return
    assert found == expected, "a changed file gives something else"


def go_the_whole_way(seed: int) -> None:
    """Search, plan, prune, mask, save, load, export; and score where the network has a program."""
    model, example = draw_network(seed)
    model = model.eval().double()
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(CALIBRATION_ROWS, *example.shape[1:], generator=generator, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    share = float(np.random.default_rng(seed).choice([0.3, 0.5, 0.8]))
    compensate = ("least_squares", "none", "bias")[seed % 3]
    try:
        scores = cn.search(model, inputs, units=share, effort="quick", compensate=compensate)
    except CriticalNeuronsError:
        return  # nothing can be removed, or not as much
    plan = cn.plan(scores)
    assert all(len(kept) for kept in plan.kept.values()), "a layer is empty"
    smaller = cn.prune(model, plan, inputs)
    assert_same(cn.mask(model, plan), smaller, inputs, SAME)
    refitted = cn.prune(model, plan, inputs, compensate=compensate)
    assert torch.isfinite(run_model(refitted, inputs)).all(), "refitted weights are not finite"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cn.save(refitted, folder / "saved", plan=plan, scores=scores)
        assert_same(cn.load(folder / "saved", model), refitted, inputs, 0.0)
        plan.save(folder / "plan.json")
        assert cn.Plan.load(folder / "plan.json").to_dict() == plan.to_dict(), "the plan has changed"
        if seed % EXPORTED == 0:
            cn.export(smaller.float(), folder / "smaller.onnx", inputs.float())
    try:
        solved = cn.score(model, inputs[:2], solver=cn.Solver(time_limit=5.0))
    except CriticalNeuronsError:
        solved = None  # no program: not piecewise linear
    if solved is not None:
        assert solved.bound <= solved.objective, "the bound lies above the objective"
        cut = cn.plan(solved, threshold=2.0)
        assert_same(cn.mask(model, cut), cn.prune(model, cut, inputs), inputs, SAME)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), (
        "the model has changed"
    )


@torch.no_grad()
def run_model(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(inputs)
    return outputs


def assert_same(one: nn.Module, other: nn.Module, inputs: torch.Tensor, tolerance: float) -> None:
    wanted, found = run_model(one, inputs), run_model(other, inputs)
    difference = float((wanted - found).abs().max())
    assert difference <= tolerance * max(1.0, float(wanted.abs().max())), f"outputs differ by {difference:.3g}"


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def report() -> None:
    lines = read_lines()
    for kind in dict.fromkeys(line["kind"] for line in lines):
        own = [line for line in lines if line["kind"] == kind]
        found = [violation for line in own for violation in line["violations"]]
        print(f"{kind}: {sum(line['count'] for line in own)} tried, {len(found)} violations")
        for violation in found:
            print(f"  {violation}")


if __name__ == "__main__":
    main()

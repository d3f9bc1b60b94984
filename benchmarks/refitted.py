"""A public ResNet-20 pruned by several methods, all refitted on the same images: the README's figure.

python benchmarks/refitted.py --data FOLDER --checkpoints FOLDER --cache FOLDER     everything not stored yet
    [--method NAME] [--draw NUMBER]                                                 only these; repeatable

Other methods assign an importance to every unit, and are run with both usual ways to divide the budget among layers:
a global ranking, or the same share of units in all layers. Two methods merge units instead of refitting weights, with
as many units per layer as magnitude pruning (L2) keeps; their batch norms are re-estimated on the images. A budget is
a share of the MACs, or a share of the channels of every layer. A line of benchmarks/results/refitted.jsonl is a
method, a division, a budget and a draw of the images, on 10 000 test images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.scores import spread_scores
from critical_neurons.core.structure import Floats
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.selection.norms import score_norms
from critical_neurons_reproduction.datasets import LabelledImages
from distillation import CALIBRATION, OURS, clock, load_case, reestimate
from merging import MERGERS
from preferring import Subject, draw_random, prefer
from quality import find_uniform_share, share_of_macs
from storing import store_line

RESULTS = Path(__file__).parent / "results" / "refitted.jsonl"
NETWORK, PART = "resnet20", "test"
BUDGETS = (*({"macs": share} for share in (0.73, 0.5, 0.3)), *({"units": share} for share in (0.75, 0.55, 0.35)))
RANDOM, RANKED, UNIFORM = "random", "one ranking", "one share"
CRITERIA = ("L1", "L2", "FPGM", "LAMP", "BN scale", "Taylor", "Hessian", "activation")
"""Those of Torch-Pruning."""

OTHERS = (RANDOM, *CRITERIA, "single removal", "greedy elimination", *MERGERS)
DRAWS = (0, 1, 2, 3, 4)
REPEATED = (OURS, RANDOM, "L2", "Hessian", "single removal", "greedy elimination")
"""Measured on all draws of the calibration images, the other methods on the first."""

KEY = ("network", "method", "division", "macs", "units", "images", "draw", "part")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder with cifar10")
    parser.add_argument("--checkpoints", required=True, type=Path, help="folder with the trained weights")
    parser.add_argument("--cache", required=True, type=Path, help="folder for decoded images")
    parser.add_argument("--method", choices=(OURS, *OTHERS), action="append", help="repeatable; all by default")
    parser.add_argument("--draw", type=int, choices=DRAWS, action="append", help="repeatable; all by default")
    arguments = parser.parse_args()
    done = {name_cell(line) for line in read_lines()}
    missing = [cell for cell in list_cells() if name_cell(cell) not in done]
    missing = [cell for cell in missing if cell["method"] in (arguments.method or (OURS, *OTHERS))]
    missing = [cell for cell in missing if cell["draw"] in (arguments.draw or DRAWS)]
    if not missing:
        return
    model, training, parts = load_case(NETWORK, arguments)
    before = measure_accuracy(model, parts[PART].inputs, parts[PART].labels)
    for draw, cells in groupby(missing, key=itemgetter("draw")):
        rows = torch.randperm(len(training), generator=torch.Generator().manual_seed(draw))[:CALIBRATION]
        subject = Subject(model, training.inputs[rows].contiguous(), training.labels[rows], {})
        known: dict[str, Floats] = {}
        for cell in cells:
            store_line(RESULTS, {**cell, "before": before, **measure(subject, cell, known, parts[PART])})


def measure(subject: Subject, cell: dict[str, Any], known: dict[str, Floats], part: LabelledImages) -> dict[str, Any]:
    plan, choosing = clock(partial(choose, subject, cell, known))
    smaller, refitting = clock(partial(carry_out, subject, cell, plan))
    return {
        "accuracy": measure_accuracy(smaller, part.inputs, part.labels),
        "macs_kept": share_of_macs(subject, plan),
        "processor_seconds": {"choosing": choosing, "refitting": refitting},
    }


def list_cells() -> Iterator[dict[str, Any]]:
    """A share of the channels of every layer leaves no choice of how to divide it among layers."""
    for draw, budget, method in product(DRAWS, BUDGETS, (OURS, *OTHERS)):
        if draw != DRAWS[0] and method not in REPEATED:
            continue
        divided = method != OURS and "macs" in budget
        for division in (RANKED, UNIFORM) if divided else ("",):
            cell = {"network": NETWORK, "method": method, "division": division, **budget}
            yield {**cell, "images": CALIBRATION, "draw": draw, "part": PART}


def choose(subject: Subject, cell: dict[str, Any], known: dict[str, Floats]) -> cn.Plan:
    """`known` caches importances by method; they do not depend on the share."""
    if cell["method"] == OURS:
        budget = {name: cell[name] for name in ("macs", "units") if name in cell}
        return cn.plan(cn.search(subject.model, subject.inputs, **budget, seed=cell["draw"]))
    method = "L2" if cell["method"] in MERGERS else cell["method"]
    if method not in known:
        known[method] = draw_random(subject, cell["draw"]) if method == RANDOM else prefer(method, subject)
    frame = score_norms(subject.model, subject.structure)
    values = spread_scores(frame.structure, known[method])
    ranked = replace(frame, values_by_layer=values, settings={"method": method})
    if cell["division"] == RANKED:
        return cn.plan(ranked, macs=cell["macs"])
    return cn.plan(ranked, units=cell.get("units") or find_uniform_share(subject, ranked, cell["macs"]))


def carry_out(subject: Subject, cell: dict[str, Any], plan: cn.Plan) -> nn.Module:
    """The smaller network, refitted by least squares, or merged if the method does that."""
    if cell["method"] not in MERGERS:
        return cn.prune(subject.model, plan, subject.inputs, compensate="least_squares", seed=cell["draw"])
    merged, chosen = MERGERS[cell["method"]](subject, plan, cell["draw"])
    return reestimate(cn.prune(merged, chosen, subject.inputs), subject.inputs)


def read_lines() -> list[dict[str, Any]]:
    return list(map(json.loads, RESULTS.read_text().splitlines())) if RESULTS.exists() else []


def name_cell(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in KEY)


if __name__ == "__main__":
    main()

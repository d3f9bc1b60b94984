"""A public ResNet-20 pruned by several methods, all refitted on the same images: the README's figure.

python benchmarks/refitted.py --data FOLDER --checkpoints FOLDER --cache FOLDER     everything not stored yet

Other methods assign an importance to every unit, and are run with both usual ways to divide the budget among layers:
a global ranking, or the same share of units in all layers. Two methods merge units instead of refitting weights, with
as many units per layer as magnitude pruning (L2) keeps; their batch norms are re-estimated on the images. A line of
benchmarks/results/refitted.jsonl is a method, a division and a share of the MACs, on 10 000 test images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.scores import spread_scores
from critical_neurons.core.structure import Floats
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.selection.norms import score_norms
from distillation import CALIBRATION, OURS, clock, load_case, reestimate
from merging import MERGERS
from preferring import Subject, draw_random, prefer
from quality import find_uniform_share, share_of_macs
from storing import store_line

RESULTS = Path(__file__).parent / "results" / "refitted.jsonl"
NETWORK, PART, DRAW = "resnet20", "test", 0
SHARES = (0.73, 0.5, 0.3)
RANDOM, RANKED, UNIFORM = "random", "one ranking", "one share"
OTHERS = (RANDOM, "L2", "FPGM", "Taylor", "single removal", "greedy elimination", *MERGERS)
KEY = ("network", "method", "division", "macs", "images", "draw", "part")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder with cifar10")
    parser.add_argument("--checkpoints", required=True, type=Path, help="folder with the trained weights")
    parser.add_argument("--cache", required=True, type=Path, help="folder for decoded images")
    arguments = parser.parse_args()
    done = {name_cell(line) for line in read_lines()}
    missing = [cell for cell in list_cells() if name_cell(cell) not in done]
    if not missing:
        return
    model, training, parts = load_case(NETWORK, arguments)
    rows = torch.randperm(len(training), generator=torch.Generator().manual_seed(DRAW))[:CALIBRATION]
    subject = Subject(model, training.inputs[rows].contiguous(), training.labels[rows], {})
    before, known = measure_accuracy(model, parts[PART].inputs, parts[PART].labels), dict[str, Floats]()
    for cell in missing:
        plan, choosing = clock(partial(choose, subject, cell, known))
        smaller, refitting = clock(partial(carry_out, subject, cell["method"], plan))
        accuracy = measure_accuracy(smaller, parts[PART].inputs, parts[PART].labels)
        result = {
            "before": before,
            "accuracy": accuracy,
            "macs_kept": share_of_macs(subject, plan),
            "processor_seconds": {"choosing": choosing, "refitting": refitting},
        }
        store_line(RESULTS, {**cell, **result})


def list_cells() -> Iterator[dict[str, Any]]:
    ways = [(OURS, ""), *((method, division) for method in OTHERS for division in (RANKED, UNIFORM))]
    for share in SHARES:
        for method, division in ways:
            values = (NETWORK, method, division, share, CALIBRATION, DRAW, PART)
            yield dict(zip(KEY, values, strict=True))


def choose(subject: Subject, cell: dict[str, Any], known: dict[str, Floats]) -> cn.Plan:
    """`known` caches importances by method; they do not depend on the share."""
    if cell["method"] == OURS:
        return cn.plan(cn.search(subject.model, subject.inputs, macs=cell["macs"], seed=DRAW))
    method = "L2" if cell["method"] in MERGERS else cell["method"]
    if method not in known:
        known[method] = draw_random(subject, DRAW) if method == RANDOM else prefer(method, subject)
    frame = score_norms(subject.model, subject.structure)
    values = spread_scores(frame.structure, known[method])
    ranked = replace(frame, values_by_layer=values, settings={"method": method})
    if cell["division"] == RANKED:
        return cn.plan(ranked, macs=cell["macs"])
    return cn.plan(ranked, units=find_uniform_share(subject, ranked, cell["macs"]))


def carry_out(subject: Subject, method: str, plan: cn.Plan) -> nn.Module:
    """The smaller network, refitted by least squares, or merged if the method does that."""
    if method not in MERGERS:
        return cn.prune(subject.model, plan, subject.inputs, compensate="least_squares", seed=DRAW)
    merged, chosen = MERGERS[method](subject, plan, DRAW)
    return reestimate(cn.prune(merged, chosen, subject.inputs), subject.inputs)


def read_lines() -> list[dict[str, Any]]:
    return list(map(json.loads, RESULTS.read_text().splitlines())) if RESULTS.exists() else []


def name_cell(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


if __name__ == "__main__":
    main()

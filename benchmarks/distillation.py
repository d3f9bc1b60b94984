"""Public pretrained networks, pruned by several methods, each with the same refitting and distillation.

python benchmarks/distillation.py run --data FOLDER --checkpoints FOLDER --cache FOLDER --part test
    [--network NAME] [--macs SHARE] [--method NAME] [--draw NUMBER] [--images COUNT] [--setting steps=600]
python benchmarks/distillation.py page                                docs/distillation.md from the stored results

A cell is a network, a share of the MACs, a method and a draw of the calibration images. It is stored as one line of
benchmarks/results/distillation.jsonl when it is done; stored cells are skipped, so that an interrupted run can be
resumed. Settings are chosen on validation images; test images are for the final settings only.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import critical_neurons as cn
from architectures.residual import CifarResNet
from critical_neurons.core.scores import spread_scores
from critical_neurons.io.models import load_model
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.selection.norms import score_norms
from critical_neurons_reproduction.datasets import LabelledImages, load_stored
from critical_neurons_reproduction.experiments.workspace import Runs, find_data
from preferring import METHODS, Subject, prefer
from storing import store_line

RESULTS = Path(__file__).parent / "results" / "distillation.jsonl"
HARNESS, OLDEST_HARNESS = 6, 3
"""Incremented when the same settings would give another result, and the oldest one that is still shown."""

OURS = "search"
PEERS = tuple(name for name in METHODS if name != "paper's program")
SHARES, DRAWS = (0.73, 0.5, 0.3), (0, 1, 2, 3, 4)
CALIBRATION, TRAINED = 1000, 45_000
"""Number of calibration images, drawn from the first `TRAINED` of the training split; the rest is for validation."""

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEPTHS = {"resnet20": 3, "resnet56": 9}
PLAIN = "784-300-100-10"
NETWORKS = (*DEPTHS, "vgg16", PLAIN)
UNIT_SHARES = (0.2,)
"""Shares of the units of every layer kept in 784-300-100-10, on Fashion-MNIST; the network is trained if missing."""

KEY = ("harness", "network", "macs", "units", "method", "draw", "images", "part", "settings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure the cells that are not stored yet")
    run.add_argument("--data", required=True, type=Path, help="folder with cifar10 and fashion_mnist")
    run.add_argument("--checkpoints", type=Path, required=True, help="folder with the trained weights")
    run.add_argument("--cache", type=Path, required=True, help="folder for decoded images and training checkpoints")
    run.add_argument("--part", choices=("validation", "test"), default="validation", help="images to measure on")
    run.add_argument("--network", choices=NETWORKS, action="append", help="repeatable; all by default")
    run.add_argument("--macs", type=float, action="append", help="shares kept; 0.73, 0.5 and 0.3 by default")
    run.add_argument("--method", choices=(OURS, *PEERS), action="append", help="repeatable; all by default")
    run.add_argument("--draw", type=int, action="append", help="draws of the calibration images, 0 to 4 by default")
    run.add_argument("--images", type=int, default=CALIBRATION, help="number of calibration images")
    run.add_argument("--setting", action="append", default=[], help="setting of cn.Distillation, such as steps=600")
    run.set_defaults(work=run_cells)
    commands.add_parser("page", help="write docs/distillation.md").set_defaults(work=_write_page)
    arguments = parser.parse_args()
    arguments.work(arguments)


def run_cells(arguments: argparse.Namespace) -> None:
    pairs = (text.partition("=") for text in arguments.setting)
    settings = cn.Distillation(**{name: _read(value) for name, _, value in pairs})
    done = {_name_cell(line) for line in read_lines()}
    for network in arguments.network or NETWORKS:
        model, training, parts = load_case(network, arguments)
        part = parts[arguments.part]
        for draw in arguments.draw or DRAWS:
            rows = torch.randperm(len(training), generator=torch.Generator().manual_seed(draw))[: arguments.images]
            subject = Subject(model, training.inputs[rows].contiguous(), training.labels[rows], {})
            shares = UNIT_SHARES if network == PLAIN else arguments.macs or SHARES
            for share, method in product(shares, arguments.method or (OURS, *PEERS)):
                cell = {
                    "harness": HARNESS,
                    "network": network,
                    "units" if network == PLAIN else "macs": share,
                    "method": method,
                    "draw": draw,
                    "images": arguments.images,
                    "part": arguments.part,
                    "settings": settings.to_dict(),
                }
                budget = {name: cell[name] for name in ("macs", "units") if name in cell}
                if _name_cell(cell) not in done:
                    store_line(RESULTS, {**cell, **measure(subject, budget, method, part, settings, draw)})


def measure(
    subject: Subject,
    budget: Mapping[str, float],
    method: str,
    part: LabelledImages,
    settings: cn.Distillation,
    seed: int,
) -> dict[str, Any]:
    """Accuracy before, with only batch norms re-estimated, refitted, and distilled; processor and clock seconds."""
    accuracy = {"before": measure_accuracy(subject.model, part.inputs, part.labels)}
    seconds, elapsed = {}, {}

    def run(name: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result, seconds[name] = clock(work)
        elapsed[name] = round(time.monotonic() - started, 1)
        return result

    plan = run("choosing", partial(choose, subject, budget, method, seed))
    make = partial(cn.prune, subject.model, plan, subject.inputs, seed=seed)
    for name, work in (
        ("batch_norm", lambda: reestimate(make(), subject.inputs)),
        ("least_squares", partial(make, compensate="least_squares")),
        ("distil", partial(make, compensate=settings)),
    ):
        accuracy[name] = measure_accuracy(run(name, work), part.inputs, part.labels)
    return {
        "accuracy": accuracy,
        "processor_seconds": seconds,
        "clock_seconds": elapsed,
        "threads": torch.get_num_threads(),
        "kept": {name: len(units) for name, units in plan.kept.items()},
    }


def choose(subject: Subject, budget: Mapping[str, float], method: str, seed: int) -> cn.Plan:
    """A plan by `cn.search`, which expects refitting; or by another method's importances, ranked globally."""
    if method == OURS:
        return cn.plan(cn.search(subject.model, subject.inputs, **budget, seed=seed))
    frame = score_norms(subject.model, subject.structure)
    values = spread_scores(frame.structure, prefer(method, subject))
    return cn.plan(replace(frame, values_by_layer=values, settings={"method": method}), **budget)


def reestimate(model: nn.Module, inputs: Tensor) -> nn.Module:
    """A copy with batch-norm statistics re-estimated on these inputs."""
    found = copy.deepcopy(model)
    norms = [each for each in found.modules() if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average over batches
        norm.train()
    with torch.no_grad():
        for rows in torch.split(inputs, 250):
            found(rows)
    return found.eval()


def load_case(
    network: str, arguments: argparse.Namespace
) -> tuple[nn.Module, LabelledImages, dict[str, LabelledImages]]:
    """The trained network, the images for calibration, and the images to measure on."""
    if network == PLAIN:
        from quality import CASES, load_images
        from quality import load_network as train_network

        runs = Runs(arguments.cache, arguments.data, cache=arguments.cache)
        data = load_images(CASES[0], runs)
        model = train_network(CASES[0], data, runs, 0, None).eval()
        return model, data.training, {"validation": data.validation, "test": data.test}
    model, look = load_network(network, arguments.checkpoints)
    training, test = load_stored(str(find_data(arguments.data, "cifar10")), cache=arguments.cache)
    rows = torch.arange(len(training))
    first, last, tested = (
        LabelledImages(look(part.inputs), part.labels)
        for part in (training.select(rows[:TRAINED]), training.select(rows[TRAINED:]), test)
    )
    return model, first, {"validation": last, "test": tested}


def load_network(name: str, folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The trained network, and its input normalisation for images in [0, 1]."""
    if name == "vgg16":
        return load_model(name, folder / "vgg16_cifar10.safetensors").eval(), lambda images: images - 0.5
    model = CifarResNet(DEPTHS[name])
    stored = torch.load(folder / f"{name}_akamaster.th", map_location="cpu", weights_only=True)
    model.load_state_dict({key.removeprefix("module."): each for key, each in stored["state_dict"].items()})
    mean, deviation = (torch.tensor(each)[:, None, None] for each in (MEAN, DEVIATION))
    return model.eval(), lambda images: (images - mean) / deviation


def clock(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the processor seconds, which other load on the machine affects least."""
    started = time.process_time()
    return work(), round(time.process_time() - started, 1)


def read_lines() -> list[dict[str, Any]]:
    """For every network and size, the lines of the newest harness it was measured with."""
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    newest: dict[tuple[Any, ...], int] = {}
    for line in lines:
        newest[_name_size(line)] = max(line["harness"], newest.get(_name_size(line), OLDEST_HARNESS))
    return [line for line in lines if line["harness"] == newest[_name_size(line)]]


def _name_size(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in ("network", "macs", "units", "images", "part"))


def _name_cell(line: Mapping[str, Any]) -> str:
    return json.dumps([line.get(name) for name in KEY], sort_keys=True)


def _write_page(arguments: argparse.Namespace) -> None:
    from distillation_page import write_page

    write_page(read_lines())


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()

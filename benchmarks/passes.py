"""Cost of search and refitting, in forward passes over the calibration inputs, and their peak memory.

    python benchmarks/passes.py run --data DIR --resnet20 WEIGHTS --vgg16 WEIGHTS  all cases not stored yet
    python benchmarks/passes.py run ... --only resnet20 --only quick  cases whose names contain these
    python benchmarks/passes.py table                                 stored results as Markdown

Half of the multiply-adds are kept. ResNet-20 and VGG-16 for CIFAR-10 have 1 000 images, and their accuracy is
measured as in ablation.py; the others have random images, 224x224, and untrained weights with batch norms estimated
on a few of them, which suffices to measure cost. With thorough effort the smaller network is distilled, as by
`cn.compress`. Every case runs in a separate process, on one thread, and is a line of benchmarks/results/passes.jsonl:
processor seconds of a pass (the faster of two) and by part, and the peak memory. Memory is allocated as by the
command line tool, which keeps what a stage frees.
Cases that end in a number run the search in that many processes. Lines with a `commit` were measured at that commit,
before later changes; docs/performance.md shows the others.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import critical_neurons as cn
from ablation import CALIBRATION, MEASURED, VALIDATION, Subject, clock, load_subject
from architectures.classic import VGG
from architectures.mobile import mobilenet_v2
from architectures.residual import basic_resnet, bottleneck_resnet
from critical_neurons.cli.memory import reuse_freed_memory
from critical_neurons.core.settings import Compensation
from critical_neurons.io.models import load_model
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.selection.budget_search import Search
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons_reproduction.datasets import load_stored
from passes_page import RESULTS, list_current, list_rows
from storing import SEED, store_line
from timing import Parts, read_peak


class WideVGG(VGG):
    """VGG-16 for ImageNet, with batch norms and three linear layers, the first with 25 088 inputs."""

    def __init__(self) -> None:
        super().__init__("64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M", norm=True)
        self.classifier = nn.Sequential(
            *(nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))
        )


LARGE = {
    "resnet18": lambda: basic_resnet((2, 2, 2, 2)),
    "resnet50": lambda: bottleneck_resnet((3, 4, 6, 3)),
    "mobilenet_v2": mobilenet_v2,
    "vgg16_bn": WideVGG,
}
TRAINED = ("resnet20", "vgg16")
"""Networks trained on CIFAR-10."""

IMAGES = (32, 256)
WORKERS = (1, 2)
"""Numbers of processes for a parallel search, one case each."""

NORMED = 16
"""Images for estimating the batch norms."""

PARTS = {
    "structure": [(Search, "__init__")],
    "covariances": [(LayerwiseSearch, "__init__")],
    "Fisher matrices": [(LayerwiseSearch, "_find_roots")],
    "elimination": [(LayerwiseSearch, "order")],
    "pricing": [(LayerwiseSearch, "price")],
    "drafts": [(LayerwiseSearch, "carry_out"), (LayerwiseSearch, "judge")],
    "bounds": [(LayerwiseSearch, "describe")],
    "refitting": [(cn, "prune")],
}


def list_cases() -> list[str]:
    large = [f"{name}/{images}" for images in IMAGES for name in LARGE]
    trained = [f"{name}/{CALIBRATION}" for name in TRAINED]
    cases = [f"{name}/{effort}" for name in (*trained, *large) for effort in ("quick", "standard")]
    cases += [f"{name}/thorough" for name in trained]
    return [*cases, *(f"resnet20/1000/standard/{count}" for count in WORKERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure the cases that are not stored yet")
    run.add_argument("--data", type=Path, help="folder with cifar10")
    for name in TRAINED:
        run.add_argument(f"--{name}", type=Path, help="weights; without them it is skipped")
    run.add_argument("--only", action="append", default=[], help="part of case names, such as resnet18/32")
    run.add_argument("--case", help=argparse.SUPPRESS)
    commands.add_parser("table", help="print the stored results")
    given = parser.parse_args()
    if given.command == "table":
        print("\n".join(list_rows()))
    elif given.case and given.case.count("/") == 3:
        measure_workers(given.case, given.data, given.resnet20)
    elif given.case:
        measure(given.case, given.data, {name: getattr(given, name) for name in TRAINED})
    else:
        stored = {line["name"] for line in list_current()}
        for name in list_cases():
            if name in stored or not all(part in name for part in given.only):
                continue
            network = name.partition("/")[0]
            if network not in TRAINED or getattr(given, network) is not None:
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                command = [sys.executable, __file__, *sys.argv[1:], "--case", name]
                subprocess.run(command, check=True, env={**os.environ, **threads})


def measure(name: str, data: Path, weights: Mapping[str, Path]) -> None:
    reuse_freed_memory()
    torch.set_num_threads(1)
    network, images, effort = name.split("/")
    subject = load_trained(network, data, weights[network]) if network in TRAINED else None
    model, inputs = (subject.model, subject.inputs) if subject else prepare(network, int(images))
    size = 64 if subject else 8
    with torch.no_grad():
        one_pass = min(clock(lambda: [model(some) for some in inputs.split(size)])[1] for _ in range(2))
    before, load = read_peak(), os.getloadavg()[0]
    compensate: Compensation = "distil" if effort == "thorough" else "least_squares"
    with follow() as parts:
        scores, searching = clock(lambda: cn.search(model, inputs, macs=0.5, effort=effort))
        smaller, refitting = clock(lambda: cn.prune(model, cn.plan(scores), inputs, compensate=compensate))
    _, inspecting = clock(lambda: cn.inspect(model, inputs))
    found: dict[str, Any] = {
        "pass_seconds": round(one_pass, 2),
        "inspect_passes": round(inspecting / one_pass, 2),
        "search_seconds": round(searching, 2),
        "refit_seconds": round(refitting, 2),
        "passes": round((searching + refitting) / one_pass, 1),
        "parts": parts.seconds,
        "peak_megabytes": round(read_peak()),
        "peak_megabytes_before": round(before),
        "load": round(load, 1),
    }
    if subject:
        found["accuracy"] = round(measure_accuracy(smaller, *subject.validation), 4)
    store_line(RESULTS, {"name": name, **found})


def measure_workers(name: str, data: Path, weights: Path) -> None:
    """A parallel search: wall-clock seconds, and processor seconds of the calling process."""
    torch.set_num_threads(1)
    network, _, effort, count = name.split("/")
    subject, load, began = load_subject(network, 0, data, weights), os.getloadavg()[0], time.monotonic()
    workers = cn.Workers(jobs=int(count))
    scores, own = clock(lambda: cn.search(subject.model, subject.inputs, macs=0.5, effort=effort, workers=workers))
    seconds = {"clock_seconds": round(time.monotonic() - began, 1), "own_seconds": round(own, 1)}
    kept = hashlib.sha256(repr(scores.to_dict()["scores"]).encode()).hexdigest()[:12]
    store_line(RESULTS, {"name": name, "workers": int(count), **seconds, "scores": kept, "load": round(load, 1)})


def load_trained(network: str, data: Path, weights: Path) -> Subject:
    if network == "resnet20":
        return load_subject(network, 0, data, weights)
    training, _ = load_stored(data / "cifar10")
    rows = torch.randperm(len(training) - VALIDATION, generator=torch.Generator().manual_seed(SEED))[:CALIBRATION]
    held_out = training.select(torch.arange(len(training) - VALIDATION, len(training))[:MEASURED])
    model = load_model(network, weights).eval()
    return Subject(model, training.inputs[rows] - 0.5, (held_out.inputs - 0.5, held_out.labels))


def prepare(network: str, images: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(SEED)
    model, inputs = LARGE[network](), torch.randn(images, 3, 224, 224)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # cumulative average over batches
    with torch.no_grad():
        for some in inputs[:NORMED].split(8):
            model.train()(some)
    return model.eval(), inputs


@contextmanager
def follow() -> Iterator[Parts]:
    parts = Parts()
    patches = [
        patch.object(owner, name, parts.follow(part, getattr(owner, name)))
        for part, seams in PARTS.items()
        for owner, name in seams
    ]
    for each in patches:
        each.start()
    try:
        yield parts
    finally:
        for each in patches:
            each.stop()


if __name__ == "__main__":
    main()

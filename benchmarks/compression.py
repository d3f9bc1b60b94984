"""Cost and effect of compression: a trained VGG-16 at half its MACs, and a small network with refitted weights.

python benchmarks/compression.py --vgg16 WEIGHTS --cifar10 FOLDER     half the MACs, all steps
python benchmarks/compression.py --fashion FOLDER                     784-300-100-10, most units removed
python benchmarks/compression.py --page                               docs/compression.md from the stored results
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.markdown import format_table
from critical_neurons.io.data import Look, load_batch
from critical_neurons.io.models import load_model
from critical_neurons.removal.metrics import measure_accuracy
from storing import SEED, store_line

RESULTS = Path(__file__).parent / "results" / "compression.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "compression.md"
VGG = "vgg16, half the multiply-adds"
METHODS = ("none", "bias", "least_squares")
CALIBRATION = 1000
KEPT = (0.5, 0.4, 0.3, 0.2)
RANDOM_DRAWS = 5
EPOCHS, BATCH_SIZE, LEARNING_RATE = 20, 128, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vgg16", help="trained weights of the built-in vgg16, for inputs x / 255 - 0.5")
    parser.add_argument("--cifar10", help="folder or id of CIFAR-10")
    parser.add_argument("--fashion", help="folder or id of Fashion-MNIST")
    parser.add_argument("--page", action="store_true", help="write docs/compression.md from the stored results")
    arguments = parser.parse_args()
    if arguments.vgg16:
        compress_vgg(arguments.vgg16, arguments.cifar10)
    if arguments.fashion:
        refit_small(arguments.fashion)
    if arguments.page:
        write_page()


def compress_vgg(weights: str, data: str) -> None:
    """The steps of `cn.compress(formulation="linearised")`, each timed; peak memory is read after refitting."""
    look = Look(mean=(0.5,), std=(1.0,))
    inputs, labels = load_batch(data, per_class=CALIBRATION // 10, seed=SEED, look=look)
    test = load_batch(data, split="test", look=look)
    model = load_model("vgg16", weights)
    scored = [int((labels == label).nonzero()[0]) for label in range(10)]
    scores, scoring = clock(
        lambda: cn.score(model, inputs[scored], labels[scored], formulation="linearised", budget=cn.Budget(macs=0.5))
    )
    plan = cn.plan(scores)
    smaller, refitting = clock(lambda: cn.prune(model, plan, inputs, compensate="least_squares"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    others = {
        name: measure_accuracy(each, *test)
        for name, each in {
            "none": cn.prune(model, plan, inputs),
            "bias": cn.prune(model, plan, inputs, compensate="bias"),
            "random, least_squares": cn.prune(model, plan.random(SEED), inputs, compensate="least_squares"),
        }.items()
    }
    comparison = cn.compare(model, smaller, *test, calibration=inputs)
    store_line(
        RESULTS,
        {
            "case": VGG,
            "images": {"scored": len(scored), "refitted": len(inputs)},
            "seconds": {"scoring": scoring, "refitting": refitting},
            "peak_gib": round(peak, 2),
            "accuracy_of_others": others,
            "comparison": comparison.to_dict(),
        },
    )


def refit_small(data: str) -> None:
    look = Look(channels=1, resize=28)
    inputs, labels = load_batch(data, per_class=5000, seed=SEED, look=look)
    test = load_batch(data, split="test", look=look)
    torch.manual_seed(SEED)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    )
    train(model, inputs, labels)
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(labels), generator=generator)[:CALIBRATION]
    calibration, scored = inputs[chosen], chosen[:100]
    before = measure_accuracy(model, *test)
    for kept in KEPT:
        scores = cn.score(
            model,
            inputs[scored],
            labels[scored],
            formulation="linearised",
            budget=cn.Budget(units=kept),
            solver=cn.Solver(seed=SEED),
        )
        plan = cn.plan(scores)
        draws = [plan.random(seed) for seed in range(RANDOM_DRAWS)]
        accuracies = {
            method: measure_accuracy(cn.prune(model, plan, calibration, compensate=method), *test)
            for method in METHODS
        }
        by_chance = {
            method: sum(
                measure_accuracy(cn.prune(model, draw, calibration, compensate=method), *test) for draw in draws
            )
            / RANDOM_DRAWS
            for method in METHODS
        }
        store_line(
            RESULTS,
            {
                "case": f"784-300-100-10, {kept:.0%} of the units kept",
                "images": {"scored": len(scored), "refitted": CALIBRATION},
                "kept": kept,
                "before": before,
                "accuracy": accuracies,
                "random": by_chance,
            },
        )


def train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    optimiser = torch.optim.Adam(model.parameters())
    steps = EPOCHS * -(-len(labels) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(BATCH_SIZE):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
            schedule.step()


def clock(action: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    result = action()
    return result, round(time.perf_counter() - started, 1)


def write_page() -> None:
    newest = {}
    for line in RESULTS.read_text().splitlines():
        record = json.loads(line)
        newest[record["case"]] = record
    small = sorted((record for record in newest.values() if "kept" in record), key=lambda record: -record["kept"])
    last = small[-1]
    lines = [
        "# Cost and effect of compression",
        "",
        "Generated by `python benchmarks/compression.py --page` from `benchmarks/results/compression.jsonl`;",
        f"measured by the same program on {last['date']}, {last['machine']}, versions {last['versions']}.",
        "",
        *(_describe_vgg(newest[VGG]) if VGG in newest else []),
        "## 784-300-100-10 on Fashion-MNIST, the same share of units removed in both hidden layers",
        "",
        f"Test accuracy; before: {small[0]['before']:.2%}. Scored on {small[0]['images']['scored']} images, refitted "
        f"on {small[0]['images']['refitted']}; random: mean of {RANDOM_DRAWS} draws. A single network: differences "
        "of half a point are not significant.",
        "",
    ]
    header = ("removed", "scores", "scores, bias", "scores, least squares", "random", "random, bias")
    rows = []
    for record in small:
        cells = [record[whose][method] for whose in ("accuracy", "random") for method in METHODS]
        rows.append((f"{1 - record['kept']:.0%}", *(f"{cell:.2%}" for cell in cells)))
    lines += format_table((*header, "random, least squares"), rows, numbers=range(1, 7))
    PAGE.write_text("\n".join(lines) + "\n")


def _describe_vgg(vgg: Mapping[str, Any]) -> list[str]:
    comparison = cn.Comparison.from_dict(vgg["comparison"])
    others = vgg["accuracy_of_others"]
    return [
        "## VGG-16 on CIFAR-10, at most half the multiply-adds, no fine-tuning",
        "",
        f"Scored on {vgg['images']['scored']} images (linearised, one program for the whole network, "
        f"{vgg['seconds']['scoring']} s), refitted by least squares on {vgg['images']['refitted']} "
        f"({vgg['seconds']['refitting']} s); peak memory {vgg['peak_gib']} GiB.",
        "",
        *format_table(("", "before", "after", ""), comparison.rows, numbers=range(1, 4)),
        "",
        *(f"* {note}" for note in comparison.notes),
        "",
        f"The same plan without refitting: {others['none']:.2%}; with biases and batch-norm statistics alone: "
        f"{others['bias']:.2%}. The same number of units per layer removed at random, refitted by least squares: "
        f"{others['random, least_squares']:.2%}"
        + (
            ": once weights are refitted, the choice of units by these scores is no better than chance here."
            if others["random, least_squares"] >= comparison.after.accuracy
            else "."
        ),
        "",
    ]


if __name__ == "__main__":
    main()

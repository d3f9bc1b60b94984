"""The accuracy left at a given size, without fine-tuning: a search against choices by weights and activations.

python benchmarks/quality.py --fashion FOLDER      784-300-100-10, trained anew for every seed
python benchmarks/quality.py --model NET WEIGHTS --data FOLDER      a built-in network for images of 32x32 pixels

Everything is measured on validation images: those of the training split that took no part in anything else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import critical_neurons as cn
from compression import clock, train
from critical_neurons.experiments import baselines
from critical_neurons.experiments.data import load_dataset
from critical_neurons.loading import Look, load_batch, load_model
from critical_neurons.measuring import measure_accuracy
from speed import store_line

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
COMPENSATIONS = ("none", "least_squares")
CALIBRATION = 1000
KEPT = (0.5, 0.4, 0.3, 0.2)
RANDOM_DRAWS = 5
SEEDS = 3
PER_CLASS, TRAINED = 6000, 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", help="folder or id of Fashion-MNIST")
    parser.add_argument("--model", nargs=2, metavar=("NET", "WEIGHTS"), help="a built-in network and its weights")
    parser.add_argument("--data", help="folder or id of the data set it was trained on")
    arguments = parser.parse_args()
    if arguments.fashion:
        for seed in range(SEEDS):
            compare_small(arguments.fashion, seed)
    if arguments.model:
        name, weights = arguments.model
        data = load_dataset(arguments.data)
        inputs, labels = draw(data.training.inputs, data.training.labels, 0)
        validation = (data.validation.inputs, data.validation.labels)
        compare_choices(f"{name}, {Path(arguments.data).name}", load_model(name, weights), inputs, labels, validation)


def compare_small(source: str, seed: int) -> None:
    inputs, labels = load_batch(source, per_class=PER_CLASS, seed=0, look=Look(channels=1, resize=28))
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs[shuffled].float(), labels[shuffled]
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    )
    train(model, inputs[:TRAINED], labels[:TRAINED])
    calibration = draw(inputs[:TRAINED], labels[:TRAINED], seed)
    compare_choices("784-300-100-10", model, *calibration, (inputs[TRAINED:], labels[TRAINED:]), seed)


def draw(inputs: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 + seed))[:CALIBRATION]
    return inputs[rows], labels[rows]


def compare_choices(
    case: str, model: nn.Module, inputs: Tensor, labels: Tensor, validation: tuple[Tensor, Tensor], seed: int = 0
) -> None:
    """Points of accuracy lost by every choice at the same counts, without and with refitting."""
    model.eval()
    before = measure_accuracy(model, *validation)

    def lose(plan: cn.Plan, compensate: str) -> float:
        return 100 * (before - measure_accuracy(cn.prune(model, plan, inputs, compensate=compensate), *validation))

    for kept in KEPT:
        for compensate in COMPENSATIONS:
            scores, seconds = clock(partial(cn.search, model, inputs, units=kept, compensate=compensate, seed=seed))
            plan = cn.plan(scores)
            losses = {"search": lose(plan, compensate)}
            for name, others in list_others(plan, model, inputs, labels):
                losses[name] = float(np.mean([lose(other, compensate) for other in others]))
            print(case, seed, kept, compensate, {name: round(loss, 2) for name, loss in losses.items()}, flush=True)
            store_line(
                RESULTS,
                {
                    "case": case,
                    "seed": seed,
                    "kept": kept,
                    "compensate": compensate,
                    "before": before,
                    "points_lost": losses,
                    "seconds": seconds,
                },
            )


def list_others(
    plan: cn.Plan, model: nn.Module, inputs: Tensor, labels: Tensor
) -> Iterator[tuple[str, list[cn.Plan]]]:
    yield "random", [plan.random(seed) for seed in range(RANDOM_DRAWS)]
    yield "L1", [baselines.plan_by_norm(plan, model, norm=1)]
    yield "L2", [baselines.plan_by_norm(plan, model, norm=2)]
    yield "SNIP by unit", [baselines.plan_by_sensitivity(plan, model, inputs, labels)]
    yield "mean activation", [baselines.plan_by_activation(plan, model, inputs)]


if __name__ == "__main__":
    main()

"""The exact integer program: a bias-free 784-40-20-10 network, one image per class, scores 0 or 1; the gap reached.

python benchmarks/exact.py --data FOLDER [--seconds 300] [--solver highs]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.loading import Look, load_batch
from critical_neurons.measuring import measure_accuracy
from speed import SEED, store_line, train

RESULTS = Path(__file__).parent / "results" / "exact.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder or id of a Hugging Face data set of 28x28 images")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--solver", default="highs")
    arguments = parser.parse_args()
    inputs, labels = load_batch(arguments.data, per_class=500, seed=SEED, look=Look(channels=1, resize=28))
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 40, bias=False),
        nn.ReLU(),
        nn.Linear(40, 20, bias=False),
        nn.ReLU(),
        nn.Linear(20, 10, bias=False),
    )
    held_out = np.random.default_rng(SEED).permutation(len(labels)) < len(labels) // 3
    train(model, inputs[~held_out], labels[~held_out])
    chosen = [int(np.flatnonzero(held_out & (labels.numpy() == label))[0]) for label in range(10)]
    scores = cn.score(
        model,
        inputs[chosen],
        labels[chosen],
        formulation="exact",
        binary=True,
        solver=arguments.solver,
        time_limit=arguments.seconds,
        progress=lambda step: print(f"{step.seconds:7.1f} s  {step.objective}  {step.bound}  {step.gap}", flush=True),
    )
    smaller = cn.prune(model, cn.plan(scores, threshold=0.5), inputs[chosen])
    store_line(
        RESULTS,
        {
            "case": "exact 784-40-20-10",
            "data": Path(arguments.data).name,
            "solver": arguments.solver,
            "time_limit": arguments.seconds,
            "status": scores.status.value,
            "objective": scores.objective,
            "bound": scores.bound,
            "gap": scores.gap,
            "seconds": round(scores.seconds, 1),
            "sizes": dict(scores.sizes),
            "units_kept": int(scores.per_unit.sum()),
            "held_out_accuracy": [
                measure_accuracy(each, inputs[held_out], labels[held_out]) for each in (model, smaller)
            ],
        },
    )


if __name__ == "__main__":
    main()

"""Lossless removal on the box [0, 1]^n: fully connected networks trained with an L1 penalty, on one thread.

python benchmarks/lossless.py run --mnist FOLDER --cifar10 FOLDER --models FOLDER [--cases mnist:200:0.0002 ...]
python benchmarks/lossless.py page     docs/lossless.md from the stored results

A case is data:width:penalty, a network of two hidden layers of that width. Trained networks are kept in --models.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.core.stability import State
from critical_neurons.io.data import load_batch
from critical_neurons.removal.metrics import measure_accuracy
from lossless_page import write_page
from storing import SEED, store_line

RESULTS = Path(__file__).parent / "results" / "lossless.jsonl"
EPOCHS = {"mnist": 5, "cifar10": 6}
PEAK_RATE = 3e-3
BATCH = 128
KNOWN = 2000
"""Training images whose forward passes first refute that units are stable."""
TIME_LIMIT = 300.0
CASES = (
    *("mnist:100:0.00005", "mnist:100:0.0002", "mnist:100:0.0005"),
    *("mnist:200:0.0001", "mnist:200:0.0002", "mnist:200:0.0005"),
    *("cifar10:400:0.0002", "cifar10:400:0.0005"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--mnist", help="folder or id of the data set")
    parser.add_argument("--cifar10", help="folder or id of the data set")
    parser.add_argument("--models", type=Path, help="folder of trained networks; missing ones are trained")
    parser.add_argument("--cases", nargs="+", default=CASES)
    arguments = parser.parse_args()
    if arguments.what == "page":
        write_page(RESULTS)
        return
    torch.set_num_threads(1)
    cn.lossless(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), ([0.0, 0.0], [1.0, 1.0]))  # imports
    for case in arguments.cases:
        name, width, penalty = case.split(":")
        run(name, getattr(arguments, name), int(width), float(penalty), arguments.models)


def run(name: str, folder: str, width: int, penalty: float, models: Path) -> None:
    training, test = (load_flat(folder, split) for split in ("train", "test"))
    model = find_model(models / f"{name}-{width}-{penalty:g}.pt", name, width, penalty, training)
    model = model.double()
    started = time.process_time()
    found = cn.lossless(model, (0.0, 1.0), inputs=training[0][:KNOWN], time_limit=TIME_LIMIT)
    seconds = time.process_time() - started
    states = found.stability.count()
    methods = found.stability.count_methods()
    result = {
        "case": f"{name} {width}-{width}",
        "penalty": penalty,
        "units": len(found.stability.units),
        **{state.value: states[state] for state in State},
        "methods": dict(methods),
        "programs": sum(unit.programs for unit in found.stability.units),
        "removed": sum(change.units - change.kept for change in found.stability.changes),
        "merged": sum(change.merged for change in found.stability.changes),
        "collapsed": sum(change.collapsed for change in found.stability.changes),
        "parameters": found.parameters,
        "processor_seconds": round(seconds, 1),
        "difference": compare(model, found.model, test[0].double()),
        "difference_single": compare(model.float(), found.model.float(), test[0]),
        "test_accuracy": [measure_accuracy(each, *test) for each in (model, found.model)],
        "stopped": found.stability.stopped,
    }
    store_line(RESULTS, result)


@cache
def load_flat(folder: str, split: str) -> tuple[Tensor, Tensor]:
    inputs, labels = load_batch(folder, split=split)
    return inputs.flatten(1), labels


def find_model(path: Path, name: str, width: int, penalty: float, training: tuple[Tensor, Tensor]) -> nn.Module:
    size = training[0].shape[1]
    torch.manual_seed(SEED)
    model = nn.Sequential(
        *(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    )
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    train(model, *training, EPOCHS[name], penalty)
    path.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, penalty: float) -> None:
    """Cross entropy plus the penalty times the sum of all absolute weights."""
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    steps = epochs * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_RATE, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            size = sum(values.abs().sum() for values in model.parameters() if values.ndim > 1)
            (loss + penalty * size).backward()
            optimiser.step()
            schedule.step()


def compare(model: nn.Module, smaller: nn.Module, inputs: Tensor) -> float:
    """The largest difference of an output, relative to the largest output, on images and on corners."""
    corners = torch.randint(0, 2, (1000, inputs.shape[1]), generator=torch.Generator().manual_seed(SEED))
    points = torch.cat([inputs[:1000], corners.to(inputs)])
    with torch.no_grad():
        before, after = (each(points) for each in (model, smaller))
    return float((before - after).abs().max() / before.abs().max())


if __name__ == "__main__":
    main()

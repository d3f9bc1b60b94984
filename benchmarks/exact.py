"""The exact integer program: bias-free networks 784-n-n/2-10, one image per class, scores 0 or 1; the gaps reached.

python benchmarks/exact.py --data FOLDER [--widths 10 20 40] [--searches tree gates] [--seconds 300] [--solver highs]

Searches: `tree`, what score does: branch and bound on the scores with rows of the convex hull; `no hulls`, without
those; `no incumbents`, without better masks by trial; `gates`, the solver's own branch and bound on scores and gates.

python benchmarks/exact.py --page     the table of docs/exact.md from the stored results
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.loading import Look, load_batch
from critical_neurons.measuring import measure_accuracy
from storing import SEED, store_line

RESULTS = Path(__file__).parent / "results" / "exact.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "exact.md"
HEAD = "| network | test accuracy | search | objective, unpruned | best | bound | gap | seconds |"
EPOCHS = 12
SEARCHES = ("tree", "no hulls", "no incumbents", "gates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table of docs/exact.md")
    parser.add_argument("--data", help="folder or id of a Hugging Face data set of 28x28 images")
    parser.add_argument("--widths", type=int, nargs="+", default=[10, 20, 40], help="units of the first hidden layer")
    parser.add_argument("--searches", nargs="+", default=["tree"], choices=SEARCHES)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--solver", default="highs")
    arguments = parser.parse_args()
    if arguments.page:
        write_table()
        return
    look = Look(channels=1, resize=28)
    inputs, labels = load_batch(arguments.data, split="train", look=look)
    held_out = load_batch(arguments.data, split="test", look=look)
    images = load_batch(arguments.data, per_class=1, seed=SEED, look=look)
    for width in arguments.widths:
        model = train(width, inputs, labels)
        for search in arguments.searches:
            found = solve(model, images, search, arguments.solver, arguments.seconds)
            case = {"case": f"exact 784-{width}-{width // 2}-10", "data": Path(arguments.data).name}
            store_line(RESULTS, {**case, **found, "test_accuracy": measure_accuracy(model, *held_out)})


def train(width: int, inputs: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, width // 2, bias=False),
        nn.ReLU(),
        nn.Linear(width // 2, 10, bias=False),
    )
    optimiser = torch.optim.RMSprop(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [2 * EPOCHS // 3], 0.2)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        schedule.step()
    return model


def solve(
    model: nn.Module, images: tuple[Tensor, Tensor], search: str, solver: str, seconds: float
) -> dict[str, object]:
    inputs, labels = images[0].double().numpy(), images[1].numpy()
    network = cn.read_network(model, images[0])
    bounds = cn.bound_network(network, inputs, pruned=True)
    program = cn.encode(network, bounds, labels, formulation="exact", binary=True)
    if search == "no hulls":
        assert program.branching is not None
        program = replace(program, branching=replace(program.branching, hulls=None))
    elif search == "no incumbents":
        program = replace(program, improve=None)
    elif search == "gates":
        program = replace(program, branching=None)
    assert program.unpruned is not None
    solution = cn.solve(program, solver=solver, time_limit=seconds)
    assert solution.point is not None
    scores = np.split(solution.point[program.blocks["score"]], np.cumsum(network.groups)[:-1])
    return {
        "search": search,
        "solver": solver,
        "time_limit": seconds,
        "status": solution.status.value,
        "unpruned": program.value(program.unpruned),
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "seconds": round(solution.seconds, 1),
        "sizes": dict(solution.sizes),
        "units_kept": [round(float(part.sum())) for part in scores],
    }


def write_table() -> None:
    """The newest line of every network and search, in place of the table there is."""
    newest = {}
    for line in RESULTS.read_text().splitlines():
        record = json.loads(line)
        if "search" in record:
            newest[record["case"], record["search"]] = record
    rows = [
        f"| {case.removeprefix('exact ')} | {record['test_accuracy']:.1%} | {search} | {record['unpruned']:.4f} "
        f"| {record['objective']:.4f} | {record['bound']:.4f} | {record['gap']:.2g} | {record['seconds']:.1f}"
        f"{'' if record['status'] == 'optimal' else ', stopped'} |"
        for (case, search), record in sorted(newest.items(), key=lambda item: (item[1]["sizes"]["columns"], item[0]))
    ]
    text = PAGE.read_text()
    before, _, after = text.partition(HEAD)
    rest = after[after.index("\n\n") :]
    PAGE.write_text("\n".join([before + HEAD, "|---|---|---|---|---|---|---|---|", *rows]) + rest)


if __name__ == "__main__":
    main()

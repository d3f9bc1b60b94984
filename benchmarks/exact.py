"""The exact integer program: bias-free networks 784-n-n/2-10, one image per class, scores 0 or 1; the gaps reached.

python benchmarks/exact.py --data FOLDER [--widths 10 20 40] [--searches tree gates] [--seconds 300] [--threads 1]

Searches: `dual tree`, the default of score: branch and bound on the scores with Lagrangian bounds; `tree`, with
linear programs and convex-hull cuts, as for networks of more layers; `no hulls`, without these cuts; `no incumbents`,
without the primal heuristic; `gates`, the solver's own branch and bound on scores and gates.

python benchmarks/exact.py --data FOLDER --incumbents search none [--widths 20 40] [--seconds 60]

With a budget of half the units of every layer instead of the sparsity term: `search` warm-starts the exact program
with the plan that `cn.search` finds on a thousand images; `none` does not.

python benchmarks/exact.py --page     the tables of docs/exact.md from the stored results
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.core.markdown import replace_table
from critical_neurons.io.data import Look, load_batch
from critical_neurons.removal.metrics import measure_accuracy
from storing import SEED, store_line

RESULTS = Path(__file__).parent / "results" / "exact.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "exact.md"
HEADER = ("network", "test accuracy", "search", "objective, unpruned", "best", "bound", "gap", "seconds")
JUDGED_HEADER = (
    *("network", "incumbent", "its loss", "best", "bound", "gap of the incumbent", "gap"),
    "processor seconds",
)
EPOCHS = 12
BUDGET = {"units": 0.5}
SEARCHED = 1000
"""Images for the search, class-balanced."""
SEARCHES = ("dual tree", "tree", "no hulls", "no incumbents", "gates")
INCUMBENTS = ("search", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the tables of docs/exact.md")
    parser.add_argument("--data", help="folder or id of a Hugging Face data set of 28x28 images")
    parser.add_argument("--widths", type=int, nargs="+", default=[10, 20, 40], help="units of the first hidden layer")
    parser.add_argument("--searches", nargs="+", default=["dual tree"], choices=SEARCHES)
    parser.add_argument("--incumbents", nargs="+", choices=INCUMBENTS, help="with a budget; instead of --searches")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--solver", default="highs")
    parser.add_argument("--threads", type=int, default=1, help="of the solver; processes, in the dual tree")
    arguments = parser.parse_args()
    if arguments.page:
        write_tables()
        return
    look = Look(channels=1, resize=28)
    inputs, labels = load_batch(arguments.data, split="train", look=look)
    held_out = load_batch(arguments.data, split="test", look=look)
    images = load_batch(arguments.data, per_class=1, seed=SEED, look=look)
    for width in arguments.widths:
        model = train(width, inputs, labels)
        case = {"case": f"exact 784-{width}-{width // 2}-10", "data": Path(arguments.data).name}
        accuracy = {"test_accuracy": measure_accuracy(model, *held_out)}
        if arguments.incumbents:
            searched, _ = load_batch(arguments.data, per_class=SEARCHED // 10, seed=SEED, look=look)
            for incumbent in arguments.incumbents:
                settings = cn.Solver(time_limit=arguments.seconds, threads=arguments.threads)
                found = judge(model, images, searched if incumbent == "search" else None, settings)
                store_line(RESULTS, {**case, "incumbent": incumbent, **found, **accuracy})
            continue
        for search in arguments.searches:
            settings = cn.Solver(arguments.solver, time_limit=arguments.seconds, threads=arguments.threads)
            found = solve(model, images, search, settings)
            store_line(RESULTS, {**case, **found, **accuracy})


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


def solve(model: nn.Module, images: tuple[Tensor, Tensor], search: str, solver: cn.Solver) -> dict[str, object]:
    inputs, labels = images[0].double().numpy(), images[1].numpy()
    network = cn.read_network(model, images[0])
    bounds = cn.bound_network(network, inputs, pruned=True)
    program = cn.encode(network, bounds, labels, formulation="exact", binary=True)
    assert program.branching is not None
    if search != "dual tree":
        program = replace(program, branching=replace(program.branching, nodes=None))
    if search == "no hulls":
        program = replace(program, branching=replace(program.branching, nodes=None, hulls=None))
    elif search == "no incumbents":
        program = replace(program, improve=None)
    elif search == "gates":
        program = replace(program, branching=None)
    assert program.unpruned is not None
    started = count_processor_seconds()
    solution = cn.solve(program, solver)
    assert solution.point is not None
    scores = np.split(solution.point[program.blocks["score"]], np.cumsum(network.group_sizes)[:-1])
    return {
        "search": search,
        "solver": solver.name,
        "threads": solver.threads,
        "time_limit": solver.time_limit,
        "status": solution.status.value,
        "unpruned": program.value(program.unpruned),
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "seconds": round(solution.seconds, 1),
        "processor_seconds": round(count_processor_seconds() - started, 1),
        "sizes": dict(solution.sizes),
        "units_kept": [round(float(part.sum())) for part in scores],
    }


def count_processor_seconds() -> float:
    """Of this process and those that it started and that have ended."""
    return sum(os.times()[:4])


def judge(
    model: nn.Module, images: tuple[Tensor, Tensor], searched: Tensor | None, solver: cn.Solver
) -> dict[str, object]:
    """The exact program with the budget, warm-started by a search on the images `searched`, if given."""
    plan = None if searched is None else cn.plan(cn.search(model, searched, **BUDGET, compensate="none"))
    started = count_processor_seconds()
    scores = cn.score(
        model,
        *images,
        formulation=cn.Exact(binary=True, incumbent=plan),
        budget=cn.Budget(**BUDGET),
        solver=solver,
    )
    given = scores.incumbent
    return {
        "budget": BUDGET,
        "threads": solver.threads,
        "time_limit": solver.time_limit,
        "status": scores.status.value,
        "given": given and given.objective,
        "given_gap": given and given.gap,
        "objective": scores.objective,
        "bound": scores.bound,
        "gap": scores.gap,
        "seconds": round(scores.seconds, 1),
        "processor_seconds": round(count_processor_seconds() - started, 1),
        "sizes": dict(scores.sizes),
        "units_kept": [round(float(values.sum())) for values in scores.values()],
    }


def write_tables() -> None:
    """Rewrite the tables of docs/exact.md: the newest line per network and search, and per network and incumbent."""
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    page = replace_table(PAGE.read_text(), HEADER, [lay_out(*item) for item in find_newest(records, "search")])
    judged = [lay_out_judged(*item) for item in find_newest(records, "incumbent")]
    PAGE.write_text(replace_table(page, JUDGED_HEADER, judged))


def find_newest(records: list[dict[str, Any]], key: str) -> list[tuple[str, dict[str, Any]]]:
    newest = {(record["case"], record[key], count_threads(record)): record for record in records if key in record}
    ordered = sorted(newest.items(), key=lambda item: (item[1]["sizes"]["columns"], item[0]))
    return [(case.removeprefix("exact "), record) for (case, *_), record in ordered]


def lay_out(case: str, record: dict[str, Any]) -> list[str]:
    found = (f"{record[name]:.4f}" for name in ("unpruned", "objective", "bound"))
    accuracy, gap = f"{record['test_accuracy']:.1%}", f"{record['gap']:.2g}"
    clock = "processor_seconds" if "processor_seconds" in record and count_threads(record) == 1 else "seconds"
    return [case, accuracy, record["search"], *found, gap, tell_seconds(record, clock)]


def lay_out_judged(case: str, record: dict[str, Any]) -> list[str]:
    given, gap = (
        "" if record[name] is None else format(record[name], form)
        for name, form in (("given", ".4f"), ("given_gap", ".2g"))
    )
    found = (f"{record[name]:.4f}" for name in ("objective", "bound"))
    seconds = tell_seconds(record, "processor_seconds")
    return [case, record["incumbent"], given, *found, gap, f"{record['gap']:.2g}", seconds]


def tell_seconds(record: dict[str, Any], clock: str = "seconds") -> str:
    cores = "" if count_threads(record) == 1 else f", {count_threads(record)} cores"
    return f"{record[clock]:.1f}{cores}{'' if record['status'] == 'optimal' else ', stopped'}"


def count_threads(record: dict[str, Any]) -> int:
    return int(record.get("threads", 1))


if __name__ == "__main__":
    main()

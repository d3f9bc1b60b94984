"""Effect of the calibration images on a search: which, how many, all at once or per class; basis for the defaults.

    python benchmarks/choosing_data.py run --data DIR --runs DIR                      every cell
    python benchmarks/choosing_data.py run ... --only lenet5/seed-0 --only by-class   cells whose names contain these
    python benchmarks/choosing_data.py page                                           docs/choice-of-data.md

DIR of --data holds fashion_mnist. Trained networks are kept in DIR of --runs and shared with
benchmarks/quality.py. Accuracy is measured on validation images only. A cell is a network, a seed, a choice of images
and a compensation; it is stored as one line of benchmarks/results/choosing_data.jsonl when it is done, and skipped
from then on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import critical_neurons as cn
from choices import CHOICES, Choice
from choosing_data_page import write_page
from critical_neurons.core.environment import digest_source
from critical_neurons.core.scores import average_scores
from critical_neurons.core.settings import Compensation
from critical_neurons.errors import CriticalNeuronsError
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.experiments.cells import select_cells
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.store import Cell, Store
from quality import (
    COMPENSATIONS,
    PLAIN,
    RESULTS,
    SEEDS,
    Case,
    clock,
    draw_calibration,
    load_images,
    load_network,
    report_epoch,
)

PAGE = Path(__file__).parent.parent / "docs" / "choice-of-data.md"
TABLE = "choosing_data"
VERSION = 1
"""Incremented when the same settings would give another result."""

REMOVED = 0.7
BATCH_SIZE = 512
CASES = (Case(PLAIN, "fashion", SEEDS, stored=True), Case("lenet5", "fashion", SEEDS[:1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure the cells that are not stored yet")
    run.add_argument("--data", required=True, type=Path, help="folder with fashion_mnist")
    run.add_argument("--runs", required=True, type=Path, help="folder of trained networks")
    run.add_argument("--only", action="append", default=[], help="parts of cell names, such as lenet5/by-class")
    run.add_argument("--again", action="store_true", help="repeat stored cells; the last line of a cell counts")
    commands.add_parser("page", help="write docs/choice-of-data.md from the stored results")
    arguments = parser.parse_args()
    store = Store(RESULTS)
    listed = {cell: case for case in CASES for cell in list_cells(case, CHOICES)}
    try:
        if arguments.command == "page":
            write_page(store.find_all(TABLE), list(listed), PAGE)
            return
        chosen = select_cells(listed, arguments.only)
        missing = chosen if arguments.again else store.find_missing(chosen)
        print(f"{len(missing)} of {len(chosen)} cells to measure", flush=True)
        runs = Runs(arguments.runs, arguments.data, on_epoch=report_epoch)
        failed = []
        for case in CASES:
            failed += run_cells(case, [cell for cell in missing if listed[cell] is case], store, runs)
    except CriticalNeuronsError as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


def list_cells(case: Case, choices: Sequence[Choice]) -> list[Cell]:
    """Grouped by seed."""
    cells = []
    for seed, choice, compensate in product(case.seeds, choices, COMPENSATIONS):
        settings = {
            "harness": VERSION,
            "network": case.network,
            "data": case.data,
            "seed": seed,
            "choice": vars(choice),
            "removed": REMOVED,
            "compensate": compensate,
            "measured": case.measured,
        }
        cells.append(Cell(TABLE, f"{case.data}/{case.network}/seed-{seed}/{choice.name}/{compensate}", settings))
    return cells


def run_cells(case: Case, cells: Collection[Cell], store: Store, runs: Runs) -> list[str]:
    """Measure cells of a case and store each as it is done. Returns the failures, with reasons."""
    failed: list[str] = []
    if not cells:
        return failed
    data = load_images(case, runs)
    for seed, mine in groupby(cells, key=lambda cell: cell.settings["seed"]):
        trial = Trial(load_network(case, data, runs, seed, None), data, seed, case.measured)
        for cell in mine:
            choice = Choice(**cell.settings["choice"])
            try:
                result, seconds = clock(partial(trial.run, choice, cell.settings["compensate"]))
            except CriticalNeuronsError as error:
                failed.append(f"{cell.name}: {error}")
                continue
            result["seconds"]["cell"] = seconds
            store.add(cell, result)
            before, left = 100 * result["before"], 100 * result["accuracy"]
            print(f"{cell.name}: {before:.2f}, then {left:.2f}, {seconds} s", flush=True)
    return failed


class Trial:
    """A trained network; what does not depend on the choice is computed once. `measured`: number of validation images
    used, the first ones; None for all."""

    def __init__(self, model: nn.Module, data: Dataset, seed: int, measured: int | None = None) -> None:
        self._model, self._training, self._seed = model, data.training, seed
        self._part = data.validation.select(torch.arange(len(data.validation))[:measured])

    def run(self, choice: Choice, compensate: Compensation) -> dict[str, Any]:
        """Refitting uses the calibration images of the search; by class, those of all classes together."""
        images = self.draw(choice)
        search = partial(cn.search, self._model, units=round(1 - REMOVED, 9), compensate=compensate, seed=self._seed)
        work = partial(search_by_class, search, images) if choice.by_class else partial(search, images.inputs)
        scores, searching = clock(work)
        plan = cn.plan(scores)
        smaller, removing = clock(partial(cn.prune, self._model, plan, images.inputs, compensate=compensate))
        return {
            "before": self._before,
            "accuracy": self._measure(smaller),
            "kept": {name: len(kept) for name, kept in plan.kept.items()},
            "seconds": {"search": searching, "prune": removing},
            "threads": torch.get_num_threads(),
            "source": digest_source()[:16],
            "images": {
                "drawn": images.labels.bincount().tolist(),
                "drawn_digest": images.digest[:16],
                "measured": len(self._part),
                "digest": self._part.digest[:16],
            },
        }

    def draw(self, choice: Choice) -> LabelledImages:
        """The calibration images of a choice, drawn and shuffled by the seed."""
        match choice.kind:
            case "even":
                drawn = draw_calibration(self._training, choice.images, self._seed)
            case "correct":
                drawn = draw_calibration(self._training, choice.images, self._seed, correct_by=self._model)
            case "any":
                drawn = self._training.select(self._shuffle(len(self._training))[: choice.images])
            case "unsure" | "sure":
                rows = self._rank(choice.images, sure=choice.kind == "sure")
                drawn = self._training.select(rows[self._shuffle(len(rows))])
        return LabelledImages(drawn.inputs.contiguous(), drawn.labels)

    def _rank(self, count: int, *, sure: bool) -> Tensor:
        """Class-balanced, the images with the largest or the smallest margin."""
        labels = self._training.labels
        classes = labels.unique()
        ranked = self._margins.argsort(descending=sure, stable=True)
        return torch.cat([ranked[labels[ranked] == label][: count // len(classes)] for label in classes])

    @cached_property
    def _margins(self) -> Tensor:
        """The margin between the two largest outputs, for every training image."""
        with torch.inference_mode():
            outputs = torch.cat([self._model(part) for part in torch.split(self._training.inputs, BATCH_SIZE)])
        first, second = outputs.topk(2).values.T
        return first - second

    @cached_property
    def _before(self) -> float:
        return self._measure(self._model)

    def _measure(self, model: nn.Module) -> float:
        return measure_accuracy(model, self._part.inputs, self._part.labels)

    def _shuffle(self, count: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(self._seed))


def search_by_class(search: partial[cn.Scores], images: LabelledImages) -> cn.Scores:
    """Scores averaged over one search per class, each with the same budget."""
    parts = [search(images.inputs[images.labels == label]) for label in images.labels.unique()]
    settings = {**parts[0].settings, "by_class": True}
    return average_scores(parts, settings=settings, seconds=sum(part.seconds for part in parts))


if __name__ == "__main__":
    main()

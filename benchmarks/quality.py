"""Accuracy at a given size, without fine-tuning: `cn.search` against other ways to choose units.

    python benchmarks/quality.py run --data DIR --runs DIR              every case, on validation images
    python benchmarks/quality.py run --data DIR --runs DIR --part test  once, after all choices are made
    python benchmarks/quality.py run ... --only fashion/lenet5          one case, or parts of cell names
    python benchmarks/quality.py run ... --again ours                   only the search; stored baselines stay
    python benchmarks/quality.py page                                   docs/quality.md from the stored results

DIR of --data holds mnist, fashion_mnist and cifar10. Trained networks are kept in DIR of --runs, and those of
`critical-neurons reproduce` are reused; VGG-16 is loaded from --vgg WEIGHTS. A cell is a network, a seed, a number of
calibration images and a size; all methods are measured in it. It is stored as one line of
benchmarks/results/quality.jsonl when it is done; stored cells are skipped, so an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.costs import count_cost
from critical_neurons.core.scores import spread_scores
from critical_neurons.core.structure import Floats
from critical_neurons.errors import CriticalNeuronsError
from critical_neurons.io.builtin_models import MODELS, fc3
from critical_neurons.io.models import load_model
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons_reproduction.datasets import VALIDATION_SHARE, Dataset, LabelledImages, load_stored
from critical_neurons_reproduction.experiments.cells import select_cells
from critical_neurons_reproduction.experiments.workspace import Runs, find_data
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.sampling import draw_batch
from critical_neurons_reproduction.store import Cell, Store
from critical_neurons_reproduction.training import build_model, train
from preferring import Subject, draw_random, list_methods, prefer
from quality_page import OURS, RANDOM, UNIFORM, write_page

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "quality.md"
TABLE = "quality"
VERSION = 1
"""Incremented when the same settings would give another result."""

COMPENSATIONS = ("none", "least_squares")
REMOVED = (0.3, 0.5, 0.6, 0.7, 0.8)
MACS = (0.5, 0.3)
CALIBRATION = 1000
SIZES = (10, 100, 1000, 5000)
SHARE_STEPS = 1000
"""Uniform shares are multiples of 1 / `SHARE_STEPS`."""

PAPER = {"integer": False, "input_radius": 1e-5}
LINEARISED = {"formulation": "linearised", "input_radius": 0.0}
"""For deep networks, where the paper's program takes hours."""

PLAIN = "784-300-100-10"
PLAIN_RECIPE = Recipe("adam", 1e-3, epochs=10)

Made = TypeVar("Made")


@dataclass(frozen=True)
class Case:
    """A network on a data set, and what is measured for it.

    * `stored`: images as stored, minus `centre`, with the last tenth of the training split for validation; otherwise
      the paper's images and split.
    * `brought`: the weights are given, not trained.
    * `sizes`: numbers of calibration images; other than the default only for the first seed and not for MACs budgets.
    * `methods`: None for all.
    * `uniform`: for MACs budgets, also measure every baseline with the same share of units in all layers.
    """

    network: str
    data: str
    seeds: tuple[int, ...]
    removed: tuple[float, ...] = REMOVED
    macs: tuple[float, ...] = MACS
    sizes: tuple[int, ...] = (CALIBRATION,)
    stored: bool = False
    centre: float = 0.0
    brought: bool = False
    measured: int | None = None
    program: Mapping[str, Any] | None = None
    methods: tuple[str, ...] | None = None
    draws: int = 5
    uniform: bool = True


SEEDS, CHEAP_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
DEEP = {
    "removed": (0.5, 0.7),
    "measured": 2000,
    "program": LINEARISED,
    "draws": 1,
    "uniform": False,
}
CASES = (
    Case(PLAIN, "fashion", CHEAP_SEEDS, sizes=SIZES, stored=True),
    *(Case(network, data, CHEAP_SEEDS) for network in ("fc3", "fc4") for data in ("mnist", "fashion")),
    Case("lenet5", "mnist", SEEDS),
    Case("lenet5", "fashion", SEEDS, sizes=SIZES),
    Case("lenet5", "cifar10", (0, 1)),
    Case("vgg16", "cifar10", (0,), stored=True, centre=0.5, brought=True, **DEEP),
    *([Case("resnet20", "cifar10", (0,), **DEEP)] if "resnet20" in MODELS else []),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure the cells that are not stored yet")
    run.add_argument("--data", required=True, type=Path, help="folder with mnist, fashion_mnist and cifar10")
    run.add_argument("--runs", required=True, type=Path, help="folder of trained networks")
    run.add_argument("--only", action="append", default=[], help="parts of cell names, such as fashion/lenet5")
    run.add_argument("--part", choices=("validation", "test"), default="validation", help="the images to measure on")
    run.add_argument("--vgg", type=Path, help="weights of VGG-16 on CIFAR-10; without them it is skipped")
    run.add_argument(
        "--again",
        choices=("all", "ours", *COMPENSATIONS),
        help="repeat stored cells: all methods; only ours; or only ours with one kind of compensation",
    )
    commands.add_parser("page", help="write docs/quality.md from the stored results")
    arguments = parser.parse_args()
    store = Store(RESULTS)
    if arguments.command == "run" and arguments.vgg and not arguments.vgg.is_file():
        parser.error(f"--vgg {arguments.vgg}: no such file. Accepted: weights of the built-in vgg16.")
    try:
        if arguments.command == "page":
            records = store.find_all(TABLE)
            write_page(records, PAGE, count_missing({record.cell.name for record in records}))
            return
        cases = [case for case in CASES if arguments.vgg or not case.brought]
        if len(cases) < len(CASES):
            print("vgg16 is skipped: no --vgg WEIGHTS", flush=True)
        listed = {cell: case for case in cases for cell in list_cells(case, arguments.part, arguments.vgg)}
        chosen = select_cells(listed, arguments.only)
        missing = chosen if arguments.again else store.find_missing(chosen)
        print(f"{len(missing)} of {len(chosen)} cells to measure", flush=True)
        runs = Runs(arguments.runs, arguments.data, on_epoch=report_epoch)
        failed = []
        for case in cases:
            mine = [cell for cell in missing if listed[cell] is case]
            known = store if arguments.again not in (None, "all") else None
            searched = (arguments.again,) if arguments.again in COMPENSATIONS else COMPENSATIONS
            failed += run_cells(case, mine, store, runs, weights=arguments.vgg, known=known, searched=searched)
    except CriticalNeuronsError as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


def list_cells(case: Case, part: str, weights: Path | None = None) -> list[Cell]:
    """Grouped by network, seed and calibration images."""
    budgets = [{"removed": share} for share in case.removed] + [{"macs": share} for share in case.macs]
    digest = {"weights": hashlib.sha256(weights.read_bytes()).hexdigest()} if case.brought and weights else {}
    cells = []
    for seed, size, budget in product(case.seeds, case.sizes, budgets):
        unusual = CALIBRATION in case.sizes and size != CALIBRATION
        if unusual and ("macs" in budget or seed != case.seeds[0]):
            continue
        ((measure, share),) = budget.items()
        settings = {
            "harness": VERSION,
            "network": case.network,
            "data": case.data,
            "seed": seed,
            "images": size,
            "budget": budget,
            "part": part,
            "measured": case.measured,
            "program": case.program or PAPER,
            "methods": case.methods,
            "draws": case.draws,
            "uniform": case.uniform,
            **digest,
        }
        name = f"{case.data}/{case.network}/seed-{seed}/images-{size}/{measure}-{100 * share:.0f}"
        cells.append(Cell(TABLE, f"{name}/{part}", settings))
    return cells


def count_missing(names: Collection[str]) -> dict[str, int]:
    """The number of cells on test images that are not among the names, by case."""
    missing = {
        f"{case.data}/{case.network}": sum(cell.name not in names for cell in list_cells(case, "test"))
        for case in CASES
    }
    return {case: count for case, count in missing.items() if count}


def run_cells(
    case: Case,
    cells: Collection[Cell],
    store: Store,
    runs: Runs,
    *,
    weights: Path | None = None,
    known: Store | None = None,
    searched: Sequence[str] = COMPENSATIONS,
) -> list[str]:
    """Measure cells of a case and store each as it is done. Returns the failures, with reasons.

    `known`: a store of results in which only ours is measured again, with the compensations `searched`.
    """
    failed: list[str] = []
    if not cells:
        return failed
    data = load_images(case, runs)
    for (seed, size), mine in groupby(cells, key=lambda cell: (cell.settings["seed"], cell.settings["images"])):
        model = load_network(case, data, runs, seed, weights)
        trial = Trial(case, build_subject(case, model, data.training, seed, size), seed)
        for cell in mine:
            record = known and known.find(cell)
            part = choose_part(data, cell.settings)
            work = partial(trial.run, cell.settings["budget"], part)
            if record:
                work = partial(work, known=record.result, searched=searched)
            try:
                result, seconds = clock(work)
            except CriticalNeuronsError as error:
                failed.append(f"{cell.name}: {error}")
                continue
            result["seconds"]["cell"] = seconds
            store.add(cell, result)
            ours = {name: f"{100 * value:.2f}" for name, value in result["accuracy"][OURS].items()}
            print(
                f"{cell.name}: {100 * result['before']:.2f}, then {ours}, {result['seconds']['cell']} s", flush=True
            )
    return failed


def load_images(case: Case, runs: Runs) -> Dataset:
    if not case.stored:
        return runs.load(case.data)
    assert runs.data is not None
    found = load_stored(find_data(runs.data, case.data), cache=runs.cache)
    training, test = (LabelledImages(part.inputs - case.centre, part.labels) for part in found)
    last = len(training) - round(VALIDATION_SHARE * len(training))
    rows = torch.arange(len(training))
    return Dataset(training.select(rows[:last]), training.select(rows[last:]), test)


def load_network(case: Case, data: Dataset, runs: Runs, seed: int, weights: Path | None) -> nn.Module:
    """The network; trained if it is missing."""
    if case.brought:
        return load_model(case.network, weights)
    if case.network != PLAIN:
        return runs.train_reference(case.network, case.data, seed).eval()
    names = (case.data, PLAIN, f"seed-{seed}")
    return train(
        build_model(partial(fc3, classes=data.classes, channels=1, size=28), seed),
        data,
        runs.schedule.shorten(PLAIN_RECIPE),
        seed=seed,
        folder=runs.folder.joinpath(*names),
        progress=lambda epoch: runs.on_epoch("/".join(names), epoch.number, epoch.of),
    ).model


def build_subject(case: Case, model: nn.Module, training: LabelledImages, seed: int, size: int) -> Subject:
    calibration = draw_calibration(training, size, seed)
    return Subject(model, calibration.inputs.contiguous(), calibration.labels, case.program or PAPER)


def draw_calibration(
    training: LabelledImages, size: int, seed: int, *, correct_by: nn.Module | None = None
) -> LabelledImages:
    """A class-balanced calibration set, drawn and shuffled by the seed; for one seed, sets are nested. With
    `correct_by` only images that this network classifies correctly."""
    classes = len(training.labels.unique())
    drawn = draw_batch(training, max(1, size // classes), seed=seed, correct_by=correct_by)
    return drawn.select(torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed)))


def choose_part(data: Dataset, settings: Mapping[str, Any]) -> LabelledImages:
    part = data.test if settings["part"] == "test" else data.validation
    return part if settings["measured"] is None else part.select(torch.arange(min(settings["measured"], len(part))))


class Trial:
    """A network and its calibration images; what does not depend on the budget is computed once."""

    def __init__(self, case: Case, subject: Subject, seed: int) -> None:
        self._case, self._subject, self._seed = case, subject, seed
        self._methods = case.methods or list_methods(subject.model)
        self._preferences: dict[str, tuple[Floats, float]] = {}

    def run(
        self,
        budget: Mapping[str, float],
        part: LabelledImages,
        known: Mapping[str, Any] | None = None,
        searched: Sequence[str] = COMPENSATIONS,
    ) -> dict[str, Any]:
        """Accuracies by method and compensation; for random removal, means over draws.

        `known`: an earlier result, reused for everything but ours with the compensations `searched`.
        """
        subject = self._subject
        ((measure, share),) = budget.items()
        wanted = {"macs": share} if measure == "macs" else {"units": round(1 - share, 9)}
        timed = {
            compensate: clock(
                partial(cn.search, subject.model, subject.inputs, **wanted, compensate=compensate, seed=self._seed)
            )
            for compensate in searched
        }
        plans = {compensate: cn.plan(scores) for compensate, (scores, _) in timed.items()}
        judge = Judge(subject, part)
        ours = {
            "accuracy": {compensate: judge.measure(plan, compensate) for compensate, plan in plans.items()},
            "macs": {compensate: share_of_macs(subject, plan) for compensate, plan in plans.items()},
            "kept": {
                compensate: {name: len(kept) for name, kept in plan.kept.items()}
                for compensate, plan in plans.items()
            },
            "search": {compensate: seconds for compensate, (_, seconds) in timed.items()},
            "prune": dict(judge.seconds),
        }
        accuracy, macs = {OURS: ours["accuracy"]}, {OURS: ours["macs"]}
        if known:
            ours = {name: {**earlier, **ours[name]} for name, earlier in _list_ours(known).items()}
            accuracy, macs = ({**known[name], OURS: ours[name]} for name in ("accuracy", "macs"))
            methods = known["seconds"]["methods"]
        else:
            for name, others in self._plan_others(wanted, timed["none"][0], plans["none"]):
                accuracy[name] = {
                    compensate: fmean(judge.measure(other, compensate) for other in others)
                    for compensate in COMPENSATIONS
                }
                macs[name] = dict.fromkeys(COMPENSATIONS, fmean(share_of_macs(subject, other) for other in others))
            methods = {name: seconds for name, (_, seconds) in self._preferences.items()}
        return {
            "before": measure_accuracy(subject.model, part.inputs, part.labels),
            "accuracy": accuracy,
            "macs": macs,
            "kept": ours["kept"],
            "seconds": {"search": ours["search"], "prune": ours["prune"], "methods": methods},
            "threads": torch.get_num_threads(),
            "torch_pruning": version("torch-pruning"),
            "images": {"calibration": len(subject.labels), "measured": len(part), "digest": part.digest[:16]},
        }

    def _plan_others(
        self, wanted: Mapping[str, float], scores: cn.Scores, plan: cn.Plan
    ) -> Iterator[tuple[str, list[cn.Plan]]]:
        """One plan per baseline, and several random ones."""
        drawn = [draw_random(self._subject, seed) for seed in range(self._case.draws)]
        given = {RANDOM: drawn, **{name: [self._prefer(name)] for name in self._methods}}
        if "units" in wanted:
            for name, preferences in given.items():
                yield name, [plan.preferred(each, name) for each in preferences]
            return
        share = find_uniform_share(self._subject, scores, wanted["macs"])
        for name, preferences in given.items():
            frames = [frame_values(scores, each) for each in preferences]
            yield name, [cn.plan(frame, **wanted) for frame in frames]
            if self._case.uniform:
                yield f"{name}{UNIFORM}", [cn.plan(frame, units=share) for frame in frames]

    def _prefer(self, name: str) -> Floats:
        if name not in self._preferences:
            self._preferences[name] = clock(partial(prefer, name, self._subject))
        return self._preferences[name][0]


class Judge:
    """Builds and measures every distinct smaller network once. `seconds`: of the last `prune`, by compensation."""

    def __init__(self, subject: Subject, part: LabelledImages) -> None:
        self._subject, self._part = subject, part
        self._known: dict[tuple[bytes, str], float] = {}
        self.seconds: dict[str, float] = {}

    def measure(self, plan: cn.Plan, compensate: str) -> float:
        key = (plan.stays.tobytes(), compensate)
        if key not in self._known:
            make = partial(cn.prune, self._subject.model, plan, self._subject.inputs, compensate=compensate)
            smaller, self.seconds[compensate] = clock(make)
            self._known[key] = measure_accuracy(smaller, self._part.inputs, self._part.labels)
        return self._known[key]


def clock(work: Callable[[], Made]) -> tuple[Made, float]:
    """The result, and its wall-clock or processor seconds, whichever is less: a machine with other load lengthens the
    first. Neither is less than it would take alone."""
    started, used = time.perf_counter(), time.process_time()
    made = work()
    return made, round(min(time.perf_counter() - started, time.process_time() - used), 2)


def find_uniform_share(subject: Subject, scores: cn.Scores, macs: float) -> float:
    """The largest share of units, the same for every layer, whose MACs are within the budget."""
    low, high = 1, SHARE_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        plan = cn.plan(frame_values(scores, scores.per_unit), units=middle / SHARE_STEPS)
        low, high = (middle, high) if share_of_macs(subject, plan) <= macs else (low, middle)
    return low / SHARE_STEPS


def frame_values(scores: cn.Scores, values: Floats) -> cn.Scores:
    """The same scores with other values and without settings."""
    return replace(scores, values_by_layer=spread_scores(scores.structure, values), settings={})


def _list_ours(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries of a result for ours, by compensation."""
    return {
        "accuracy": result["accuracy"][OURS],
        "macs": result["macs"][OURS],
        "kept": result["kept"],
        "search": result["seconds"]["search"],
        "prune": result["seconds"]["prune"],
    }


def share_of_macs(subject: Subject, plan: cn.Plan) -> float:
    stays, structure = plan.stays.astype(float), subject.structure
    return round(count_cost(structure, stays, "macs") / count_cost(structure, stays * 0 + 1, "macs"), 6)


def report_epoch(training: str, done: int, total: int) -> None:
    print(f"training {training}: epoch {done} of {total}", flush=True)


if __name__ == "__main__":
    main()

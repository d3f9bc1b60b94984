"""Cost of scoring: seconds and memory by images, units, depth, input side and workers, compared with the literal
program, and for whole deep networks.

    python benchmarks/performance.py run                            on scikit-learn's digits
    python benchmarks/performance.py run --data DIR                 on MNIST; DIR holds mnist, and cifar10
    python benchmarks/performance.py run --data DIR --vgg WEIGHTS   whole VGG-16 as well; --resnet likewise
    python benchmarks/performance.py run --only images/fc3          parts of case names
    python benchmarks/performance.py page                           docs/performance.md from the stored results

Every case runs on one thread in a separate process, so that its peak memory can be measured, and is stored as a line
of benchmarks/results/performance.jsonl when it is done. Stored cases are skipped: an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import deep
from critical_neurons.errors import CriticalNeuronsError, SolverError
from critical_neurons_reproduction.experiments.cells import select_cells
from critical_neurons_reproduction.experiments.workspace import find_data
from critical_neurons_reproduction.store import Cell, Record, Store
from performance_page import TABLE, write_page
from storing import SEED
from timing import measure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
VERSION = 1
"""Incremented when the same settings would give another result."""

EPOCHS = 6
IMAGES = (10, 20, 50, 100, 200, 500, 1000)
MOST_DIGITS = 500
"""Largest batch to score on with scikit-learn's digits; there are no more held-out ones."""

WIDTHS = (100, 200, 400, 800, 1600)
DEPTHS = (2, 3, 4, 6, 8)
SIDES = (16, 24, 32, 48, 64, 96)
CHANNELS = (32, 64, 128)
"""Of the convolutions of the network that takes images of any side."""

WORKERS = (1, 2)
PER_CLASS = 50
LITERAL = (1, 2, 3, 5, 10, 20)
RELAXED = {"integer": False, "threads": 1, "time_limit": 3600.0}
PAPER = {**RELAXED, "input_radius": 1e-5}
"""The authors' settings, used for the literal program."""

CAP = 1800
"""Processor seconds after which a case of the literal program is killed."""


@dataclass(frozen=True)
class Place:
    """The folders of data and trained networks."""

    data: Path | None
    runs: Path
    vgg: Path | None = None
    resnet: Path | None = None

    @property
    def images(self) -> str:
        return "digits" if self.data is None else "mnist"


@dataclass(frozen=True)
class Case:
    """`work` measures the case. After `cap` processor seconds it is killed, and larger cases of its `series`
    skipped."""

    cell: Cell
    work: Callable[[Place], dict[str, Any]]
    cap: int | None = None
    series: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure the cases that are not stored yet")
    run.add_argument("--data", type=Path, help="folder with mnist and cifar10; without it scikit-learn's digits")
    run.add_argument("--runs", type=Path, default=ROOT / "runs" / "performance", help="folder of trained networks")
    run.add_argument("--vgg", type=Path, help="weights of VGG-16 on CIFAR-10; without them it is skipped")
    run.add_argument("--resnet", type=Path, help="weights of ResNet-20 on CIFAR-10; without them it is skipped")
    run.add_argument("--only", action="append", default=[], help="parts of case names, such as images/fc3")
    run.add_argument("--again", action="store_true", help="repeat stored cases; the last line counts")
    run.add_argument("--case", help=argparse.SUPPRESS)
    commands.add_parser("page", help="write docs/performance.md from the stored results")
    arguments = parser.parse_args()
    store = Store(RESULTS)
    try:
        if arguments.command == "page":
            write_page(store.find_all(TABLE), PAGE)
            return
        for option, path in (("--vgg", arguments.vgg), ("--resnet", arguments.resnet)):
            if path is not None and not path.is_file():
                parser.error(f"{option} {path}: no such file. Accepted: weights of the built-in network.")
            if path is not None and arguments.data is None:
                parser.error(f"{option}: needs --data DIR with cifar10 in it.")
        place = Place(arguments.data, arguments.runs, arguments.vgg, arguments.resnet)
        cases = {case.cell.name: case for case in list_cases(place)}
        if arguments.case:
            print(json.dumps(cases[arguments.case].work(place)))
            return
        failed = run_cases(cases, place, store, only=arguments.only, again=arguments.again)
    except CriticalNeuronsError as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


def list_cases(place: Place) -> list[Case]:
    cases = []

    def add(
        name: str, work: Callable[..., dict[str, Any]], limits: Mapping[str, Any] | None = None, **given: Any
    ) -> None:
        settings = {"harness": VERSION, "data": place.images, "seed": SEED, **given}
        cases.append(Case(Cell(TABLE, name, settings), partial(work, **given), **(limits or {})))

    for network, images in ((network, images) for network in ("fc3", "lenet5") for images in IMAGES):
        if place.data is not None or images <= MOST_DIGITS:
            add(f"images/{network}/{images}", score_trained, network=network, images=images, settings=RELAXED)
    for width in WIDTHS:
        add(f"units/{width}", score_untrained, widths=[width, width], images=10, settings=RELAXED)
    for depth in DEPTHS:
        add(f"depth/{depth}", score_untrained, widths=[100] * depth, images=10, settings=RELAXED)
    for side in SIDES:
        add(f"side/{side}", score_resized, side=side, images=10, settings=RELAXED)
    for jobs in WORKERS:
        add(f"workers/{jobs}", score_classes, network="fc3", images=10 * PER_CLASS, jobs=jobs, settings=RELAXED)
    for images in LITERAL:
        add(f"literal/ours/{images}", score_trained, network="fc3", images=images, settings=PAPER)
        conic = {**PAPER, "solver": "cvxpy:CLARABEL"}
        for form, work, given in (
            ("folded", score_literal, {"network": "fc3", "settings": conic}),
            ("authors", solve_authors, {}),
        ):
            add(f"literal/{form}/{images}", work, {"cap": CAP, "series": f"literal/{form}/"}, images=images, **given)
    for network, weights in (("vgg16", place.vgg), ("resnet20", place.resnet)):
        if weights is None:
            continue
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
        for program in deep.PROGRAMS:
            settings = {"harness": VERSION, **deep.describe_program(network, program), "weights": digest}
            work = partial(run_deep, partial(deep.score, network, program), network)
            cases.append(Case(Cell(TABLE, f"deep/{network}/{program}", settings), work))
        for choice in deep.CHOICES:
            settings = {"harness": VERSION, **deep.describe_worth(network, choice), "weights": digest}
            work = partial(run_deep, partial(deep.judge, network, choice), network)
            cases.append(Case(Cell(TABLE, f"worth/{network}/{choice}", settings), work))
    return cases


def run_cases(cases: Mapping[str, Case], place: Place, store: Store, *, only: list[str], again: bool) -> list[str]:
    """Run each case in a separate process. Returns the names of those that failed."""
    left_out = [f"--{option}" for option in ("vgg", "resnet") if getattr(place, option) is None]
    if left_out:
        print(f"whole deep networks are skipped without weights: {', '.join(left_out)}", flush=True)
    chosen = select_cells([case.cell for case in cases.values()], only)
    missing = chosen if again else store.find_missing(chosen)
    print(f"{len(missing)} of {len(chosen)} cases to measure", flush=True)
    if any(not cell.name.startswith(("deep/", "worth/")) for cell in missing):
        prepare(place)
    failed = []
    for cell in missing:
        case = cases[cell.name]
        if _is_beyond(case, store.find_all(TABLE)):
            print(f"{cell.name}: skipped, since a smaller one was killed after {case.cap} s", flush=True)
            continue
        result = run_apart(case, place)
        if result is None:
            failed.append(cell.name)
            continue
        store.add(cell, result)
        print(f"{cell.name}: {json.dumps(result)}", flush=True)
    return failed


def run_apart(case: Case, place: Place) -> dict[str, Any] | None:
    """The result of the case in a separate process, on one thread; None if it failed."""
    command = [sys.executable, __file__, "run", "--case", case.cell.name, "--runs", str(place.runs)]
    for option in ("data", "vgg", "resnet"):
        if getattr(place, option) is not None:
            command += [f"--{option}", str(getattr(place, option))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    finished = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, **threads},
        preexec_fn=partial(_limit_processor, case.cap),
    )
    if case.cap is not None and finished.returncode == -signal.SIGXCPU:
        return {"ended": case.cap}
    return json.loads(finished.stdout.splitlines()[-1]) if finished.returncode == 0 else None


def _limit_processor(seconds: int | None) -> None:
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))


def _is_beyond(case: Case, records: list[Record]) -> bool:
    """Whether a smaller case of its series was killed."""
    return case.series is not None and any(
        record.cell.name.startswith(case.series)
        and "ended" in record.result
        and record.cell.settings["images"] < case.cell.settings["images"]
        and record.cell.settings["data"] == case.cell.settings["data"]
        for record in records
    )


def prepare(place: Place) -> None:
    """Train FC-3 and LeNet-5 and save the images to score on, unless they are in the folder already."""
    import torch

    from critical_neurons.core.files import make_folder
    from critical_neurons.io.builtin_models import fc3, lenet5
    from critical_neurons.removal.metrics import measure_accuracy

    folder = make_folder(place.runs)
    kept = folder / f"{place.images}.npz"
    if kept.exists():
        return
    inputs, labels = load_images(place)
    order = np.random.default_rng(SEED).permutation(len(labels))
    held_out, training = order[: len(order) // 3], order[len(order) // 3 :]
    for factory in (fc3, lenet5):
        print(f"training {factory.__name__}", flush=True)
        torch.manual_seed(SEED)
        model = factory()
        train(model, inputs[training], labels[training])
        print(f"  {measure_accuracy(model, inputs[held_out], labels[held_out]):.3f} accurate", flush=True)
        torch.save(model.state_dict(), folder / f"{factory.__name__}-{place.images}.pt")
    # classes alternate, so that the first ten images are one of each
    rank = np.empty(len(held_out), dtype=int)
    for label in range(10):
        mine = np.flatnonzero(labels[held_out].numpy() == label)
        rank[mine] = np.arange(len(mine))
    balanced = held_out[np.lexsort((labels[held_out].numpy(), rank))]
    np.savez(kept, inputs=inputs[balanced].numpy(), labels=labels[balanced].numpy())


def load_images(place: Place) -> tuple[Any, Any]:
    """Images of 3x32x32 in [0, 1]: 500 of every class, or all the digits."""
    import torch
    from torch.nn import functional

    if place.data is not None:
        from critical_neurons.io.data import Look, load_batch

        source = str(find_data(place.data, "mnist"))
        return load_batch(source, per_class=500, seed=SEED, look=Look(channels=3, resize=32))
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy((digits.images / 16).astype(np.float32))[:, None]
    large = functional.interpolate(small, (32, 32), mode="bilinear").repeat(1, 3, 1, 1)
    return large, torch.from_numpy(digits.target.astype(np.int64))


def train(model: Any, inputs: Any, labels: Any) -> None:
    import torch

    optimiser = torch.optim.RMSprop(model.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(64):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()


def load(place: Place, network: str, images: int) -> tuple[Any, Any, Any]:
    import torch

    from critical_neurons.io.builtin_models import MODELS

    model = MODELS[network].factory()
    model.load_state_dict(torch.load(place.runs / f"{network}-{place.images}.pt", weights_only=True))
    return model, *load_kept(place, images)


def load_kept(place: Place, images: int) -> tuple[Any, Any]:
    with np.load(place.runs / f"{place.images}.npz") as data:
        inputs, labels = data["inputs"][:images], data["labels"][:images]
    assert len(labels) == images, f"{place.images}: {len(labels)} images, but {images} are needed"
    return inputs, labels


def score_trained(place: Place, *, network: str, images: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    return time_scoring(*load(place, network, images), settings)


def score_literal(place: Place, *, network: str, images: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A failure of the solver is a result, too."""
    try:
        return score_trained(place, network=network, images=images, settings=settings)
    except SolverError as error:
        return {"failed": str(error)}


def score_untrained(place: Place, *, widths: list[int], images: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A fully connected network with torch's default initialisation; labels are its own predictions."""
    import torch
    from torch import nn

    inputs, _ = load_kept(place, images)
    torch.manual_seed(SEED)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise([inputs[0].size, *widths, 10]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return time_scoring(nn.Sequential(*layers[:-1]), inputs, None, settings)


def score_resized(place: Place, *, side: int, images: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """An untrained convolutional network, of the same parameters for all sides; labels are its own predictions."""
    import torch
    from torch import nn

    inputs, _ = load_kept(place, images)
    resized = nn.functional.interpolate(torch.from_numpy(inputs), (side, side), mode="bilinear")
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs.shape[1], *CHANNELS]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], 10)]
    return time_scoring(nn.Sequential(*layers[:-1], *head), resized.numpy(), None, settings)


def score_classes(
    place: Place, *, network: str, images: int, jobs: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    return time_scoring(*load(place, network, images), settings, jobs=jobs)


def time_scoring(
    model: Any, inputs: Any, labels: Any, settings: Mapping[str, Any], *, jobs: int | None = None
) -> dict[str, Any]:
    """`jobs`: number of processes, with one program per class; None for a single program."""
    import critical_neurons as cn
    from critical_neurons.solvers import find_solver
    from critical_neurons_reproduction.score_settings import read_score_settings

    told = read_score_settings(settings)
    find_solver(told["solver"].name)  # its imports are not timed
    if jobs is not None:
        told["formulation"] = cn.ByClass(told["formulation"], workers=cn.Workers(jobs=jobs))
    scores, taken = measure(partial(cn.score, model, inputs, labels, **told))
    return {
        **taken,
        "objective": scores.objective,
        "status": scores.status.value,
        "gap": scores.gap,
        "sizes": dict(scores.sizes),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def solve_authors(place: Place, *, images: int) -> dict[str, Any]:
    """FC-3 in the authors' form, relaxed, solved by Clarabel."""
    from authors_form import solve_authors_form

    found, taken = measure(partial(solve_authors_form, *load(place, "fc3", images)))
    return {
        **taken,
        "objective": found["objective"],
        "status": found["status"],
        "sizes": {"columns": found["columns"]},
    }


def run_deep(work: Callable[..., dict[str, Any]], network: str, place: Place) -> dict[str, Any]:
    weights = place.vgg if network == "vgg16" else place.resnet
    return work(data=place.data, weights=weights, folder=place.runs)


if __name__ == "__main__":
    main()

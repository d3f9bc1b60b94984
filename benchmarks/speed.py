"""Speed of scoring: ratios measured in one run, stored as JSON lines with settings, versions and machine.

    python benchmarks/speed.py                            networks trained on scikit-learn's digits
    python benchmarks/speed.py --data FOLDER              on a Hugging Face data set of images, such as MNIST
    python benchmarks/speed.py --only growth              one group of cases
    python benchmarks/speed.py --show                     the newest stored result of every case, as a table

Every case runs in a process of its own, so that its peak memory is its own. A case that is done is stored at once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "speed.jsonl"
SEED = 0
EPOCHS = 6
PAPER = {"input_radius": 1e-5, "integer": False}
"""The authors' settings: the ones of the literal program."""
REPEATS = 3
IMAGES = (10, 50, 100, 200, 500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder or id of a Hugging Face data set; without it scikit-learn's digits")
    parser.add_argument("--only", help="run only the cases whose name contains this")
    parser.add_argument("--show", action="store_true", help="print the stored results")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--prepared", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        show()
    elif arguments.case:
        print(json.dumps(CASES[arguments.case](Path(arguments.prepared))))
    else:
        run_all(arguments.data, arguments.only)


def run_all(data: str | None, only: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("training the networks", flush=True)
        prepare(data, Path(folder))
        for name in CASES:
            if only and only not in name:
                continue
            command = [sys.executable, __file__, "--case", name, "--prepared", folder]
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if finished.returncode:
                print(f"{name}: failed", flush=True)
                continue
            store({"case": name, "data": Path(data).name if data else "digits", **json.loads(finished.stdout)})


def store(result: dict[str, Any]) -> None:
    store_line(RESULTS, result)


def store_line(path: Path, result: dict[str, Any]) -> None:
    """One JSON line with the date, the seed, the machine and the versions."""
    record = {
        "date": datetime.date.today().isoformat(),
        **result,
        "seed": SEED,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("critical_neurons", "torch", "highspy", "cvxpy", "clarabel")},
    }
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(result), flush=True)


def show() -> None:
    newest = {
        (record["case"], record["data"]): record for record in map(json.loads, RESULTS.read_text().splitlines())
    }
    for (case, data), record in newest.items():
        left_out = ("case", "data", "seed", "machine", "versions")
        print(f"{case} ({data}):", {key: value for key, value in record.items() if key not in left_out})


def prepare(data: str | None, folder: Path) -> None:
    """Train FC-3 and LeNet-5 and put them and the images to score on into the folder."""
    import torch

    from critical_neurons.experiments.models import fc3, lenet5
    from critical_neurons.measuring import measure_accuracy

    inputs, labels = load_images(data)
    generator = np.random.default_rng(SEED)
    order = generator.permutation(len(labels))
    held_out, training = order[: len(order) // 3], order[len(order) // 3 :]
    for factory in (fc3, lenet5):
        torch.manual_seed(SEED)
        model = factory()
        train(model, inputs[training], labels[training])
        print(f"  {factory.__name__}: {measure_accuracy(model, inputs[held_out], labels[held_out]):.3f} accurate")
        torch.save(model.state_dict(), folder / f"{factory.__name__}.pt")
    # class by class in turn, so that the first ten are one of each
    rank = np.empty(len(held_out), dtype=int)
    for label in range(10):
        mine = np.flatnonzero(labels[held_out].numpy() == label)
        rank[mine] = np.arange(len(mine))
    balanced = held_out[np.lexsort((labels[held_out].numpy(), rank))]
    np.savez(folder / "images.npz", inputs=inputs[balanced].numpy(), labels=labels[balanced].numpy())


def load_images(data: str | None) -> tuple[Any, Any]:
    """Images of 3x32x32 in [0, 1]: 500 of every class, or all the digits."""
    import torch
    from torch.nn import functional

    if data:
        from critical_neurons.loading import Look, load_batch

        return load_batch(data, per_class=500, seed=SEED, look=Look(channels=3, resize=32))
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


def load(folder: Path, name: str, images: int) -> tuple[Any, Any, Any]:
    import torch

    from critical_neurons.experiments.models import MODELS

    model = MODELS[name].factory()
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    with np.load(folder / "images.npz") as data:
        return model, data["inputs"][:images], data["labels"][:images]


def time_scoring(folder: Path, name: str, images: int, repeats: int, **settings: Any) -> dict[str, Any]:
    import critical_neurons as cn

    model, inputs, labels = load(folder, name, images)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        scores = cn.score(model, inputs, labels, **settings)
        seconds.append(time.perf_counter() - started)
    return {
        "images": images,
        "settings": settings,
        "seconds": round(statistics.median(seconds), 3),
        "objective": scores.objective,
        "status": scores.status.value,
        "gap": scores.gap,
        "sizes": dict(scores.sizes),
    }


def against_authors_form(folder: Path) -> dict[str, Any]:
    """FC-3, ten images, relaxed, in the authors' form solved by Clarabel, beside ours; reading and encoding included.

    And beside our own literal program, which folds the input into constants, with Clarabel as `solving.conic` sets it
    and as it comes.
    """
    from authors_form import solve_authors_form

    ours = {
        "relaxed": time_scoring(folder, "fc3", 10, REPEATS, **PAPER),
        "default": time_scoring(folder, "fc3", 10, REPEATS),
        "integer": time_scoring(folder, "fc3", 10, REPEATS, input_radius=1e-5),
    }
    literal = time_literal(folder)
    with clarabel_defaults():
        literal_defaults = time_literal(folder)
    fastest = min(literal["seconds"], literal_defaults["seconds"])
    authors = solve_authors_form(*load(folder, "fc3", 10))
    return {
        "ours": ours,
        "literal": literal,
        "literal_clarabel_defaults": literal_defaults,
        "authors_form": authors,
        "ratio_to_authors_form": {
            name: round(authors["seconds"] / result["seconds"], 1) for name, result in ours.items()
        },
        "ratio_to_literal": {name: round(fastest / result["seconds"], 1) for name, result in ours.items()},
        "objective_difference": abs(authors["objective"] - ours["relaxed"]["objective"]),
    }


def time_literal(folder: Path) -> dict[str, Any]:
    return time_scoring(folder, "fc3", 10, 1, **PAPER, solver="cvxpy:CLARABEL", time_limit=3600.0)


@contextmanager
def clarabel_defaults() -> Iterator[None]:
    """Clarabel as it comes, without the options that `solving.conic` gives it for accuracy."""
    from critical_neurons.solving import conic

    careful = dict(conic._CAREFUL)
    conic._CAREFUL.clear()
    yield
    conic._CAREFUL.update(careful)


def lenet_against_fc(folder: Path) -> dict[str, Any]:
    """LeNet-5 beside FC-3, ten images each."""
    results = {name: time_scoring(folder, name, 10, REPEATS, **PAPER) for name in ("fc3", "lenet5")}
    return {**results, "ratio": round(results["lenet5"]["seconds"] / results["fc3"]["seconds"], 2)}


def growth(name: str, images: int) -> Callable[[Path], dict[str, Any]]:
    def measure(folder: Path) -> dict[str, Any]:
        import critical_neurons.scoring  # noqa: F401  imports are not part of the memory measured

        before = peak_megabytes()
        result = time_scoring(folder, name, images, 1, integer=False)
        return {
            **result,
            "peak_megabytes": round(peak_megabytes() - before),
            "process_megabytes": round(peak_megabytes()),
        }

    return measure


def peak_megabytes() -> float:
    """Of this process alone; getrusage would count what the parent had when it started this one."""
    status = Path("/proc/self/status").read_text()
    return float(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def read_and_bound_vgg(folder: Path) -> dict[str, Any]:
    """The whole of VGG-16, ten images: reading and bounding."""
    import torch

    from critical_neurons.bounding import bound_network
    from critical_neurons.experiments.models import vgg16
    from critical_neurons.reading import read_network

    before = peak_megabytes()
    inputs = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(SEED))
    started = time.perf_counter()
    network = read_network(vgg16(), inputs)
    read = time.perf_counter()
    bound_network(network, inputs.double().numpy(), radius=1e-5)
    return {
        "units": network.unit_count,
        "read_seconds": round(read - started, 2),
        "bound_seconds": round(time.perf_counter() - read, 2),
        "peak_megabytes": round(peak_megabytes() - before),
    }


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "vgg16 read and bound": read_and_bound_vgg,
    "lenet5 against fc3": lenet_against_fc,
    **{f"growth {name} {images}": growth(name, images) for name in ("fc3", "lenet5") for images in IMAGES},
    "fc3 against the authors' form": against_authors_form,
}


if __name__ == "__main__":
    main()

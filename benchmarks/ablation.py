"""Ablation study of the search: validation accuracy and processor seconds with and without each part.

    python benchmarks/ablation.py run --data DIR --resnet20 WEIGHTS      all cells not stored yet
    python benchmarks/ablation.py run ... --only mlp --only draw-0       cells whose names contain these
    python benchmarks/ablation.py table                                  stored results as Markdown
    python benchmarks/ablation.py page                                   docs/ablation.md

DIR of --data holds fashion_mnist and cifar10; WEIGHTS is a checkpoint of a CIFAR ResNet-20 for inputs normalised by
ImageNet's mean and standard deviation. Validation images are the last 5 000 of the train split; the checkpoint was
trained on them, too. The other networks are trained on the rest for a minute. Every cell is one line of
benchmarks/results/ablation.jsonl, with the settings of its effort. Lines with settings that have changed since, or
with a `commit`, belong to earlier versions of the search; the table lists them separately. The page shows the last
with all the parts that were studied.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import critical_neurons as cn
from ablation_page import CALIBRATION, MEASURED, RESULTS, list_studied, read_lines, write_page
from architectures.residual import CifarResNet
from critical_neurons.core.markdown import format_table
from critical_neurons.core.settings import Compensation, EffortName
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.selection import gate_descent, layerwise_search
from critical_neurons.selection.effort import EFFORTS, Effort
from critical_neurons.selection.layerwise_search import LayerwiseSearch
from critical_neurons_reproduction.datasets import load_stored
from storing import store_line

VALIDATION, EPOCHS = 5000, 6
MEAN, DEVIATION = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]


@dataclass(frozen=True)
class Variant:
    """A search with this effort, some settings of it changed, and some attributes of modules or classes patched."""

    effort: EffortName = "quick"
    replaced: tuple[tuple[Any, str, Any], ...] = ()
    compensate: Compensation = "least_squares"
    changed: Mapping[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> Effort:
        return replace(EFFORTS[self.effort], **self.changed)


def keep_errors(layers: LayerwiseSearch, found: Any, passes: int, progress: Any) -> Any:
    return found


VARIANTS = {
    "quick": Variant(),
    "quick, errors not priced": Variant(replaced=((LayerwiseSearch, "price", keep_errors),)),
    **{
        f"quick, temperature {value:g}": Variant(replaced=((layerwise_search, "TEMPERATURE", value),))
        for value in (1.0, 16.0)
    },
    "quick, priced in 8 passes": Variant(changed={"passes": 8}),
    "standard": Variant("standard"),
    "standard, not revised": Variant("standard", changed={"rounds": 0}),
    "thorough": Variant("thorough"),
    "gates": Variant("standard", compensate="none"),
    "gates, temperature 1": Variant("standard", ((gate_descent, "TEMPERATURE", 1.0),), "none"),
    "gates, quick": Variant("quick", compensate="none"),
}
NETWORKS = {
    "mlp": ({"units": 0.2}, {"macs": 0.3}),
    "lenet5": ({"units": 0.3}, {"macs": 0.3}),
    "resnet20": ({"macs": 0.5}, {"macs": 0.3}),
}
DRAWS = range(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure the cells that are not stored yet")
    run.add_argument("--data", required=True, type=Path, help="folder with fashion_mnist and cifar10")
    run.add_argument("--resnet20", type=Path, help="checkpoint; without it ResNet-20 is skipped")
    run.add_argument("--only", action="append", default=[], help="part of cell names, such as mlp or draw-0")
    run.add_argument("--skip", action="append", default=[], help="part of names of cells to leave out, such as gates")
    commands.add_parser("table", help="print the stored results")
    commands.add_parser("page", help="write docs/ablation.md from the stored results")
    arguments = parser.parse_args()
    match arguments.command:
        case "run":
            run_cells(arguments)
        case "table":
            print("\n".join(list_rows(read_lines())))
        case "page":
            write_page(list_studied())


def run_cells(arguments: argparse.Namespace) -> None:
    """Measure and store the chosen cells that are not stored yet."""
    torch.set_num_threads(1)
    stored = {line["name"] for line in read_lines() if is_present(line)}
    for network in NETWORKS if arguments.resnet20 else ("mlp", "lenet5"):
        for draw in DRAWS:
            cells = [each for each in list_cells(network, draw) if each[0] not in stored]
            cells = [each for each in cells if all(part in each[0] for part in arguments.only)]
            cells = [each for each in cells if not any(part in each[0] for part in arguments.skip)]
            if cells:
                subject = load_subject(network, draw, arguments.data, arguments.resnet20)
                for name, budget, variant in cells:
                    store_line(RESULTS, {"name": name, **measure(subject, budget, VARIANTS[variant])})


def list_cells(network: str, draw: int) -> Iterator[tuple[str, dict[str, float], str]]:
    for budget in NETWORKS[network]:
        for variant in VARIANTS:
            ((measure, share),) = budget.items()
            yield f"{network}/draw-{draw}/{measure}-{share:g}/{variant}", budget, variant


@dataclass(frozen=True)
class Subject:
    """A trained network, calibration inputs, validation inputs and labels."""

    model: nn.Module
    inputs: Tensor
    validation: tuple[Tensor, Tensor]


def load_subject(network: str, draw: int, data: Path, resnet20: Path | None) -> Subject:
    """`draw` is the random seed of the calibration inputs and of training."""
    training, _ = load_stored(data / ("fashion_mnist" if network == "mlp" else "cifar10"))
    scaled = (MEAN, DEVIATION) if network == "resnet20" else (0.0, 1.0)
    if network == "resnet20":
        assert resnet20 is not None
        model: nn.Module = CifarResNet(3)
        weights = torch.load(resnet20, map_location="cpu", weights_only=True)
        weights = weights.get("state_dict", weights)
        model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    else:
        model = train(network, training.inputs[:-VALIDATION], training.labels[:-VALIDATION], draw)
    rows = torch.randperm(len(training) - VALIDATION, generator=torch.Generator().manual_seed(1000 + draw))
    held_out = training.select(torch.arange(len(training) - VALIDATION, len(training))[:MEASURED])
    inputs, validation = (
        (each - scaled[0]) / scaled[1] for each in (training.inputs[rows[:CALIBRATION]], held_out.inputs)
    )
    return Subject(model.eval(), inputs, (validation, held_out.labels))


def train(network: str, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if network == "mlp":
        model = nn.Sequential(
            *(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
        )
    else:
        model = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    return model


def measure(subject: Subject, budget: dict[str, float], variant: Variant) -> dict[str, Any]:
    """Accuracy and processor seconds; one pass is a forward pass over the calibration inputs."""
    model, inputs, how = subject.model, subject.inputs, variant.compensate
    with torch.no_grad():
        one_pass = min(clock(lambda: [model(some) for some in inputs.split(64)])[1] for _ in range(2))
    with replace_all(variant):
        scores, searching = clock(lambda: cn.search(model, inputs, **budget, compensate=how, effort=variant.effort))
    smaller, pruning = clock(lambda: cn.prune(model, cn.plan(scores), inputs, compensate=how))
    return {
        "accuracy": round(measure_accuracy(smaller, *subject.validation), 4),
        "objective": round(scores.objective or 0.0, 4),
        "search_seconds": round(searching, 2),
        "prune_seconds": round(pruning, 2),
        "pass_seconds": round(one_pass, 2),
        "passes": round((searching + pruning) / one_pass, 1),
        "effort": asdict(variant.settings),
    }


@contextmanager
def replace_all(variant: Variant) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.dict(EFFORTS, {variant.effort: variant.settings}))
        for owner, name, value in variant.replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def clock(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    return work(), time.process_time() - started


def is_present(line: dict[str, Any]) -> bool:
    """Whether a line was measured with the current search, variants and settings."""
    variant = VARIANTS.get(line["name"].split("/", 3)[3])
    return "commit" not in line and variant is not None and line.get("effort") == asdict(variant.settings)


def list_rows(lines: list[dict[str, Any]]) -> list[str]:
    present = [line for line in lines if is_present(line)]
    former = [line for line in lines if not is_present(line)]
    return [*list_means(present), "", "Former searches:", "", *list_means(former)]


def list_means(lines: list[dict[str, Any]]) -> list[str]:
    """Means over draws, by network, budget, variant and commit."""
    found = defaultdict(list)
    for line in lines:
        network, _, budget, variant = line["name"].split("/", 3)
        found[network, budget, variant, line.get("commit", "")].append(line)
    rows = []
    for (network, budget, variant, commit), same in sorted(found.items()):
        accuracy, passes = (
            fmean(each["accuracy"] for each in same),
            [each["passes"] for each in same if "passes" in each],
        )
        told = f"{fmean(passes):.1f}" if passes else ""
        rows.append((network, budget, variant, commit, len(same), f"{accuracy:.4f}", told))
    return format_table(("network", "kept", "variant", "commit", "draws", "accuracy", "passes"), rows)


if __name__ == "__main__":
    main()

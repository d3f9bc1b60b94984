"""What distillation adds to least squares, by network, share of the multiply-adds and processor seconds.

python benchmarks/distillation.py run --data FOLDER --checkpoints FOLDER --plans FOLDER [--network NAME]
    [--macs SHARE] [--test] [--setting steps=600]
python benchmarks/distillation.py page                                docs/distillation.md from the stored results

Plans, of `search` with effort="quick", are kept in the folder of plans: settings are compared on the same units.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import critical_neurons as cn
from architectures.residual import CifarResNet
from critical_neurons.io.models import load_model
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons_reproduction.datasets import load_stored
from storing import SEED, store_line

RESULTS = Path(__file__).parent / "results" / "distillation.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "distillation.md"
SHARES = (0.73, 0.5, 0.3)
CALIBRATION, TRAINED = 1000, 45_000
"""Images to calibrate on, from the first of the training split; the others are for validation."""

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEPTHS = {"resnet20": 3, "resnet56": 9}
NETWORKS = (*DEPTHS, "vgg16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure and store")
    run.add_argument("--data", required=True, help="folder or id of CIFAR-10")
    run.add_argument("--checkpoints", type=Path, required=True, help="folder with the trained weights")
    run.add_argument("--plans", type=Path, required=True, help="folder that keeps plans and decoded images")
    run.add_argument("--network", choices=NETWORKS, action="append", help="all by default; repeat for more")
    run.add_argument("--macs", type=float, action="append", help="shares kept, 0.73, 0.5 and 0.3 by default")
    run.add_argument("--test", action="store_true", help="on test images too: once, for the final settings")
    run.add_argument("--setting", action="append", default=[], help="of cn.Distillation, as steps=600")
    run.set_defaults(work=measure)
    commands.add_parser("page", help="write docs/distillation.md").set_defaults(work=lambda _: write_page())
    arguments = parser.parse_args()
    arguments.work(arguments)


def measure(arguments: argparse.Namespace) -> None:
    pairs = (text.partition("=") for text in arguments.setting)
    settings = cn.Distillation(**{name: _read(value) for name, _, value in pairs})
    training, test = load_stored(arguments.data, cache=arguments.plans)
    rows = torch.randperm(TRAINED, generator=torch.Generator().manual_seed(SEED))[:CALIBRATION]
    validation = training.select(torch.arange(TRAINED, len(training)))
    parts = {"validation": validation, **({"test": test} if arguments.test else {})}
    for network in arguments.network or NETWORKS:
        model, look = load_network(network, arguments.checkpoints)
        inputs = look(training.inputs[rows])
        for macs in arguments.macs or SHARES:
            plan = make_plan(model, inputs, macs, arguments.plans / f"{network}-{macs}.json")
            make = partial(cn.prune, model, plan, inputs, seed=SEED)
            fitted, fitting = clock(partial(make, compensate="least_squares"))
            both, distilling = clock(partial(make, compensate=settings))
            models = {"before": model, "least_squares": fitted, "distil": both}
            for name, part in parts.items():
                seen = look(part.inputs)
                result = {
                    "network": network,
                    "macs": macs,
                    "searched_on": len(plan.seen),
                    "part": name,
                    "settings": settings.to_dict(),
                    **{what: measure_accuracy(each, seen, part.labels) for what, each in models.items()},
                    "processor_seconds": {"least_squares": fitting, "distil": round(distilling - fitting, 1)},
                }
                store_line(RESULTS, result)


def load_network(name: str, folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The trained network, and what it takes of images in [0, 1]."""
    if name == "vgg16":
        return load_model(name, folder / "vgg16_cifar10.safetensors").eval(), lambda images: images - 0.5
    model = CifarResNet(DEPTHS[name])
    stored = torch.load(folder / f"{name}_akamaster.th", map_location="cpu", weights_only=True)
    model.load_state_dict({key.removeprefix("module."): each for key, each in stored["state_dict"].items()})
    mean, deviation = (torch.tensor(each)[:, None, None] for each in (MEAN, DEVIATION))
    return model.eval(), lambda images: (images - mean) / deviation


def make_plan(model: nn.Module, inputs: Tensor, macs: float, path: Path) -> cn.Plan:
    """Searched for once."""
    if not path.exists():
        cn.plan(cn.search(model, inputs, macs=macs, effort="quick", seed=SEED)).save(path)
    return cn.Plan.load(path)


def clock(work: Callable[[], Any]) -> tuple[Any, float]:
    """With processor seconds: others may use the machine too."""
    started = time.process_time()
    return work(), round(time.process_time() - started, 1)


def write_page() -> None:
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    last = records[-1]
    lines = [
        "# What distillation adds to least squares",
        "",
        "Generated by `python benchmarks/distillation.py page` from `benchmarks/results/distillation.jsonl`;",
        f"last measured on {last['date']}, {last['machine']}, one thread, torch {last['versions']['torch']}.",
        "",
        f'CIFAR-10, {CALIBRATION} calibration images without labels, units by `search` with `effort="quick"` on as',
        "many of them as the table says. Accuracies in per cent, processor seconds, settings other than the default.",
        "Settings were chosen on validation images, the last 5 000 of the training split. The public ResNets were",
        "trained on these too: only test images say what is lost, and they were read once, for the final settings.",
        "The units were searched for before the search of 0.2.0 took its present form; both columns have the same.",
    ]
    for part in ("test", "validation"):
        found = [record for record in records if record["part"] == part]
        if found:
            lines += ["", f"## {part.capitalize()} images", "", *_tabulate(found)]
    PAGE.write_text("\n".join(lines) + "\n")


def _tabulate(records: list[dict[str, Any]]) -> list[str]:
    defaults = cn.Distillation().to_dict()
    lines = [
        "| network | MACs | searched on | before | least squares | distilled | s | distilling s | settings |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for record in sorted(records, key=lambda each: (NETWORKS.index(each["network"]), -each["macs"])):
        accuracies = (f"{100 * record[name]:.2f}" for name in ("before", "least_squares", "distil"))
        seconds = (f"{record['processor_seconds'][name]:.0f}" for name in ("least_squares", "distil"))
        told = [f"{name} {value}" for name, value in record["settings"].items() if value != defaults[name]]
        sizes = f"{record['macs']:.2f}", str(record["searched_on"])
        cells = (record["network"], *sizes, *accuracies, *seconds, ", ".join(told))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()

"""ONNX in, ONNX out: this library beside the structured pruning and the closed-form refit of onnxsim.

pip install -c constraints.txt onnxsim
python benchmarks/onnx_peer.py run --data FOLDER --checkpoints FOLDER --cache FOLDER     everything not stored yet
    [--network NAME]                                                                     only these; repeatable
python benchmarks/onnx_peer.py page                                                      the table in docs/results.md

Both get the same file and the same 1 000 images without labels. onnxsim removes the same share of the channels of
every layer that it can prune (which leaves residual streams whole) by `apply_structured_wanda_pruning`, then refits
by `apply_pruning_finetune`. This library gets the same share of units of a fully connected network, and of others as
many multiply-adds as onnxsim left. Accuracy is that of the written file in onnxruntime, on 10 000 test images. A line
of benchmarks/results/onnx_peer.jsonl is a network, a share and a draw of the images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

import critical_neurons as cn
from critical_neurons.core.files import write_atomically
from critical_neurons.core.markdown import format_table
from critical_neurons.removal.metrics import count_macs
from critical_neurons_reproduction.datasets import LabelledImages
from distillation import CALIBRATION, PLAIN, clock, load_case
from distillation_page import TITLES
from front_page import RESULTS_PAGE, find_place
from storing import store_line

RESULTS = Path(__file__).parent / "results" / "onnx_peer.jsonl"
KEPT: Mapping[str, tuple[float, ...]] = {PLAIN: (0.5, 0.4, 0.3, 0.2), "resnet20": (0.75, 0.5), "vgg16": (0.7,)}
"""Shares of the channels that onnxsim keeps, by network."""

DRAWS: Mapping[str, tuple[int, ...]] = {PLAIN: (0, 1, 2, 3, 4), "resnet20": (0,), "vgg16": (0,)}
BATCH = 250
METHODS = ("original", "onnxsim", "onnxsim, refitted", "this library, refitted")
KEY = ("network", "kept", "draw")
TABLE = find_place("table of ONNX files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure the cells that are not stored yet")
    run.add_argument("--data", required=True, type=Path, help="folder with cifar10 and fashion_mnist")
    run.add_argument("--checkpoints", required=True, type=Path, help="folder with the trained weights")
    run.add_argument("--cache", required=True, type=Path, help="folder for decoded images and trained networks")
    run.add_argument("--network", choices=KEPT, action="append", help="repeatable; all by default")
    run.set_defaults(work=run_cells)
    commands.add_parser("page", help="write the table in docs/results.md").set_defaults(work=write_page)
    arguments = parser.parse_args()
    arguments.work(arguments)


def run_cells(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    done = {name_cell(line) for line in read_lines()}
    for network in arguments.network or KEPT:
        missing = [cell for cell in list_cells() if cell["network"] == network and name_cell(cell) not in done]
        if not missing:
            continue
        model, training, parts = load_case(network, arguments)
        for cell in missing:
            generator = torch.Generator().manual_seed(cell["draw"])
            inputs = training.inputs[torch.randperm(len(training), generator=generator)[:CALIBRATION]].contiguous()
            with TemporaryDirectory() as folder:
                file = Path(folder) / "original.onnx"
                cn.export(model, file, inputs[:2])
                store_line(
                    RESULTS, {**cell, "onnxsim": version("onnxsim"), **measure(file, cell, inputs, parts["test"])}
                )


def measure(file: Path, cell: Mapping[str, Any], inputs: Tensor, test: LabelledImages) -> dict[str, Any]:
    """Accuracies and processor seconds by method, and the share of the multiply-adds that onnxsim left."""
    import onnx
    import onnxsim

    original, sparsity = onnx.load(file), 1 - cell["kept"]
    batches = [{original.graph.input[0].name: some.numpy()} for some in inputs.split(BATCH)]
    pruned, pruning = clock(lambda: onnxsim.apply_structured_wanda_pruning(original, batches, sparsity=sparsity))
    refitted, refitting = clock(lambda: onnxsim.apply_pruning_finetune(original, pruned, batches))
    theirs, again, ours = (file.with_stem(name) for name in ("pruned", "refitted", "ours"))
    onnx.save(pruned, theirs)
    onnx.save(refitted, again)
    model = cn.from_onnx(file)
    macs = count_macs(cn.from_onnx(theirs), inputs[:1]) / count_macs(model, inputs[:1])
    budget = {"units": cell["kept"]} if cell["network"] == PLAIN else {"macs": macs}

    def compress() -> None:
        plan = cn.plan(cn.search(model, inputs, **budget, seed=cell["draw"]))
        smaller = cn.prune(model, plan, inputs, compensate="least_squares", seed=cell["draw"])
        cn.export(smaller, ours, inputs[:2])

    _, compressing = clock(compress)
    accuracy = [measure_file(each, test) for each in (file, theirs, again, ours)]
    seconds = [0.0, pruning, round(pruning + refitting, 1), compressing]
    return {
        "macs_kept": macs,
        "accuracy": dict(zip(METHODS, accuracy, strict=True)),
        "processor_seconds": dict(zip(METHODS, seconds, strict=True)),
    }


def measure_file(file: Path, test: LabelledImages) -> float:
    """The accuracy of an ONNX file in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    name = session.get_inputs()[0].name
    outputs = np.concatenate([session.run(None, {name: some.numpy()})[0] for some in test.inputs.split(BATCH)])
    return float((outputs.argmax(1) == test.labels.numpy()).mean())


def list_cells() -> Iterator[dict[str, Any]]:
    for network, shares in KEPT.items():
        for kept, draw in product(shares, DRAWS[network]):
            yield {"network": network, "kept": kept, "draw": draw, "images": CALIBRATION}


def tabulate(lines: list[dict[str, Any]]) -> list[str]:
    """A row for every network and share, with mean accuracies over the draws."""

    def name(line: Mapping[str, Any]) -> tuple[int, float]:
        return list(KEPT).index(line["network"]), -line["kept"]

    rows = []
    for _, found in groupby(sorted(lines, key=name), key=name):
        mine = list(found)
        means = (f"{100 * fmean(line['accuracy'][method] for line in mine):.2f}" for method in METHODS)
        macs = f"{fmean(line['macs_kept'] for line in mine):.0%}"
        rows.append([TITLES[mine[0]["network"]], f"{mine[0]['kept']:.0%}", macs, str(len(mine)), *means])
    header = ("network", "channels kept by onnxsim", "multiply-adds kept", "draws", *METHODS)
    return format_table(header, rows, numbers=range(1, len(header)))


def write_page(arguments: argparse.Namespace) -> None:
    text = "\n".join(tabulate(read_lines())) + "\n"
    write_atomically(RESULTS_PAGE, TABLE.sub(lambda _: text, RESULTS_PAGE.read_text()).encode())


def read_lines() -> list[dict[str, Any]]:
    return list(map(json.loads, RESULTS.read_text().splitlines())) if RESULTS.exists() else []


def name_cell(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in KEY)


if __name__ == "__main__":
    main()

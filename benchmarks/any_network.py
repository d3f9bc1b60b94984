"""Coverage: which public architectures this package and Torch-Pruning can prune, without changes to their code.

    python benchmarks/any_network.py run                           everything not stored yet
    python benchmarks/any_network.py run --only torch_pruning      one method
    python benchmarks/any_network.py run --only resnet18 --again   one architecture, stored or not
    python benchmarks/any_network.py page                          docs/any-network.md from the stored results

Every architecture and method is a line of benchmarks/results/any_network.jsonl. Networks are untrained: the question
is whether a method can prune them at all and the result still runs, not how accurate it is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import critical_neurons as cn
from any_network_page import TABLE, write_page
from architectures import ARCHITECTURES, BATCH, Architecture, Inputs, call, find_output_layers
from critical_neurons.core.costs import halve_macs
from critical_neurons.core.scores import spread_scores
from critical_neurons.core.structure import NO_UNIT, Structure
from critical_neurons.errors import CriticalNeuronsError
from critical_neurons.removal.metrics import count_parameters
from critical_neurons.removal.rows import is_whole
from critical_neurons_reproduction.experiments.cells import select_cells
from critical_neurons_reproduction.store import Cell, Store
from masked_reference import compute_the_same, prune_beside_masked

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "any-network.md"
VERSION = 2
"""Incremented when the same settings would give another result."""

RATIO = 0.3
"""Share of the channels of every group that Torch-Pruning removes."""

KEPT = 0.5
"""Share of the MACs that this package keeps at most: about what Torch-Pruning leaves of a plain network."""

SPARE = 0.05
"""If the smallest possible share is not this much below `KEPT`, half of the removable MACs are removed instead."""

DRAWS, EFFORT = 4, "quick"
"""Calibration examples of two inputs each, and the search effort of `cn.compress`."""

TIME_LIMIT = 120.0
"""Processor seconds per architecture and method."""

LARGE = ("inception_v3", "resnext50_32x4d", "se_resnet50", "unet", "unet_bilinear", "pix2pix_generator")
LARGE += ("retinanet_resnet18", "siamese")
LARGE_LIMIT = 600.0
"""Time limit of the search for the architectures in `LARGE`."""

WALL_LIMIT = 1800.0
"""Wall-clock seconds after which the process of an architecture and method is killed."""

Result = dict[str, Any]
Shrunk = tuple[nn.Module, Result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure everything not stored yet")
    run.add_argument("--only", action="append", default=[], help="part of names, such as ours or resnet18/ours")
    run.add_argument("--again", action="store_true", help="repeat stored measurements; the last line counts")
    commands.add_parser("page", help="write docs/any-network.md from the stored results")
    arguments = parser.parse_args()
    store = Store(RESULTS)
    try:
        if arguments.command == "page":
            write_page(store.find_all(TABLE), ARCHITECTURES, PAGE)
        else:
            run_cells(store, only=arguments.only, again=arguments.again)
    except CriticalNeuronsError as error:
        sys.exit(f"error: {error}")


def run_cells(store: Store, *, only: list[str], again: bool) -> None:
    torch.set_num_threads(1)
    chosen = select_cells(list_cells(), only)
    commit = find_commit()
    for cell in chosen if again else store.find_missing(chosen):
        name, method = cell.name.split("/")
        result = run_in_child(METHODS[method], ARCHITECTURES[name])
        store.add(cell, {**result, "commit": commit})
        print(f"{cell.name}: {result}", flush=True)


def find_commit() -> str:
    """The commit of the running code; with a plus if there are uncommitted changes."""

    def ask(*words: str) -> str:
        asked = ["git", "-C", str(RESULTS.parent.parent), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    return ask("rev-parse", "--short=12", "HEAD") + "+" * bool(ask("status", "--porcelain", "--", "src", "*.py"))


def list_cells() -> list[Cell]:
    """The slowest last, so that an interrupted run has most of them."""
    settings: dict[str, dict[str, Any]] = {
        "torch_pruning": {"version": version("torch-pruning"), "ratio": RATIO, "importance": "magnitude, L2"},
        "ours": {"kept": KEPT, "importance": "magnitude, L2"},
        "compress": {"kept": KEPT, "effort": EFFORT, "inputs": DRAWS * BATCH, "compensate": "least_squares"},
    }
    return [
        Cell(TABLE, f"{name}/{method}", {"harness": VERSION, "seconds": find_limit(name, method), **settings[method]})
        for method in METHODS
        for name in ARCHITECTURES
    ]


def find_limit(name: str, method: str) -> float:
    return LARGE_LIMIT if method == "compress" and name in LARGE else TIME_LIMIT


def run_in_child(method: Callable[[Architecture], Result], architecture: Architecture) -> Result:
    """Run a method in a separate process, so that a crash or lack of memory affects no other."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        most = int(2 * LARGE_LIMIT)  # the kernel kills what no exception stops
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        sender.send(method(architecture))

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        result: Result = (
            receiver.recv() if receiver.poll(WALL_LIMIT) else {"failed": f"stopped after {WALL_LIMIT:.0f} s"}
        )
    except EOFError:
        child.join()
        result = {"failed": f"its process ended with exit code {child.exitcode}"}
    child.kill()
    child.join()
    return result


def measure_torch_pruning(architecture: Architecture) -> Result:
    """Torch-Pruning as documented: output layers are ignored, the number of attention heads is given. Arguments with
    mutable defaults, which it writes to, get new dicts. The model's attributes are not repaired by hand."""

    def prune(model: nn.Module, inputs: Inputs) -> Shrunk:
        pruner = tp.pruner.BasePruner(
            model,
            inputs,
            tp.importance.MagnitudeImportance(p=2),
            pruning_ratio=RATIO,
            ignored_layers=find_output_layers(architecture, model),
            num_heads={model.get_submodule(name): heads for name, heads in architecture.heads.items()},
            in_channel_groups={},
            out_channel_groups={},
            forward_fn=call,
        )
        masked, decided = prune_beside_masked(pruner, model)
        return model, {"as_masked": compute_the_same(model, masked, inputs) if decided else None}

    return measure(architecture, prune)


def measure_ours(architecture: Architecture) -> Result:
    """Channel counts by `inspect`, and the size after magnitude pruning, the criterion that Torch-Pruning gets, too.
    `prune` itself checks that the result equals the masked network. The smaller network is also exported to ONNX,
    which `export` runs and compares."""

    def prune(model: nn.Module, inputs: Inputs) -> Shrunk:
        structure = cn.inspect(model, inputs)
        found = describe_structure(structure)
        if not structure.groups:
            return model, found
        plan, asked = plan_by_norm(model, structure)
        smaller = cn.prune(model, plan, inputs)
        return smaller, {**found, "asked": asked, "as_masked": True, "onnx": port(smaller, inputs)}

    return measure(architecture, prune)


def port(smaller: nn.Module, inputs: Inputs) -> Result:
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = cn.export(smaller, Path(folder) / "smaller.onnx", inputs)
    except CriticalNeuronsError as error:
        return {"failed": f"refused: {error}"}
    return {"bytes": found.bytes, "difference": found.difference}


def measure_compress(architecture: Architecture) -> Result:
    def compress(model: nn.Module, inputs: Inputs) -> Shrunk:
        given = join_examples(architecture)
        asked = choose_budget(cn.inspect(model, inputs))
        found = cn.compress(model, given, **asked, effort=EFFORT, onnx=False)
        return found.model, {"asked": asked, "as_masked": True}

    return measure(architecture, compress, find_limit(architecture.name, "compress"))


def describe_structure(structure: Structure) -> Result:
    removable = sum(int((layer.units != NO_UNIT).sum()) for layer in structure.layers)
    return {
        "channels": sum(layer.size for layer in structure.layers),
        "removable": removable,
        "units": structure.unit_count,
        "reasons": sorted({f"{layer.name}: {layer.reason}" for layer in structure.layers if layer.reason}),
    }


def plan_by_norm(model: nn.Module, structure: Structure) -> tuple[cn.Plan, dict[str, float]]:
    """Magnitude pruning: keep the units with the largest L2 norm over all their weights."""
    named, squares = dict(model.named_parameters()), np.zeros(structure.unit_count + 1)
    for each in structure.slices:
        if each.tensor in named and each.units.ndim == 1:
            values = named[each.tensor].detach().double().square().movedim(each.axis, 0)
            np.add.at(squares, each.units, values.reshape(len(each.units), -1).sum(1).numpy())
    per_unit = np.zeros(structure.unit_count)
    for group in structure.groups:
        order = group.units[np.argsort(squares[group.units], kind="stable")]
        per_unit[order] = (np.arange(len(group)) + 1) / len(group)
    asked = choose_budget(structure)
    unsolved: dict[str, Any] = {"objective": None, "bound": None, "gap": None, "seconds": 0.0, "logit_error": 0.0}
    scores = cn.Scores(
        values_by_layer=spread_scores(structure, per_unit),
        structure=structure,
        status=cn.Status.FEASIBLE,
        settings={},
        history=(),
        sizes={},
        **unsolved,
    )
    return cn.plan(scores, **asked), asked


def choose_budget(structure: Structure) -> dict[str, float]:
    """Half of the MACs; if less than half can be removed, half of what can; if no MACs can be removed, half of the
    parameters."""
    if not any(product.axes for product in structure.macs):
        return {"params": KEPT}
    halfway = halve_macs(structure)
    return {"macs": KEPT if 2 * halfway - 1 < KEPT - SPARE else halfway}


def join_examples(architecture: Architecture) -> Inputs:
    """Several examples concatenated; a single one if they cannot be."""
    many = [architecture.example(seed) for seed in range(DRAWS)]
    if is_whole(many[0]) or "graph" in architecture.inputs.__name__:
        return many[0]
    parts = zip(*(tree_leaves(each) for each in many), strict=True)
    return tree_map_only(Tensor, lambda _: torch.cat(next(parts)), many[0])


METHODS: dict[str, Callable[[Architecture], Result]] = {
    "torch_pruning": measure_torch_pruning,
    "ours": measure_ours,
    "compress": measure_compress,
}


def measure(
    architecture: Architecture, shrink: Callable[[nn.Module, Inputs], Shrunk], seconds: float | None = None
) -> Result:
    """The size before and after, or the failure: an error, outputs of another structure, nothing removed.

    `shrink` may change the model passed to it; it returns the smaller model and further results to store.
    """

    def work() -> Result:
        inputs = architecture.example()
        smaller, found = shrink(architecture.builder(), inputs)
        try:
            after = describe(smaller, inputs)
        except Exception as error:
            return {**found, "failed": f"does not run: {name_error(error)}"}
        outputs, expected = after.pop("outputs"), before["outputs"]
        if outputs != expected:
            return {**found, "failed": f"outputs are {outputs} where they were {expected}", "after": after}
        if after["parameters"] >= before["parameters"]:
            return {**found, "failed": "nothing was removed", "after": after}
        return {**found, "after": after}

    before = describe(architecture.builder(), architecture.example())
    return {"before": {name: before[name] for name in ("parameters", "macs")}, **attempt(work, seconds or TIME_LIMIT)}


def attempt(work: Callable[[], Result], seconds: float) -> Result:
    """The result within the time limit, or the error as text; with the processor seconds taken."""
    started = time.process_time()
    try:
        with time_limit(seconds), warnings.catch_warnings(action="ignore"):
            result = work()
    except CriticalNeuronsError as error:
        result = {"failed": f"refused: {error}"}
    except Exception as error:
        result = {"failed": name_error(error)}
    return {**result, "seconds": round(time.process_time() - started, 2)}


def describe(model: nn.Module, inputs: Inputs) -> Result:
    """Parameters, MACs for these inputs, and the structure of the outputs."""
    model.eval()
    with torch.no_grad():
        leaves, form = tree_flatten(call(model, inputs))
    shapes = [list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    return {
        "parameters": count_parameters(model),
        "macs": count_macs(model, inputs),
        "outputs": f"{form.num_leaves} of {shapes}",
    }


def count_macs(model: nn.Module, inputs: Inputs) -> int:
    """By torch's FLOP counter: matrix products and convolutions. Fused encoder layers, recurrent layers and
    attention, which it does not know, are decomposed for it."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # about flags that are restored afterwards
            torch.backends.mkldnn.flags(enabled=not any(isinstance(each, nn.RNNBase) for each in model.modules())),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return int(counter.get_total_flops()) // 2


def name_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} processor seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # repeated: the code may catch the first signal
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    main()

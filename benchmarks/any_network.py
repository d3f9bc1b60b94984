"""What can be made smaller: public architectures, as they are written, by this package and by Torch-Pruning.

    python benchmarks/any_network.py run                           what is not stored yet
    python benchmarks/any_network.py run --only torch_pruning      one of the two
    python benchmarks/any_network.py run --only resnet18 --again   one architecture, stored or not
    python benchmarks/any_network.py page                          docs/any-network.md from what is stored

Every architecture and method is a line of benchmarks/results/any_network.jsonl. Networks are untrained: the question
is which of them a method can make smaller at all, and whether the result still runs, not how accurate it is.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

import critical_neurons as cn
from any_network_page import TABLE, write_page
from architectures import ARCHITECTURES, Architecture, Inputs, call, find_output_layers
from critical_neurons.errors import CriticalNeuronsError
from critical_neurons.removal.metrics import count_parameters
from critical_neurons_reproduction.experiments.cells import select_cells
from critical_neurons_reproduction.store import Cell, Store
from masked_reference import compute_the_same, prune_beside_masked

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "any-network.md"
VERSION = 1
"""Raised when the same settings would give another result."""

RATIO = 0.3
"""Of the channels of every group, what Torch-Pruning removes."""

MACS = 0.5
"""Of the multiply-adds, what this package keeps at most: about what Torch-Pruning leaves of a plain network."""

DRAWS = 8
"""Examples of two inputs each, which this package chooses units by."""

TIME_LIMIT = 60.0
"""Processor seconds for one architecture and method."""

Result = dict[str, Any]
Shrunk = tuple[nn.Module, Result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure what is not stored yet")
    run.add_argument("--only", action="append", default=[], help="parts of a name, such as ours or resnet18/ours")
    run.add_argument("--again", action="store_true", help="also what is stored; of two lines the last counts")
    commands.add_parser("page", help="write docs/any-network.md from what is stored")
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
    for cell in chosen if again else store.find_missing(chosen):
        name, method = cell.name.split("/")
        result = METHODS[method](ARCHITECTURES[name])
        store.add(cell, result)
        print(f"{cell.name}: {result}", flush=True)


def list_cells() -> list[Cell]:
    settings = {
        "torch_pruning": {"version": version("torch-pruning"), "ratio": RATIO, "importance": "magnitude, L2"},
        "ours": {"macs": MACS},
    }
    return [
        Cell(TABLE, f"{name}/{method}", {"harness": VERSION, **settings[method]})
        for name in ARCHITECTURES
        for method in METHODS
    ]


def measure_torch_pruning(architecture: Architecture) -> Result:
    """As its documentation has it: layers that make the outputs are left alone, attention is told its heads, dicts of
    its own for the arguments whose defaults it writes to. The model's attributes are not repaired by hand."""

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
    """What `inspect` says of the units, and what a search makes of the network; `compress` would ask for labels."""

    def compress(model: nn.Module, inputs: Inputs) -> Shrunk:
        many = [architecture.example(seed) for seed in range(DRAWS)]
        given = torch.cat(many) if isinstance(inputs, Tensor) else inputs
        plan = cn.plan(cn.search(model, given, macs=MACS))
        return cn.prune(model, plan, given, compensate="least_squares"), {}

    def inspect(model: nn.Module, inputs: Inputs) -> Result:
        layers = cn.inspect(model, inputs).layers
        kept = [layer for layer in layers if layer.reason]
        return {
            "units": sum(layer.size for layer in layers),
            "kept_units": sum(layer.size for layer in kept),
            "reasons": sorted({f"{layer.name}: {layer.reason}" for layer in kept}),
        }

    return {**measure(architecture, compress), "inspected": attempt(architecture, inspect)}


METHODS: dict[str, Callable[[Architecture], Result]] = {
    "torch_pruning": measure_torch_pruning,
    "ours": measure_ours,
}


def measure(architecture: Architecture, shrink: Callable[[nn.Module, Inputs], Shrunk]) -> Result:
    """The size before and after, or why there is no after: an error, outputs of another form, nothing removed.

    `shrink` may change the model it is given, and gives what else it found.
    """

    def work(model: nn.Module, inputs: Inputs) -> Result:
        smaller, found = shrink(model, inputs)
        try:
            after = describe(smaller, inputs)
        except Exception as error:
            return {"failed": f"does not run: {name_error(error)}"}
        outputs, expected = after.pop("outputs"), before["outputs"]
        if outputs != expected:
            return {"failed": f"outputs are {outputs} where they were {expected}", "after": after}
        if after["parameters"] >= before["parameters"]:
            return {"failed": "nothing was removed", "after": after}
        return {"after": after, **found}

    before = describe(architecture.builder(), architecture.example())
    result = attempt(architecture, work)
    return {"before": {name: before[name] for name in ("parameters", "macs")}, **result}


def attempt(architecture: Architecture, work: Callable[[nn.Module, Inputs], Result]) -> Result:
    """What the work gives within the time limit, or its error as text; with the seconds it took."""
    started = time.perf_counter()
    try:
        with time_limit(TIME_LIMIT), warnings.catch_warnings(action="ignore"):
            result = work(architecture.builder(), architecture.example())
    except CriticalNeuronsError as error:
        result = {"failed": f"refused: {error}"}
    except Exception as error:
        result = {"failed": name_error(error)}
    return {**result, "seconds": round(time.perf_counter() - started, 2)}


def describe(model: nn.Module, inputs: Inputs) -> Result:
    """Parameters, multiply-adds for the inputs as they are, and the form of the outputs."""
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
    """By torch's counter, of matrix products and convolutions. What it does not know is taken apart for it: fused
    encoder layers, fused recurrent layers, fused attention."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # of flags that are put back as they were
            torch.backends.mkldnn.flags(enabled=False),
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
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    main()

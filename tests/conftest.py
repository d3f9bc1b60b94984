"""What every test can rely on.

torch and the library are imported where they are used: a process that only hands out tests needs neither.
"""

import gc
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

gc.disable()  # while all is imported and collected

settings.register_profile("quick", max_examples=5, deadline=None)
settings.register_profile("thorough", max_examples=100, deadline=None)
settings.load_profile("quick")  # `make slow` takes the other


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests over the zoo take its core, or those that they name as differing for their law; the rest of the grid is
    slow, unless how a network is written matters."""
    from tests.zoo import CORE, ZOO

    grids = defaultdict[str, dict[str, list[pytest.Item]]](lambda: defaultdict(list))
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if isinstance(name, str) and name in ZOO and not item.get_closest_marker("syntax"):
            grids[item.nodeid.partition("[")[0]][name].append(item)
    for by_name in grids.values():
        named = next(iter(by_name.values()))[0].get_closest_marker("networks")
        if named or len(by_name) > len(CORE):
            taken = set(named.args if named else CORE)
            if named and not taken <= by_name.keys():
                raise pytest.UsageError(f"networks: {', '.join(sorted(taken - by_name.keys()))} not in the grid")
            for name in by_name.keys() - taken:
                for item in by_name[name]:
                    item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look through it again and again, nor as
    often as by default, which takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _latencies_are_sampled_little() -> Iterator[None]:
    """No test is about how fast a network is: a few samples show that it was timed."""
    from critical_neurons.removal.metrics import time_in_turns

    with pytest.MonkeyPatch.context() as patch:

        def sample_little(*calls: Any, repeats: int) -> list[list[float]]:
            return time_in_turns(*calls, repeats=min(3, repeats))

        patch.setattr("critical_neurons.api.compare.time_in_turns", sample_little)
        yield


@pytest.fixture
def short_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates descend in fewer steps, for tests that ask nothing of how good the choice is."""
    from critical_neurons.selection.effort import EFFORTS

    monkeypatch.setitem(EFFORTS, "quick", replace(EFFORTS["quick"], steps=20))


@pytest.fixture(scope="session", autouse=True)
def _operators_are_read_once() -> Iterator[None]:
    """Torch reads all operators that it can export to ONNX anew for every file, which takes longer than the export of
    a tiny network. Here the first file reads them for all."""
    import torch

    with pytest.MonkeyPatch.context() as patch:

        def export_by_one_table(*arguments: Any, **settings: Any) -> Any:
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            if not hasattr(ONNXRegistry.from_torchlib, "cache_info"):
                patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
            return export(*arguments, **settings)

        export = torch.onnx.export
        patch.setattr(torch.onnx, "export", export_by_one_table)
        yield


@pytest.fixture(scope="session", autouse=True)
def _command_line_is_built_once() -> Iterator[None]:
    """Typer reads the signatures of all commands anew for every call."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here and in child processes, even where the suite was started without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

"""Tiny data, a shortened schedule, and cells that are run once for all tests that look at them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save

from critical_neurons.io.builtin_models import vgg16
from critical_neurons.parallel.threads import on_threads
from critical_neurons_reproduction.datasets import PICTURES, digest_pictures
from critical_neurons_reproduction.experiments.cells import FOLDERS, GIVEN, Schedule, list_cells, select_cells
from critical_neurons_reproduction.experiments.runner import run_cells
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.store import Cell, Record, Store
from critical_neurons_reproduction.training import build_model
from tests.blocks import write_blocks

TINY = Schedule(epochs=4, narrow=32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As cells are run: what a test does by hand is then the same to the last bit."""
    with on_threads(1):
        yield


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blocks(tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="session", autouse=True)
def _tiny_pictures(blocks: Path, cache: Path) -> Iterator[None]:
    """Cells are for the tiny data here."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in FOLDERS.values():
            patch.setitem(PICTURES, folder, digest_pictures(blocks / folder, cache=cache))
        yield


@pytest.fixture(scope="session")
def cache(blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all pictures decoded, so that other processes need not."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("hugging_face"))
        for data in FOLDERS:
            Runs(folder, blocks, cache=folder).load(data)
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a tiny VGG-16; cells are for these here."""
    path = tmp_path_factory.mktemp("weights") / "vgg16.safetensors"
    path.write_bytes(save(build_model(lambda: vgg16(narrow=TINY.narrow), 5).state_dict()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GIVEN, "digest", hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        yield path


@pytest.fixture(scope="session")
def runs(blocks: Path, cache: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Kept for the session: every network is trained once."""
    return Runs(tmp_path_factory.mktemp("runs"), blocks, TINY, cache, weights=weights)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="session")
def find() -> Callable[..., list[Cell]]:
    def find_cells(table: str, *only: str, seed: int = 0, schedule: Schedule = TINY) -> list[Cell]:
        found = select_cells(list_cells(table, seeds=[seed], profile="quick", schedule=schedule), only)
        return [cell for cell in found if "/authors/" not in cell.name or any("authors" in text for text in only)]

    return find_cells


@pytest.fixture(scope="session")
def finish(runs: Runs, store: Store, find: Callable[..., list[Cell]]) -> Callable[..., Record]:
    """The result of one cell, run at the first call."""

    def finish_cell(table: str, only: str) -> Record:
        (cell,) = find(table, only)
        assert run_cells([cell], store, runs) == []
        record = store.find(cell)
        assert record is not None
        return record

    return finish_cell

"""Runner: run cells in parallel and store their results. Each runs on one thread, so that results do not depend on
the number of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from critical_neurons.core.environment import describe_machine
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.errors import InvalidSettingError, MissingExtraError, OutputError
from critical_neurons.parallel import SendMessage, Task, open_executor
from critical_neurons_reproduction.experiments.cells import (
    OWN_RECIPES,
    Schedule,
    Settings,
    describe_schedule,
    find_data_sets,
)
from critical_neurons_reproduction.experiments.deep import find_transferred, run_deep, run_parts, run_replay
from critical_neurons_reproduction.experiments.epochs import run_epochs
from critical_neurons_reproduction.experiments.pruning import run_comparison, run_removal
from critical_neurons_reproduction.experiments.transfer import run_transfer
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.store import Cell, Store

CellRunner: TypeAlias = Callable[[Cell, Runs], Settings]

RUNNERS: Mapping[str, CellRunner] = {
    "removal": run_removal,
    "comparison": run_comparison,
    "decoupled": run_deep,
    "transfer": run_transfer,
    "epochs": run_epochs,
    "given": run_deep,
    "parts": run_parts,
    "replay": run_replay,
}
"""The function that runs a cell, by its kind."""


@dataclass(frozen=True, order=True)
class Reference:
    """A trained network that cells start from; a VGG-16 with its maps divided by `narrow`."""

    network: str
    data: str
    seed: int
    narrow: int = 1

    @property
    def name(self) -> str:
        narrowed = f"/narrow-{self.narrow}" if self.narrow > 1 else ""
        return f"{self.data}/{self.network}{narrowed}/seed-{self.seed}"


def run_cells(
    cells: Collection[Cell],
    store: Store,
    runs: Runs,
    *,
    workers: Workers = HERE,
    finished: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Run the cells missing from the store and add each result as it is ready. Returns what failed, with the reason.

    The reference networks are trained first; cells whose reference failed are skipped. `finished` is called with the
    name of every finished cell and training, `runs.on_epoch` after every epoch. The run ends if a result cannot be
    written or the workers are lost; finished cells stay stored.
    """
    _check_schedules(cells, runs.schedule)
    references, missing = find_work(cells, store, runs)
    known = {cell.key: find_measured(cell, store) for cell in missing}
    for data, digest in sorted({item for cell in missing for item in cell.settings["pictures"].items()}):
        runs.check_pictures(data, digest)
    try:
        import threadpoolctl  # noqa: F401  without it, results would depend on the number of threads
    except ImportError as error:
        raise MissingExtraError("threadpoolctl", "reproduce") from error
    sent = replace(_send(runs), measured={key: found for key, found in known.items() if found is not None})
    trainings = [(each.name, partial(_train, each, sent)) for each in references]
    failed = _work(trainings, len(trainings), runs, workers, lambda name, result: finished(name))
    possible = [
        cell
        for cell in missing
        if not any(each.name in failed for each in find_references(cell, runs, known[cell.key]))
    ]
    by_name = {f"{cell.table} {cell.name}": cell for cell in possible}

    def keep(name: str, result: tuple[Settings, dict[str, Any]]) -> None:
        store.add(by_name[name], *result)
        finished(name)

    # Skip cells that another run has stored by the time a worker is free.
    tasks = ((name, partial(_run_cell, cell, sent)) for name, cell in by_name.items() if store.find_missing([cell]))
    failed |= _work(tasks, len(possible), runs, workers, keep)
    return [f"{name}: {reason}" for name, reason in failed.items()]


def find_work(cells: Collection[Cell], store: Store, runs: Runs) -> tuple[list[Reference], list[Cell]]:
    """The reference networks to train, and the cells missing from the store."""
    missing = store.find_missing(cells)
    found = (each for cell in missing for each in find_references(cell, runs, find_measured(cell, store)))
    return list(dict.fromkeys(found)), missing


def find_measured(cell: Cell, store: Store) -> float | None:
    """The accuracy of the unpruned network on a cell's target, if table-2 has it for the same training."""
    settings = cell.settings
    if "target" not in settings:
        return None
    wanted = {
        "network": settings["network"],
        "data": settings["target"],
        "recipe": settings["retraining"],
        "seed": settings["seed"],
        "pictures": {settings["target"]: settings["pictures"][settings["target"]]},
    }
    for record in store.find_all("table-2"):
        if record.cell.schedule == cell.schedule and wanted.items() <= record.cell.settings.items():
            return float(record.result["reference"])
    return None


def find_references(cell: Cell, runs: Runs, measured: float | None) -> Iterator[Reference]:
    """The networks to train before a cell can run. The target's network is needed only for its accuracy, which may be
    `measured` already; a transferred VGG-16 only for its scores, which may be stored."""
    settings = cell.settings
    untrained = settings.get("initial") or settings.get("incremental") or settings["kind"] in OWN_RECIPES
    scored = "target" in settings and settings["network"] == "vgg16" and find_transferred(settings, runs)
    if not untrained and not scored:
        yield Reference(settings["network"], settings["data"], settings["seed"], settings.get("narrow", 1))
    if "target" in settings and measured is None:
        yield Reference(settings["network"], settings["target"], settings["seed"])


def _check_schedules(cells: Collection[Cell], schedule: Schedule) -> None:
    for cell in cells:
        described = describe_schedule(cell.settings, schedule)
        if cell.schedule != described:
            raise InvalidSettingError(
                f"{cell.table} {cell.name}: listed for {cell.schedule or 'the whole schedule'}, to be run by "
                f"{described or 'the whole one'}. List and run cells with the same schedule."
            )


def _train(reference: Reference, runs: Runs, send: SendMessage) -> None:
    own = _placed(runs, send).narrowed(reference.narrow)
    own.train_reference(reference.network, reference.data, reference.seed)


def _run_cell(cell: Cell, runs: Runs, send: SendMessage) -> tuple[Settings, dict[str, Any]]:
    """The result, and the machine it was made on."""
    own = _placed(runs, send)
    started = time.perf_counter()
    result = RUNNERS[cell.settings["kind"]](cell, own)
    seconds = time.perf_counter() - started
    images = {name: own.load(name).test.digest for name in find_data_sets(cell.settings)}
    return {**result, "seconds": seconds, "test_images": images}, describe_machine()


def _placed(runs: Runs, send: SendMessage) -> Runs:
    return replace(runs, on_epoch=lambda training, done, total: send((training, done, total)))


def _send(runs: Runs) -> Runs:
    """A copy to send to another process: absolute paths, as its directory may differ, and no `on_epoch`."""
    data = None if runs.data is None else runs.data.expanduser().absolute()
    weights = None if runs.weights is None else runs.weights.expanduser().absolute()
    scores = None if runs.scores is None else runs.scores.absolute()
    folder = runs.folder.absolute()
    return replace(runs, folder=folder, data=data, weights=weights, scores=scores, on_epoch=_ignore_epoch)


def _ignore_epoch(training: str, done: int, total: int) -> None: ...


def _work(
    tasks: Iterable[tuple[str, Task]],
    count: int,
    runs: Runs,
    workers: Workers,
    take: Callable[[str, Any], None],
) -> dict[str, str]:
    """Run the tasks and pass each result to `take`. Returns those that failed, with the reason."""
    failed: dict[str, str] = {}
    with open_executor(workers, most=count, on_message=lambda name, message: runs.on_epoch(*message)) as executor:
        for done in executor.run(tasks):
            if isinstance(done.error, OutputError):
                raise done.error
            if done.error is not None:
                failed[done.name] = str(done.error)
            else:
                take(done.name, done.result)
    return failed

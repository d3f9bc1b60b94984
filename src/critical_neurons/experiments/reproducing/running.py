"""Running: cells to lines of the store, several at once, each on one thread, so that results are the same for any
number of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process
from typing import Any, TypeAlias

from critical_neurons.errors import CriticalNeuronsError, InvalidSettingError, MissingExtraError, OutputError
from critical_neurons.experiments.reproducing.cells import Schedule, Settings, describe_schedule
from critical_neurons.experiments.reproducing.following import run_epochs
from critical_neurons.experiments.reproducing.removing import run_comparison, run_decoupled, run_removal
from critical_neurons.experiments.reproducing.runs import Runs, Tell, find_data
from critical_neurons.experiments.reproducing.transferring import run_transfer
from critical_neurons.experiments.store import Cell, Store
from critical_neurons.measuring import on_threads

Runner: TypeAlias = Callable[[Cell, Runs], Settings]

RUNNERS: Mapping[str, Runner] = {
    "removal": run_removal,
    "comparison": run_comparison,
    "decoupled": run_decoupled,
    "transfer": run_transfer,
    "epochs": run_epochs,
}
"""By the kind of a cell."""


@dataclass(frozen=True, order=True)
class Reference:
    """A trained network that cells begin with."""

    network: str
    data: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}/{self.network}/seed-{self.seed}"


def run_cells(
    cells: Collection[Cell],
    store: Store,
    runs: Runs,
    *,
    jobs: int = 1,
    finished: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Run the cells that the store has not, and add each as it is done. Gives what failed, with the reason; cells are
    left out where a network they begin with failed.

    The networks they begin with are trained first. `finished` is told of all that is done, `runs.tell` of every
    epoch. A result that cannot be written ends the run.
    """
    if not jobs >= 1:
        raise InvalidSettingError(f"--jobs: found {jobs}. Accepted: at least one.")
    _check_schedules(cells, runs.schedule)
    references, missing = find_work(cells, store)
    if runs.data is not None:
        for data in sorted({data for cell in missing for data in find_data_sets(cell.settings)}):
            find_data(runs.data, data)
    failed = _run_all({each.name: partial(_train, each) for each in references}, runs, jobs, finished)
    possible = [cell for cell in missing if not any(each.name in failed for each in find_references(cell.settings))]
    tasks = {f"{cell.table} {cell.name}": partial(_run_cell, cell, store) for cell in possible}
    failed |= _run_all(tasks, runs, jobs, finished)
    return [f"{name}: {reason}" for name, reason in failed.items()]


def find_work(cells: Collection[Cell], store: Store) -> tuple[list[Reference], list[Cell]]:
    """The cells that the store has not, and the networks they begin with."""
    missing = store.find_missing(cells)
    return list(dict.fromkeys(each for cell in missing for each in find_references(cell.settings))), missing


def find_references(settings: Settings) -> Iterator[Reference]:
    """What is trained before a cell can be run."""
    if not (settings.get("initial") or settings.get("incremental")):
        yield Reference(settings["network"], settings["data"], settings["seed"])
    if "target" in settings:
        yield Reference(settings["network"], settings["target"], settings["seed"])


def find_data_sets(settings: Settings) -> list[str]:
    return [settings[each] for each in ("data", "target") if each in settings]


def _check_schedules(cells: Collection[Cell], schedule: Schedule) -> None:
    for cell in cells:
        described = describe_schedule(cell.settings, schedule)
        if cell.schedule != described:
            raise InvalidSettingError(
                f"{cell.table} {cell.name}: listed for {cell.schedule or 'the whole schedule'}, to be run by "
                f"{described or 'the whole one'}. List and run cells by the same schedule."
            )


def count_workers(jobs: int) -> int:
    """No more than there are cores."""
    return min(jobs, os.cpu_count() or 1)


def _train(reference: Reference, runs: Runs) -> None:
    runs.train_reference(reference.network, reference.data, reference.seed)


def _run_cell(cell: Cell, store: Store, runs: Runs) -> None:
    if not store.find_missing([cell]):  # another run was faster
        return
    started = time.perf_counter()
    result = RUNNERS[cell.settings["kind"]](cell, runs)
    seconds = time.perf_counter() - started
    images = {name: runs.load(name).test.digest for name in find_data_sets(cell.settings)}
    store.add(cell, {**result, "seconds": seconds, "test_images": images})


def _run_all(
    tasks: Mapping[str, Callable[[Runs], None]], runs: Runs, jobs: int, finished: Callable[[str], None]
) -> dict[str, str]:
    """The tasks that failed, and why."""
    try:
        import threadpoolctl  # noqa: F401
        from joblib import Parallel, delayed
    except ImportError as error:
        raise MissingExtraError(error.name or "joblib", "reproduce") from error
    failed: dict[str, str] = {}
    workers = min(count_workers(jobs), max(1, len(tasks)))
    with _hearing(runs.tell, workers) as tell:
        told = replace(runs, tell=tell)
        work = Parallel(n_jobs=workers, return_as="generator_unordered")
        for name, failure in work(delayed(_attempt)(name, task, told) for name, task in tasks.items()):
            if failure is None:
                finished(name)
            else:
                failed[name] = failure
    return failed


def _attempt(name: str, task: Callable[[Runs], None], runs: Runs) -> tuple[str, str | None]:
    from threadpoolctl import threadpool_limits

    if parent_process() is not None:  # Ctrl-C reaches all processes; the first one ends the others
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with on_threads(1), threadpool_limits(1):
            task(runs)
    except OutputError:
        raise
    except CriticalNeuronsError as error:
        return name, str(error)
    return name, None


@contextmanager
def _hearing(tell: Tell, workers: int) -> Iterator[Tell]:
    """What other processes can call in place of `tell`, which is then called in this one."""
    if workers == 1:
        yield tell
        return
    from multiprocessing import Manager

    with Manager() as manager:
        news: Any = manager.Queue()
        listener = threading.Thread(target=_pass_on, args=(news, tell), daemon=True)
        listener.start()
        try:
            yield partial(_put, news)
        finally:
            news.put(None)
            listener.join()


def _put(news: Any, what: str, done: int, of: int) -> None:
    news.put((what, done, of))


def _pass_on(news: Any, tell: Tell) -> None:
    while (heard := news.get()) is not None:
        tell(*heard)

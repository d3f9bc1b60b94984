"""A Dask cluster of separate processes on this machine, whose members can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 120.0
"""After which a cluster that is not there will not come."""

IMPORTED = ["distributed.cli.dask_scheduler", "distributed.cli.dask_worker", "critical_neurons.api", "tests.tasks"]
"""What takes most of the time of a start: processes are forked from one that has imported it."""


class Cluster:
    """A scheduler and workers, one thread each, without the nannies that would start them again."""

    def __init__(self, folder: Path, workers: int, *, allowed_failures: int = 1) -> None:
        """A task whose workers ended more often than allowed is given up."""
        self._folder, self._stack, self._allowed = folder, ExitStack(), allowed_failures
        self._file = folder / "scheduler.json"
        try:
            self._start_all(workers)
        except BaseException:
            self._stack.close()
            raise

    def _start_all(self, workers: int) -> None:
        self.scheduler = self._start(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", self._file
        )
        wait_until(lambda: self._file.exists() and self._file.read_text().endswith("}"))  # it is not written at once
        self.address: str = json.loads(self._file.read_text())["address"]
        self.workers = [self.start_worker() for _ in range(workers)]
        wait_until(lambda: self.count_workers() == workers)

    def start_worker(self, *first_on_path: Path) -> BaseProcess | subprocess.Popen[bytes]:
        """With folders to look for packages in first, as if other versions were installed there."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", self._folder)
        if first_on_path:
            return self._start_anew("worker", self.address, *options, path=first_on_path)
        return self._start("worker", self.address, *options)

    def count_workers(self) -> int:
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:
            return len(client.nthreads())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, what: str, *options: object) -> BaseProcess:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(IMPORTED)
        process = forks.Process(target=serve, args=(what, [*map(str, options)], self._folder, self._allowed))
        process.start()
        self._stack.callback(process.join)
        self._stack.callback(process.kill)
        return process

    def _start_anew(self, what: str, *options: object, path: tuple[Path, ...]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT / "src", ROOT / "reproduction" / "src", ROOT])),
            "HOME": str(self._folder),
        }
        log = self._stack.enter_context((self._folder / f"{what}.log").open("ab"))
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *map(str, options)]
        process = subprocess.Popen(command, env=environment, cwd=self._folder, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def serve(what: str, options: list[str], folder: Path, allowed_failures: int) -> None:
    """A scheduler or a worker, whatever Dask's settings are for whoever runs the tests."""
    import dask

    with (folder / f"{what}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    dask.config.refresh(paths=[], env={"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(allowed_failures)})
    import_module(f"distributed.cli.dask_{what}").main(options, standalone_mode=False)


def wait_until(holds) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)

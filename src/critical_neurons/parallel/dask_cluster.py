"""Dask cluster: tasks on the workers of a Dask cluster. The only file that imports distributed.

Tasks are submitted to the client itself, since joblib's backend for Dask does not notice a failed task and waits
for it for ever.
"""

from __future__ import annotations

import logging
import pickle
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from critical_neurons.core.environment import describe_versions, digest_source
from critical_neurons.errors import MissingExtraError, WorkersError
from critical_neurons.parallel.executor import Done, OnMessage, Task, attempt, explain_unpicklable, settle_threads

try:
    import dask
    from distributed import Client, Future, get_worker
    from distributed.comm import CommClosedError
    from distributed.scheduler import KilledWorker
except ImportError as missing:
    raise MissingExtraError(missing.name or "distributed", "dask") from missing

CONNECT_SECONDS = 10.0
WAIT_SECONDS = 60.0
"""How long a cluster may be without workers."""

LOOK_SECONDS = 0.5
"""Between two checks of the cluster: whether it is there, and how many workers it has."""

PACKAGES = ("torch", "numpy", "scipy", "highspy")
"""Packages that results depend on, besides Python and this one."""

LOGS = ("distributed", "distributed.client", "tornado", "tornado.application")
"""Loggers of Dask and of what it is built on."""

KEPT = "What is finished is kept."

_one_at_a_time = threading.Lock()
"""A worker runs one task at a time, however many Dask gives it, since torch's generator and BLAS's threads belong to
the whole process."""


def describe_worker() -> dict[str, str]:
    """The versions that a worker must share with the process that sends it tasks."""
    versions = describe_versions(*PACKAGES)
    return {
        **versions,
        "python": versions["python"].rpartition(".")[0],
        "critical_neurons": f"{versions.get('critical_neurons', 'unknown')} (source {digest_source()[:8]})",
    }


class Cluster:
    def __init__(self, client: Client, scheduler: str, threads: int) -> None:
        self._client, self._scheduler, self._threads = client, scheduler, threads
        self._versions = describe_worker()
        self._under_way: dict[Future, str] = {}
        self._seen = time.monotonic()
        self.topic = f"critical_neurons-{secrets.token_hex(8)}"

    @property
    def slots(self) -> int:
        """The cluster may grow and shrink; for a while it may have no workers at all."""
        with self._noticing_loss():
            count = len(self._client.nthreads())
        if count:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > WAIT_SECONDS:
            raise WorkersError(
                f"{self._scheduler}: has had no workers for {WAIT_SECONDS:.0f} seconds. {KEPT} Start some with: "
                f"dask worker {self._scheduler} --nthreads 1"
            )
        return max(1, count)

    def run(self, tasks: Iterable[tuple[str, Task]]) -> Iterator[Done]:
        try:
            yield from self._run(iter(tasks))
        finally:
            self.give_up()

    def _run(self, left: Iterator[tuple[str, Task]]) -> Iterator[Done]:
        ended: queue.Queue[Future] = queue.Queue()
        while True:
            for _ in range(self.slots - len(self._under_way)):
                following = next(left, None)
                if following is None:
                    break
                self._submit(*following, ended)
            if not self._under_way:
                return
            try:
                future = ended.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            done = self._collect(future)
            if done is None:  # lost with its worker, and run again
                future.add_done_callback(ended.put)
            else:
                del self._under_way[future]
                yield done

    def check_workers(self) -> None:
        """Check the present workers."""
        with self._noticing_loss():
            answers = self._client.run(describe_worker, on_error="return")
        for address, answer in sorted(answers.items()):
            if isinstance(answer, Exception):
                raise WorkersError(
                    f"worker {address}: cannot report its versions ({type(answer).__name__}: {answer}). Install "
                    f"critical_neurons {self._versions['critical_neurons']} with the extra dask there."
                )
            _check_versions(address, answer, self._versions)

    def wait_for_workers(self) -> None:
        """Submit a task if there are none: adaptive clusters start workers only for work."""
        try:
            if not self._client.nthreads():
                self._client.submit(describe_worker, pure=False).result(timeout=WAIT_SECONDS)
        except TimeoutError:
            raise WorkersError(
                f"{self._scheduler}: has no workers, and none came in {WAIT_SECONDS:.0f} seconds. Start some with: "
                f"dask worker {self._scheduler} --nthreads 1"
            ) from None

    def give_up(self) -> None:
        """Cancel all tasks; a running one stops at its next message."""
        if self._under_way and self._client.status == "running":
            self._client.cancel(list(self._under_way))
        self._under_way.clear()

    def _submit(self, name: str, task: Task, ended: queue.Queue[Future]) -> None:
        key = f"critical_neurons {name} {secrets.token_hex(8)}"
        with self._noticing_loss():
            try:
                future = self._client.submit(
                    _run_there, name, task, self._threads, self._versions, self.topic, key=key, pure=False
                )
            except (TypeError, pickle.PicklingError) as error:
                raise explain_unpicklable(error) from error
        self._under_way[future] = name
        future.add_done_callback(ended.put)

    def _collect(self, future: Future) -> Done | None:
        """None if the task has not finished yet."""
        name = self._under_way[future]
        with self._noticing_loss():
            try:
                done: Done = future.result(timeout=CONNECT_SECONDS)
            except TimeoutError:
                if future.status != "error":
                    return None
                raise
            except KilledWorker as error:
                return Done(name, error=_explain_killed(error))
            except WorkersError:
                raise
            except Exception:
                self.check_workers()  # different versions would be the reason
                raise
        return done

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the connection may be gone before the client knows
            if self._client.status != "running" or isinstance(error, CommClosedError):
                raise self._lost() from error
            raise
        if self._client.status != "running":
            raise self._lost()

    def _lost(self) -> WorkersError:
        return WorkersError(
            f"{self._scheduler}: the scheduler was lost. {KEPT} Start it again, and run the same again."
        )


@contextmanager
def join_cluster(scheduler: str, threads: int, on_message: OnMessage) -> Iterator[Cluster]:
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError, AssertionError) as error:  # Dask asserts that its event loop starts
        why = str(error) or "Dask's event loop did not start"
        raise WorkersError(
            f"scheduler: no answer from {scheduler!r} within {CONNECT_SECONDS:.0f} seconds ({why}). Accepted: the "
            "address of a running Dask scheduler, as tcp://host:8786. Start one with: dask scheduler"
        ) from error
    cluster = Cluster(client, scheduler, threads)
    # Every task contains its network, so that any worker can be lost; Dask would warn of the size.
    with _quiet(), client, dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
        cluster.wait_for_workers()
        cluster.check_workers()
        client.subscribe_topic(cluster.topic, lambda event: on_message(*pickle.loads(event[1])))
        try:
            yield cluster
        finally:
            cluster.give_up()


def _run_there(name: str, task: Task, threads: int, versions: Mapping[str, str], topic: str) -> Done:
    worker = get_worker()
    _check_versions(worker.address, describe_worker(), versions)
    if threads > worker.state.nthreads:
        raise WorkersError(
            f"worker {worker.address}: has {worker.state.nthreads} threads, where threads={threads} asks for more. "
            f"Start workers with --nthreads {threads}, or leave threads out."
        )
    key = worker.get_current_task()

    def send(message: Any) -> None:
        known = worker.state.tasks.get(key)
        if known is None or known.state == "cancelled":
            raise KeyboardInterrupt
        worker.log_event(topic, pickle.dumps((name, message)))

    with _one_at_a_time:
        settle_threads(threads)
        try:
            return attempt(name, task, send)
        except KeyboardInterrupt:  # its result is not wanted; raised from here it would end the worker
            return Done(name, error=WorkersError("given up"))


def _check_versions(address: str, found: Mapping[str, str], needed: Mapping[str, str]) -> None:
    others = [
        f"{name} {found.get(name, 'missing')} where {version} is needed"
        for name, version in needed.items()
        if found.get(name) != version
    ]
    if others:
        raise WorkersError(
            f"worker {address}: refused, as its results could differ: {'; '.join(others)}. Install the same there."
        )


def _explain_killed(error: KilledWorker) -> WorkersError:
    return WorkersError(
        f"its worker ended in the middle, {error.allowed_failures + 1} times, the last being "
        f"{error.last_worker.address}: killed, or out of memory. Give workers more memory, then run the same again."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Dask's logs with their tracebacks: a loss is reported by an error of ours."""
    before = {log: log.level for log in map(logging.getLogger, LOGS)}
    for log in before:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in before.items():
            log.setLevel(level)

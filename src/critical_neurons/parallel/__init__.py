"""Parallel: independent tasks on workers; results do not depend on where a task runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from critical_neurons.core.workers import HERE, Workers, check_workers
from critical_neurons.parallel.executor import (
    Done,
    Executor,
    OnMessage,
    SendMessage,
    SerialExecutor,
    Task,
    find_allowed_threads,
    holding_threads,
    run_in_order,
)


@contextmanager
def open_executor(
    workers: Workers, *, most: int, threads: int = 1, on_message: OnMessage = lambda name, message: None
) -> Iterator[Executor]:
    """An executor for at most `most` tasks, each on `threads` threads, together using no more than all cores.

    `on_message` is called in this process with the messages of tasks, from another thread unless the tasks run in
    this process too. Tasks still running at the end are cancelled.
    """
    check_workers(workers)
    if workers.scheduler is not None:
        from critical_neurons.parallel.dask_cluster import join_cluster

        with join_cluster(workers.scheduler, threads, on_message) as cluster:
            yield cluster
        return
    if min(workers.jobs, most) > 1:
        from critical_neurons.parallel.processes import count_slots, start_processes

        slots = min(count_slots(workers.jobs, threads), most)
        if slots > 1:
            with start_processes(slots, threads, on_message) as processes:
                yield processes
            return
    yield SerialExecutor(threads, on_message)


@contextmanager
def open_executor_for_parts(workers: Workers) -> Iterator[Executor]:
    """An executor for parts of a computation that itself runs in this process.

    With workers, this process and every worker use one thread, so that results do not depend on the number of
    workers. Without workers, this process keeps its threads.
    """
    check_workers(workers)
    if workers == HERE:
        yield SERIAL
        return
    with open_executor(workers, most=workers.jobs) as executor, holding_threads(1):
        yield executor


SERIAL = SerialExecutor(None, lambda name, message: None)
"""Runs tasks in this process, on the threads that it has."""

__all__ = [
    "SERIAL",
    "Done",
    "Executor",
    "OnMessage",
    "SendMessage",
    "Task",
    "find_allowed_threads",
    "open_executor",
    "open_executor_for_parts",
    "run_in_order",
]

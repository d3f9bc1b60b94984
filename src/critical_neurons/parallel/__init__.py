"""Parallel: independent tasks (pieces) on workers; results do not depend on where a piece runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from critical_neurons.core.workers import HERE, Workers, check_workers
from critical_neurons.parallel.crew import (
    Alone,
    Crew,
    Done,
    OnMessage,
    Piece,
    Tell,
    find_allowed_threads,
    holding_threads,
    run_in_order,
)


@contextmanager
def hire(
    workers: Workers, *, most: int, threads: int = 1, on_message: OnMessage = lambda name, news: None
) -> Iterator[Crew]:
    """A crew for at most `most` pieces, each on `threads` threads, together using no more than all cores.

    `on_message` is called with the messages of pieces, in this process, but from another thread unless the crew is
    this process itself. Pieces still running at the end are cancelled.
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
    yield Alone(threads, on_message)


@contextmanager
def assist(workers: Workers) -> Iterator[Crew]:
    """A crew for parts of a computation that goes on in this process. With workers both are on one thread, so that
    results do not depend on how many there are; without them this process keeps its threads."""
    check_workers(workers)
    if workers == HERE:
        yield ALONE
        return
    with hire(workers, most=workers.jobs) as crew, holding_threads(1):
        yield crew


ALONE = Alone(None, lambda name, news: None)
"""This process, as it is."""

__all__ = [
    "ALONE",
    "Crew",
    "Done",
    "OnMessage",
    "Piece",
    "Tell",
    "assist",
    "find_allowed_threads",
    "hire",
    "run_in_order",
]

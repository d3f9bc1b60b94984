"""Parallel: independent tasks (pieces) on workers; results do not depend on where a piece runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from critical_neurons.core.workers import Workers, check_workers
from critical_neurons.parallel.crew import Alone, Crew, Done, OnMessage, Piece, Tell, find_allowed_threads


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


__all__ = ["Crew", "Done", "OnMessage", "Piece", "Tell", "find_allowed_threads", "hire"]

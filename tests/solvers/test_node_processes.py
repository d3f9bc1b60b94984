"""Nodes of a tree bounded by other processes: the same answer, whatever happens to them, and none is left."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest

from critical_neurons.core.solution import Status
from critical_neurons.solvers import dual_tree
from critical_neurons.solvers.base import Limits
from critical_neurons.solvers.highs import HighsEngine
from critical_neurons.solvers.node_processes import NodeBatch, NodeProcesses, count_cores
from tests.formulations.test_score_dual import encode_two_layers


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch):
    """Processes are started at once, and a tiny tree has work for them."""
    for name, value in {
        "MOST_ROOT_STEPS": 5,
        "EARLY_STEPS": 1,
        "STEPS": 5,
        "BATCH_SIZE": 4,
        "PROCESSES_AFTER": 0.0,
    }.items():
        monkeypatch.setattr(dual_tree, name, value)


@pytest.fixture
def started(monkeypatch):
    """All processes that the test starts; they have ended when it ends."""
    found, start = [], NodeProcesses.__init__

    def note(processes, *arguments):
        start(processes, *arguments)
        found.extend(processes._processes)

    monkeypatch.setattr(NodeProcesses, "__init__", note)
    yield found
    assert all(process.returncode is not None for process in found)


def search(threads, report=lambda step: None, **limits):
    program = replace(encode_two_layers(seed=2), improve=None)
    loop = dual_tree.DualLoop(HighsEngine, program, Limits(**{"gap": 1e-6, **limits}, threads=threads), report)
    return loop.run(), loop


def test_the_tree_is_the_same_on_any_number_of_processes(started):
    alone, loop = search(1)
    assert not started
    together, other = search(2)
    assert len(started) == 2
    assert together.status is alone.status is Status.OPTIMAL
    assert (together.objective, together.bound, other._numbers) == (alone.objective, alone.bound, loop._numbers)


def test_a_killed_process_costs_nothing_but_time(started):
    def kill(step):
        for process in started[:1]:
            process.send_signal(signal.SIGKILL)

    alone, loop = search(1)
    together, other = search(2, kill)
    assert len(started) == 2
    assert (together.objective, together.bound, other._numbers) == (alone.objective, alone.bound, loop._numbers)


def test_an_interrupt_leaves_the_best_so_far(started):
    def interrupt(step):
        if started:
            os.kill(os.getpid(), signal.SIGINT)

    solution, _ = search(2, interrupt)
    assert solution.interrupted
    assert solution.objective is not None
    assert solution.bound <= solution.objective


def test_the_time_limit_is_kept_while_processes_work(started):
    """Pieces that would take minutes are given up."""
    bounds = encode_two_layers().branching.nodes
    ends = bounds.useless[None] * 0.0, bounds.useless[None] * 0.0 + 1.0
    processes = NodeProcesses(bounds, 2)
    try:
        with pytest.raises(TimeoutError):
            processes.run([NodeBatch(*ends, bounds.start()[None], 10.0, 10**7)] * 3, expire)
    finally:
        processes.close()


def expire():
    raise TimeoutError


def test_without_an_interpreter_to_start_it_goes_on_alone(started, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    assert search(2)[0].status is Status.OPTIMAL
    assert not started


def test_cores_are_those_of_this_process(monkeypatch):
    assert count_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_cores() == os.cpu_count()

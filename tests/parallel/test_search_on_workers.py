"""Searching on workers: the same scores to the last bit, whoever computes what."""

import os
import signal
import sys

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError, WorkersError
from critical_neurons.parallel import SERIAL
from critical_neurons.parallel.executor import Done, SerialExecutor, holding_threads, run_in_order
from tests.clusters import Cluster

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by signals")

INPUTS = 150
"""Three batches."""


class Handle:
    """Can be copied, but not pickled."""

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a handle")


def build():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)
    return nn.Sequential(*convolutions, *head).eval()


def draw():
    return torch.randn(INPUTS, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def search(**settings):
    scores = cn.search(build(), draw(), macs=0.5, **settings)
    return {**scores.to_dict(), "seconds": None, "search_history": None}


@pytest.fixture(scope="module")
def alone():
    with holding_threads(1):
        return search()


@pytest.mark.parametrize("jobs", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_find_the_same(alone, jobs):
    reported = []
    assert search(workers=cn.Workers(jobs), progress=reported.append) == alone
    assert max(each.done for each in reported if each.stage == "gathering what layers read") == 3


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(alone, tmp_path):
    with Cluster(tmp_path, workers=2) as cluster:
        victim, killed = cluster.workers[0].pid, []

        def kill_once(reported):
            if not killed and reported.stage == "gathering what layers read" and reported.done:
                os.kill(victim, signal.SIGKILL)
                killed.append(reported)

        assert search(workers=cn.Workers(scheduler=cluster.address), progress=kill_once) == alone
        assert killed
        assert cluster.count_workers() == 1


@pytest.mark.slow
def test_what_is_compressed_is_the_same():
    with holding_threads(1):
        one, two = (
            cn.compress(build(), draw(), macs=0.5, effort="quick", onnx=False, workers=workers).model.state_dict()
            for workers in (cn.Workers(), cn.Workers(2))
        )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_model_that_cannot_be_sent():
    model = build()
    model.handle = Handle()
    with pytest.raises(WorkersError, match=r"cannot be pickled.*cannot pickle a handle.*leave workers= out"):
        cn.search(model, draw(), macs=0.5, effort="quick", workers=cn.Workers(2))


def test_workers_are_of_a_search():
    with pytest.raises(InvalidSettingError, match="workers: only for a search"):
        cn.compress(build(), draw(), macs=0.5, paper=True, workers=cn.Workers(2))


class Backwards(SerialExecutor):
    """Gives what it was asked last first."""

    def run(self, tasks):
        return reversed([Done(name, task(None)) for name, task in tasks])


def test_results_come_in_the_order_of_calls():
    calls = [lambda number=number: number for number in range(5)]
    assert [*run_in_order(Backwards(None, None), calls)] == [0, 1, 2, 3, 4]


def test_an_error_of_a_call_is_raised():
    def fail():
        raise WorkersError("lost")

    with pytest.raises(WorkersError, match="lost"):
        list(run_in_order(SERIAL, [lambda: 1, fail]))

"""Scores are the same to the last bit on any workers: here, on processes, and on a cluster."""

from functools import partial

import pytest

import critical_neurons as cn
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.parallel import open_executor
from tests.clusters import Cluster
from tests.tasks import score_class_by_class
from tests.zoo import CORE, share_case

SOME = ("mlp", "resnet", "grouped convolutions", "tokens", "vgg", "max pool on a stream")
"""Workers differ in how they get a model and give back its scores, hardly in what the model is."""


def score_zoo(workers, names):
    tasks = []
    for name in names:
        case = share_case(name)
        if case.network.removable:
            tasks.append((name, partial(score_class_by_class, case.model, case.inputs, case.labels)))
    with open_executor(workers, most=len(tasks)) as executor:
        found = {}
        for done in executor.run(tasks):
            assert done.error is None
            found[done.name] = done.result
    assert len(found) == len(tasks)
    return found


@pytest.fixture(scope="module")
def here():
    return score_zoo(HERE, SOME)


def test_processes(here):
    assert score_zoo(Workers(2), SOME) == here


@pytest.mark.slow
def test_the_core_of_the_zoo_on_processes():
    assert score_zoo(Workers(2), CORE) == score_zoo(HERE, CORE)


def test_cluster(here, tmp_path):
    with Cluster(tmp_path, workers=2) as cluster:
        assert score_zoo(Workers(scheduler=cluster.address), SOME) == here


@pytest.mark.parametrize("name", ["vgg", "max pool on a stream"])
def test_programs_that_are_sent_rather_than_models(name, here):
    case = share_case(name)
    scores = cn.score(
        case.model, case.inputs, case.labels, formulation=cn.ByClass(cn.Paper(integer=False), workers=Workers(2))
    )
    assert {each: values.tolist() for each, values in scores.items()} == here[name][0]

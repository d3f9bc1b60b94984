"""VGG-16 in parts: what is removed and fine-tuned, scores that are kept, weights that are given."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load

import critical_neurons as cn
from critical_neurons.errors import InvalidFileError, InvalidSettingError
from critical_neurons_reproduction.baselines import share_as_published
from critical_neurons_reproduction.datasets import LabelledImages
from critical_neurons_reproduction.decoupled import decouple, score_parts, train_heads
from critical_neurons_reproduction.experiments.cells import GIVEN, HEADS, Schedule
from critical_neurons_reproduction.experiments.deep import (
    find_scores,
    find_transferred,
    measure_once,
    prepare,
    read_weights,
    run_deep,
    score_deep,
)
from critical_neurons_reproduction.experiments.pruning import draw, measure
from critical_neurons_reproduction.experiments.runner import find_references, run_cells
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.score_settings import read_score_settings
from critical_neurons_reproduction.training import train

ROUNDING = 1e-12
"""Shares, from whole numbers in another order."""


def test_the_network_is_that_of_the_file_on_shifted_images(finish, runs, weights):
    record = finish("table-2-given", "linearised/share/ours")
    model = runs.build("vgg16", 0)
    model.load_state_dict(load(weights.read_bytes()))
    test = runs.load("cifar10").test
    assert record.result["reference"] == measure(model, LabelledImages(test.inputs - 0.5, test.labels))
    assert record.result["as_published"] >= 0.36


def test_the_whole_network_is_measured_once(runs, monkeypatch, tmp_path):
    model, test, path = runs.build("vgg16", 0).eval(), runs.load("cifar10").test, tmp_path / "new" / "reference.json"
    found = measure_once(model, test, path)
    assert found == measure(model, test)
    monkeypatch.setattr("critical_neurons_reproduction.experiments.deep.measure", pytest.fail)
    assert measure_once(model, test, path) == found


def test_cells_that_remove_the_same_units_share_their_fine_tuning(finish, runs):
    cell, found = (record := finish("table-2-given", "linearised/share/ours")).cell, record.result
    watched = replace(runs, on_epoch=lambda *_: pytest.fail("trained again"))
    same = {**cell.settings, "share": None, "thresholds": [found["threshold"]]}
    assert run_deep(replace(cell, settings=same), watched)["fine_tuned"] == found["fine_tuned"]
    other = {**same, "fine_tuning": {**same["fine_tuning"], "batch_size": 16}}
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        run_deep(replace(cell, settings=other), watched)


def test_random_units_are_as_many_of_every_layer(finish):
    ours, random = (finish("table-2-given", f"linearised/share/{each}").result for each in ("ours", "random"))
    assert ours["removed"] == random["removed"]
    assert sum(ours["removed"].values()) > 0
    assert ours["solver"]["scores"] == random["solver"]["scores"]


def test_heads_learn_and_bodies_stay(runs):
    data = runs.load("cifar10").training
    decoupled = decouple(runs.build("vgg16", 0), data.inputs[:1], seed=0)
    before = {name: values.clone() for name, values in decoupled.model.state_dict().items()}
    first = [part.head.state_dict()["1.weight"].clone() for part in decoupled.parts[:2]]
    train_heads(decoupled, data.inputs, data.labels, Recipe(**{**HEADS, "batch_size": 32}))
    assert all(torch.equal(values, before[name]) for name, values in decoupled.model.state_dict().items())
    for part, weight in zip(decoupled.parts, first, strict=False):
        assert not torch.equal(part.head.state_dict()["1.weight"], weight)
    losses = [
        torch.nn.functional.cross_entropy(network.eval()(data.inputs), data.labels)
        for network in (decoupled.parts[0].network, decouple(decoupled.model, data.inputs[:1]).parts[0].network)
    ]
    assert losses[0] < losses[1]


def test_other_weights_are_refused(find, runs, store, weights, tmp_path):
    with pytest.raises(InvalidSettingError, match="--vgg-weights: found none"):
        read_weights(None, GIVEN["digest"])
    with pytest.raises(InvalidFileError, match="cannot be read"):
        read_weights(tmp_path / "none", GIVEN["digest"])
    other = tmp_path / "other.safetensors"
    other.write_bytes(weights.read_bytes() + b" ")
    (cell,) = find("table-2-given", "paper/share/critical")
    (failure,) = run_cells([cell], store, replace(runs, weights=other))
    assert "other weights than those of the cells" in failure


def test_scores_are_solved_once_and_kept(finish, runs, tmp_path, monkeypatch):
    settings = finish("table-2-given", "linearised/share/ours").cell.settings
    network = prepare(settings, runs)
    solved = score_deep(settings, replace(runs, scores=tmp_path), *network)
    monkeypatch.setattr("critical_neurons_reproduction.experiments.deep.score_parts", pytest.fail)
    kept = score_deep(settings, runs, *network)
    assert all((kept[name] == values).all() for name, values in solved.items())


def test_a_transfer_with_kept_scores_trains_only_on_the_target(find, runs, tmp_path):
    (cell,), (deep,) = find("table-3", "cifar10/mnist/vgg16"), find("table-2-deep", "paper/share/ours")
    (linearised,) = find("table-2-deep", "linearised/share/ours")
    own = replace(runs, scores=tmp_path)
    find_scores(linearised.settings, own).touch()
    assert [each.data for each in find_references(cell, own, None)] == ["cifar10", "mnist"]
    find_scores(deep.settings, own).touch()
    assert [each.data for each in find_references(cell, own, None)] == ["mnist"]
    longer = find_scores(deep.settings, replace(own, schedule=Schedule(narrow=own.schedule.narrow)))
    longer.touch()
    assert find_transferred(cell.settings, own) == longer  # of the whole training


def find_share_below(model, scores, threshold):
    """What the next lower score would remove."""
    levels = np.unique(np.concatenate(list(scores.values())))
    lower = levels[levels < threshold].max()
    return share_as_published(model, cn.plan(scores, threshold=float(lower)))


@pytest.mark.slow
class TestTrainedInParts:
    def test_scores_of_the_parts_decide(self, finish, runs):
        at_threshold, by_share = (finish("table-2-deep", f"paper/{rule}/ours") for rule in ("threshold", "share"))
        settings, found, shared = at_threshold.cell.settings, at_threshold.result, by_share.result
        decoupled, data = prepare(settings, runs)
        model, scores = decoupled.model, score_deep(settings, runs, decoupled, data)
        assert len(scores) == 14
        assert shared["as_published"] >= 0.36 > find_share_below(model, scores, shared["threshold"])
        low = sum(int((values < 0.3).sum()) - int((values < 0.3).all()) for values in scores.values())
        assert found["threshold"] == 0.3
        assert found["units"] == pytest.approx(low / sum(map(len, scores.values())), abs=ROUNDING)
        assert 0 < found["as_published"] < found["parameters"] < 1
        batch = draw(settings, data, model)
        read = read_score_settings(settings["score"])
        again = score_parts(
            decoupled,
            batch.inputs,
            batch.labels,
            formulation=read["formulation"],
            score=partial(cn.score, solver=read["solver"]),
            box="image",
            score_heads=True,
        )
        assert all(np.array_equal(again[name], values) for name, values in scores.items())

    def test_all_variants_are_fine_tuned(self, finish, runs, tmp_path):
        ours = finish("table-2-deep", "paper/threshold/ours")
        decoupled, data = prepare(ours.cell.settings, runs)
        recipe = Recipe(**ours.cell.settings["fine_tuning"])
        scores = score_deep(ours.cell.settings, runs, decoupled, data)
        plan = cn.plan(scores, threshold=0.3)
        plans = {"ours": plan, "random": plan.random(seed=0), "critical": plan.critical(scores)}
        for name, each in plans.items():
            smaller = cn.prune(decoupled.model, each, data.test.inputs[:1])
            tuned = train(smaller, data, recipe, seed=0, folder=tmp_path / name).model
            result = finish("table-2-deep", f"paper/threshold/{name}").result
            assert result["fine_tuned"] == measure(tuned, data.test)

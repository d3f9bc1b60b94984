"""Following: scores after every epoch, of the network as it was, and of one that has lost what scored low before."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import critical_neurons as cn
from critical_neurons.io.models import read_checkpoint
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons_reproduction.experiments.epochs import _combine
from critical_neurons_reproduction.experiments.pruning import score_on
from critical_neurons_reproduction.training import CHECKPOINT, INITIAL

ROUNDING = 1e-12
LOGIT_TOLERANCE = 1e-5
"""float32 networks of other sizes that compute the same."""

NONE = np.array([], dtype=int)

LENET5 = {"0": (6, 75), "3": (16, 150), "6": (120, 400), "9": (84, 120)}
"""Units and incoming weights of each, by layer."""

LENET5_PARAMETERS, LENET5_UNITS = 62_006, 226


def count_removed(left):
    """Shares of the units and of the parameters, as published, from the units that are left of each layer."""
    units = 1 - sum(left.values()) / LENET5_UNITS
    removed = sum((count - left[name]) * incoming for name, (count, incoming) in LENET5.items())
    return pytest.approx(units, abs=ROUNDING), pytest.approx(removed / LENET5_PARAMETERS, abs=ROUNDING)


def test_plain_is_the_network_after_each_epoch(finish, runs):
    record = finish("training", "fashion/lenet5/plain")
    data, epochs = runs.load("fashion"), record.result["epochs"]
    assert [each["epoch"] for each in epochs] == list(range(1, runs.schedule.epochs + 1))
    for each in epochs:
        model = runs.load_epoch("lenet5", "fashion", 0, each["epoch"])
        assert each["reference"] == measure_accuracy(model, data.test.inputs, data.test.labels)
    scores = score_on(model, data, record.cell.settings)
    plan = cn.plan(scores, threshold=0.2)
    assert each["accuracy"] == measure_accuracy(cn.mask(model, plan), data.test.inputs, data.test.labels)
    left = {name: max(1, int((values >= 0.2).sum())) for name, values in scores.items()}
    assert (each["units"], each["as_published"]) == count_removed(left)


@pytest.mark.slow
def test_incremental_goes_on_with_what_is_left(finish, runs):
    record = finish("training", "fashion/lenet5/incremental")
    epochs, (folder,) = record.result["epochs"], runs.folder.rglob(f"cells/{record.key}")
    assert [each["epoch"] for each in epochs] == list(range(1, runs.schedule.epochs + 1))
    starts = [load_file(folder / f"epoch-{each['epoch']:03}" / INITIAL) for each in epochs]
    ends = [read_checkpoint(folder / f"epoch-{each['epoch']:03}" / CHECKPOINT)["model"] for each in epochs]
    whole = runs.build("lenet5", 0).state_dict()
    assert all(torch.equal(starts[0][name], whole[name]) for name in whole)
    for each, trained, start in zip(epochs[:-1], ends[:-1], starts[1:], strict=True):
        left = {name: len(start[f"{name}.bias"]) for name in LENET5}
        assert (each["units"], each["as_published"]) == count_removed(left)
        for name in LENET5:
            kept = iter(trained[f"{name}.bias"].tolist())
            assert all(bias in kept for bias in start[f"{name}.bias"].tolist())  # some of them, in the same order
    shares = [each["units"] for each in epochs]
    assert shares[0] > 0
    assert shares == sorted(shares)
    assert all(0 <= each[name] <= 1 for each in epochs for name in ("reference", "accuracy"))


@pytest.mark.slow
def test_two_plans_one_after_the_other_are_one(finish, runs):
    record = finish("training", "fashion/lenet5/plain")
    data = runs.load("fashion")
    model, example = runs.load_epoch("lenet5", "fashion", 0, 1), data.test.inputs[:1]
    first = cn.plan(score_on(model, data, record.cell.settings), units=0.6)
    smaller = cn.prune(model, first, example)
    second = cn.plan(score_on(smaller, data, record.cell.settings), units=0.5).random(seed=1)
    both = _combine(first, second)
    for layer in both.layers:
        stays = np.zeros(layer.total, dtype=bool)
        stays[first.kept[layer.name]] = True
        stays[np.flatnonzero(stays)[second.removed.get(layer.name, NONE)]] = False
        assert layer.kept.tolist() == np.flatnonzero(stays).tolist()
    with torch.no_grad():
        expected = cn.prune(smaller, second, example)(data.test.inputs)
        found = cn.mask(model, both)(data.test.inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGIT_TOLERANCE)

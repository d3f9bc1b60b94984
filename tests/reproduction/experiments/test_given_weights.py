"""Given weights: the network is that of the file, its bodies stay, and other files are refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load

from critical_neurons.errors import InvalidFileError, InvalidSettingError
from critical_neurons_reproduction.datasets import Part
from critical_neurons_reproduction.decoupled import decouple, train_heads
from critical_neurons_reproduction.experiments.cells import GIVEN, HEADS
from critical_neurons_reproduction.experiments.given_weights import read_weights
from critical_neurons_reproduction.experiments.pruning import measure
from critical_neurons_reproduction.experiments.runner import run_cells
from critical_neurons_reproduction.recipes import Recipe


def test_the_network_is_that_of_the_file_on_shifted_images(finish, runs, weights):
    record = finish("table-2-given", "linearised/share/ours")
    model = runs.build("vgg16", 0)
    model.load_state_dict(load(weights.read_bytes()))
    test = runs.load("cifar10").test
    assert record.result["reference"] == measure(model, Part(test.inputs - 0.5, test.labels))
    assert record.result["as_published"] >= 0.36


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

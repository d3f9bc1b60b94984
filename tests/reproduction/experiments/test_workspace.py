"""Runs: data cut down, networks by seed, and trainings that are kept, each schedule in a place of its own."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file

from critical_neurons.errors import InvalidFileError, InvalidInputError
from critical_neurons.io.builtin_models import MODELS
from critical_neurons.removal.metrics import count_parameters
from critical_neurons_reproduction.datasets import load_dataset
from critical_neurons_reproduction.experiments.cells import WHOLE, Schedule, find_recipe
from critical_neurons_reproduction.experiments.workspace import find_data
from critical_neurons_reproduction.training import INITIAL, train
from tests.blocks import CLASSES, TEST, TRAIN


def equal_states(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class TestData:
    @pytest.mark.parametrize(("data", "folder"), [("mnist", "mnist"), ("fashion", "fashion_mnist")])
    def test_all_images_where_nothing_is_cut_down(self, runs, cache, blocks, data, folder):
        found, whole = replace(runs, schedule=WHOLE).load(data), load_dataset(blocks / folder, cache=cache)
        for part in ("training", "validation", "test"):
            assert getattr(found, part).digest == getattr(whole, part).digest
        assert len(found.training) == TRAIN * CLASSES * 9 // 10

    def test_the_first_images(self, runs):
        whole = replace(runs, schedule=WHOLE).load("cifar10")
        found = replace(runs, schedule=Schedule(images=17, measured=13)).load("cifar10")
        for part, count in (("training", 17), ("validation", 13), ("test", 13)):
            assert torch.equal(getattr(found, part).inputs, getattr(whole, part).inputs[:count])
            assert torch.equal(getattr(found, part).labels, getattr(whole, part).labels[:count])
        many = replace(runs, schedule=Schedule(measured=10**6)).load("cifar10")
        assert len(many.test) == TEST * CLASSES

    def test_no_such_folder(self, tmp_path):
        with pytest.raises(InvalidInputError, match=r"--data .*missing: no such folder.*hf download ylecun/mnist"):
            find_data(tmp_path / "missing", "mnist")

    def test_a_folder_without_this_data_set(self, tmp_path):
        (tmp_path / "mnist").mkdir()
        with pytest.raises(InvalidInputError, match=r"no folder fashion_mnist in it\. Accepted: .*zalando-datasets"):
            find_data(tmp_path, "fashion")
        assert find_data(tmp_path, "mnist") == tmp_path / "mnist"


class TestNetworks:
    @pytest.mark.parametrize("network", MODELS)
    def test_by_seed(self, runs, network):
        first, again, other = (runs.build(network, seed).state_dict() for seed in (3, 3, 4))
        assert equal_states(first, again)
        assert not equal_states(first, other)

    def test_only_vgg16_is_made_narrow(self, runs):
        for network, builtin in MODELS.items():
            parameters = count_parameters(builtin.factory())
            narrow = count_parameters(runs.build(network, 0))
            assert (narrow < parameters / 100) if network == "vgg16" else (narrow == parameters)


class TestTraining:
    def test_recipes_have_places_of_their_own(self, runs, tmp_path):
        own = replace(runs, folder=tmp_path)
        for recipes in ("short", "paper"):
            replace(own, recipes=recipes).train_reference("fc3", "mnist", 0)
        assert len({path.parent for path in tmp_path.rglob(INITIAL)}) == 2

    @pytest.mark.parametrize("network", ["fc3", "vgg16"])
    def test_networks_are_trained_once(self, runs, tmp_path, network):
        reported = []
        own = replace(runs, folder=tmp_path, on_epoch=lambda *epoch: reported.append(epoch))
        first = own.train_reference(network, "mnist", 0)
        epochs = runs.schedule.epochs
        assert reported == [(f"mnist/{network}/seed-0", number, epochs) for number in range(1, epochs + 1)]
        again = own.train_reference(network, "mnist", 0)
        assert len(reported) == epochs
        assert equal_states(first.state_dict(), again.state_dict())

    def test_seeds_and_data_do_not_meet(self, runs):
        trained = [
            runs.train_reference("fc3", data, seed).state_dict()
            for data, seed in (("mnist", 0), ("mnist", 1), ("fashion", 0))
        ]
        assert not any(equal_states(*pair) for pair in combinations(trained, 2))

    def test_training_begins_with_the_network_of_the_seed(self, runs, tmp_path):
        """The same weights, whatever the data: Table 3 relies on it."""
        own = replace(runs, folder=tmp_path)
        for data in ("mnist", "fashion"):
            own.train_reference("fc3", data, 1)
        started = [load_file(path) for path in tmp_path.rglob(INITIAL)]
        assert len(started) == 2
        assert all(equal_states(weights, own.build("fc3", 1).state_dict()) for weights in started)

    def test_schedules_have_places_of_their_own(self, runs, tmp_path):
        """One epoch, too: a place that two schedules share would refuse the second."""
        schedules = [
            Schedule(epochs=1),
            Schedule(epochs=2),
            Schedule(epochs=1, images=8),
            Schedule(epochs=1, measured=8),
            Schedule(epochs=1, narrow=2),
        ]
        for schedule in schedules:
            replace(runs, folder=tmp_path, schedule=schedule).train_reference("fc4", "mnist", 0)
        assert len(list(tmp_path.rglob(INITIAL))) == len(schedules)
        assert not (tmp_path / "mnist").exists()

    def test_the_whole_schedule_has_the_folder_itself(self, runs, tmp_path):
        class Interrupted(Exception):
            pass

        def stop(*_news):
            raise Interrupted

        with pytest.raises(Interrupted):
            replace(runs, folder=tmp_path, schedule=WHOLE, on_epoch=stop).train_reference("fc4", "mnist", 0)
        assert (tmp_path / "mnist" / "fc4" / "seed-0" / INITIAL).exists()

    def test_epochs_of_the_figure_are_kept(self, runs):
        trained = runs.train_reference("lenet5", "fashion", 0)
        last = runs.load_epoch("lenet5", "fashion", 0, runs.schedule.epochs)
        assert equal_states(last.state_dict(), trained.state_dict())
        first = train(
            runs.build("lenet5", 0),
            runs.load("fashion"),
            find_recipe("lenet5", "fashion").shortened(1),
            seed=0,
            folder=runs.folder / "one epoch",
        ).model
        assert equal_states(runs.load_epoch("lenet5", "fashion", 0, 1).state_dict(), first.state_dict())

    def test_an_epoch_that_was_not_kept(self, runs):
        with pytest.raises(InvalidFileError, match=r"epoch-099\.safetensors: no such file of weights"):
            runs.load_epoch("lenet5", "fashion", 0, 99)

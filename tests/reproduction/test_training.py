import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from critical_neurons.cli.digits import split_digits
from critical_neurons.errors import InvalidFileError, InvalidInputError, InvalidSettingError, OutputError
from critical_neurons.io.builtin_models import MODELS
from critical_neurons.io.models import read_checkpoint
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.recipes import RECIPES, SHIFT, Recipe, augment
from critical_neurons_reproduction.training import CHECKPOINT, EPOCH, INITIAL, build_model, train
from tests.zoo import first_or_slow

RECIPE = Recipe("rmsprop", 1e-3, epochs=3, batch_size=64)
SEED = 5


@pytest.fixture(scope="module")
def digits():
    (inputs, labels), test = split_digits(seed=0)
    return Dataset(
        LabelledImages(inputs[:900], labels[:900]), LabelledImages(inputs[900:], labels[900:]), LabelledImages(*test)
    )


def network():
    """Weights, running statistics and random numbers of its own: all that training has to carry on."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * 36, 10),
    )


def start():
    return build_model(network, SEED)


def equal_states(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Interrupted(Exception):
    pass


def stop_after(number):
    def progress(epoch):
        if epoch.number == number:
            raise Interrupted

    return progress


def test_a_network_learns_and_every_epoch_is_reported(digits, tmp_path):
    reported = []
    model = start()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    done = train(model, digits, RECIPE, seed=1, folder=tmp_path / "new" / "folder", progress=reported.append)
    assert tuple(reported) == done.epochs
    assert [(epoch.number, epoch.of) for epoch in reported] == [(1, 3), (2, 3), (3, 3)]
    assert reported[-1].loss < reported[0].loss
    assert not done.model.training
    accuracy = measure_accuracy(done.model, digits.validation.inputs, digits.validation.labels)
    assert reported[-1].accuracy == accuracy > 0.8
    assert model.training
    assert equal_states(model.state_dict(), before)
    assert equal_states(load_file(tmp_path / "new" / "folder" / INITIAL), before)


def test_the_seed_decides(digits, tmp_path):
    same, again, other = (
        train(start(), digits, RECIPE.shortened(1), seed=seed, folder=tmp_path / str(at)).model.state_dict()
        for at, seed in enumerate((1, 1, 2))
    )
    assert equal_states(same, again)
    assert not equal_states(same, other)


def test_the_first_loss_is_that_of_plain_torch(digits, tmp_path):
    """One batch of all images: the order of the images and the loop around them have no part."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    recipe = Recipe("sgd", 0.5, epochs=2, batch_size=len(digits.training))
    done = train(model, digits, recipe, seed=0, folder=tmp_path)
    losses = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(digits.training.inputs), digits.training.labels)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    assert [epoch.loss for epoch in done.epochs] == pytest.approx(losses, rel=1e-5)


def test_the_global_random_state_stays_as_it_is(digits, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(start(), digits, RECIPE.shortened(1), seed=1, folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_weights_by_seed():
    assert equal_states(start().state_dict(), start().state_dict())
    assert not equal_states(start().state_dict(), build_model(network, SEED + 1).state_dict())


class TestInterrupted:
    @pytest.fixture
    def whole(self, digits, tmp_path):
        return train(start(), digits, RECIPE, seed=1, folder=tmp_path / "whole")

    @pytest.mark.parametrize("optimiser", ["rmsprop", "sgd", "adam"])
    @pytest.mark.parametrize("number", first_or_slow(1, 2))
    def test_the_result_is_the_same_to_the_last_bit(self, digits, tmp_path, optimiser, number):
        recipe = Recipe(optimiser, 1e-2, epochs=3, batch_size=64)
        whole = train(start(), digits, recipe, seed=1, folder=tmp_path / "whole")
        folder, reported = tmp_path / "interrupted", []
        with pytest.raises(Interrupted):
            train(start(), digits, recipe, seed=1, folder=folder, progress=stop_after(number))
        torch.rand(7)
        resumed = train(start(), digits, recipe, seed=1, folder=folder, progress=reported.append)
        assert [epoch.number for epoch in reported] == [*range(number + 1, 4)]
        assert resumed.epochs == whole.epochs
        assert equal_states(resumed.model.state_dict(), whole.model.state_dict())

    def test_in_the_midst_of_an_epoch(self, digits, tmp_path, whole):
        """Ctrl-C in the second epoch: the first is kept, the second done again."""
        steps = []

        def count_steps(module, inputs):
            steps.append(module.training)
            if sum(steps) == 20:
                raise KeyboardInterrupt

        handle = nn.modules.module.register_module_forward_pre_hook(
            lambda module, inputs: count_steps(module, inputs) if isinstance(module, nn.Conv2d) else None
        )
        with handle, pytest.raises(KeyboardInterrupt):
            train(start(), digits, RECIPE, seed=1, folder=tmp_path)
        assert len(read_checkpoint(tmp_path / CHECKPOINT)["epochs"]) == 1
        resumed = train(start(), digits, RECIPE, seed=1, folder=tmp_path)
        assert equal_states(resumed.model.state_dict(), whole.model.state_dict())

    def test_random_numbers_drawn_by_progress_change_nothing(self, digits, tmp_path, whole):
        drawn = train(
            start(), digits, RECIPE, seed=1, folder=tmp_path / "drawn", progress=lambda epoch: torch.rand(3)
        )
        assert equal_states(drawn.model.state_dict(), whole.model.state_dict())

    def test_a_finished_one_is_read_back(self, digits, tmp_path, whole):
        reported = []
        again = train(start(), digits, RECIPE, seed=1, folder=tmp_path / "whole", progress=reported.append)
        assert reported == []
        assert again.epochs == whole.epochs
        assert not again.model.training
        assert equal_states(again.model.state_dict(), whole.model.state_dict())

    def test_before_its_first_epoch_ended_initial_weights_are_those_of_the_next_try(self, digits, tmp_path):
        other = build_model(network, SEED + 1)
        with pytest.raises(InvalidSettingError):
            train(other, digits, Recipe("sgd", 1e30, epochs=1), seed=1, folder=tmp_path)
        model = start()
        train(model, digits, RECIPE.shortened(1), seed=1, folder=tmp_path)
        assert equal_states(load_file(tmp_path / INITIAL), model.state_dict())

    def test_no_space_keeps_the_finished_epochs(self, digits, tmp_path, whole, monkeypatch):
        sync = os.fsync

        def fail(_descriptor):
            raise OSError(28, "No space left on device")

        def fill_disk(_epoch):
            monkeypatch.setattr(os, "fsync", fail)

        with pytest.raises(OutputError, match=r"checkpoint\.pt.*No space left on device"):
            train(start(), digits, RECIPE, seed=1, folder=tmp_path, progress=fill_disk)
        monkeypatch.setattr(os, "fsync", sync)
        assert len(read_checkpoint(tmp_path / CHECKPOINT)["epochs"]) == 1
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [CHECKPOINT, INITIAL]
        resumed = train(start(), digits, RECIPE, seed=1, folder=tmp_path)
        assert equal_states(resumed.model.state_dict(), whole.model.state_dict())


def test_progress_can_read_the_weights_of_its_epoch(digits, tmp_path):
    read = []

    def progress(epoch):
        model = start()
        model.load_state_dict(read_checkpoint(tmp_path / CHECKPOINT)["model"])
        read.append(measure_accuracy(model, digits.validation.inputs, digits.validation.labels))

    done = train(start(), digits, RECIPE, seed=1, folder=tmp_path, progress=progress)
    assert read == [epoch.accuracy for epoch in done.epochs]


class TestRefusals:
    @pytest.fixture
    def folder(self, digits, tmp_path):
        train(start(), digits, RECIPE.shortened(1), seed=1, folder=tmp_path)
        return tmp_path

    def test_another_network(self, digits, folder):
        other = build_model(lambda: nn.Sequential(*network(), nn.Identity()), SEED)
        with pytest.raises(InvalidFileError, match=r"checkpoint\.pt: .* differs in network\. Give another folder"):
            train(other, digits, RECIPE.shortened(1), seed=1, folder=folder)

    def test_other_initial_weights(self, digits, folder):
        with pytest.raises(InvalidFileError, match=r"differs in initial weights\."):
            train(build_model(network, SEED + 1), digits, RECIPE.shortened(1), seed=1, folder=folder)

    def test_another_recipe_and_seed(self, digits, folder):
        with pytest.raises(InvalidFileError, match=r"seed \(1 there, 2 here\), epochs \(1 there, 3 here\)\."):
            train(start(), digits, RECIPE, seed=2, folder=folder)

    def test_other_data(self, digits, folder):
        other = Dataset(
            LabelledImages(1 - digits.training.inputs, digits.training.labels), digits.validation, digits.test
        )
        with pytest.raises(InvalidFileError, match=r"differs in training images\."):
            train(start(), other, RECIPE.shortened(1), seed=1, folder=folder)

    @pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
    def test_a_damaged_checkpoint_stays_as_it_is(self, digits, folder, content):
        path = folder / CHECKPOINT
        content = path.read_bytes()[:-500] if content is None else content
        path.write_bytes(content)
        with pytest.raises(InvalidFileError, match=r"damaged.*Remove it to start over"):
            train(start(), digits, RECIPE.shortened(1), seed=1, folder=folder)
        assert path.read_bytes() == content

    def test_a_checkpoint_of_something_else(self, digits, folder):
        torch.save({"weights": torch.zeros(2)}, folder / CHECKPOINT)
        with pytest.raises(InvalidFileError, match="not a checkpoint of this training"):
            train(start(), digits, RECIPE.shortened(1), seed=1, folder=folder)

    def test_a_folder_that_cannot_be_made(self, digits, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match=r"file/in: cannot be written"):
            train(start(), digits, RECIPE, seed=1, folder=tmp_path / "file" / "in")

    def test_a_loss_that_is_no_number(self, digits, tmp_path):
        with pytest.raises(InvalidSettingError, match=r"loss of epoch 1 is nan with sgd.*Lower the learning rate"):
            train(start(), digits, Recipe("sgd", 1e30, epochs=1), seed=1, folder=tmp_path)
        assert not (tmp_path / CHECKPOINT).exists()

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Flatten(), "no parameters"),
            (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), "9 outputs for 10 classes"),
            (nn.Sequential(nn.Flatten(), nn.Linear(63, 10)), "does not run on shape"),
        ],
    )
    def test_a_network_for_other_data(self, digits, tmp_path, model, message):
        with pytest.raises(InvalidInputError, match=message):
            train(model, digits, RECIPE, seed=1, folder=tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("optimiser", "lion"),
            ("learning_rate", 0.0),
            ("learning_rate", float("nan")),
            ("epochs", 0),
            ("batch_size", 0),
        ],
    )
    def test_recipes(self, setting, value):
        with pytest.raises(InvalidSettingError, match=f"{setting}: found {value!r}. Accepted: "):
            Recipe(**{"optimiser": "sgd", "learning_rate": 0.1, "epochs": 1, setting: value})

    @pytest.mark.parametrize(("optimiser", "momentum"), [("adam", 0.9), ("sgd", 1.0)])
    def test_momentum_is_below_1_and_for_sgd(self, optimiser, momentum):
        with pytest.raises(InvalidSettingError, match=f"momentum: found {momentum} for {optimiser}. Accepted: "):
            Recipe(optimiser, 0.1, epochs=1, momentum=momentum)

    def test_momentum_that_a_checkpoint_has_and_the_recipe_has_not(self, digits, tmp_path):
        train(start(), digits, Recipe("sgd", 0.1, epochs=1, momentum=0.5), seed=1, folder=tmp_path)
        with pytest.raises(InvalidFileError, match=r"differs in momentum \(0\.5 there, None here\)"):
            train(start(), digits, Recipe("sgd", 0.1, epochs=1), seed=1, folder=tmp_path)


class TestAugmentation:
    def test_images_are_flipped_and_moved(self):
        """Every image is the original, mirrored or not, at one of the places it can be moved to."""
        images = torch.arange(1.0, 1 + 64 * 2 * 6 * 6).reshape(64, 2, 6, 6)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            augmented = augment(images)
        places = set()
        for image, found in zip(images, augmented, strict=True):
            matches = [
                (flipped, row, column)
                for flipped, either in enumerate((image, image.flip(2)))
                for row in range(2 * SHIFT + 1)
                for column in range(2 * SHIFT + 1)
                if torch.equal(functional.pad(either, (SHIFT,) * 4)[:, row : row + 6, column : column + 6], found)
            ]
            assert matches
            places.add(matches[0])
        assert len(places) > 32

    def test_training_goes_on_to_the_same_weights(self, digits, tmp_path):
        recipe = Recipe("sgd", 0.05, epochs=2, momentum=0.9, augmented=True)
        whole = train(start(), digits, recipe, seed=1, folder=tmp_path / "whole")
        with pytest.raises(Interrupted):
            train(start(), digits, recipe, seed=1, folder=tmp_path / "parts", progress=stop_after(1))
        parts = train(start(), digits, recipe, seed=1, folder=tmp_path / "parts")
        assert equal_states(whole.model.state_dict(), parts.model.state_dict())
        plain = train(start(), digits, replace(recipe, augmented=False), seed=1, folder=tmp_path / "plain")
        assert not equal_states(whole.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize(
    ("annealing", "rates"),
    [("constant", [0.4, 0.4, 0.4, 0.4]), ("linear", [0.4, 0.36, 0.32, 0.16]), ("one_cycle", [0.0, 0.2, 0.4, 0.2])],
)
def test_annealing(digits, tmp_path, annealing, rates):
    recipe = Recipe("sgd", 0.4, epochs=4, annealing=annealing)
    assert [recipe.rate_at(done) for done in (0, 0.1, 0.2, 0.6)] == pytest.approx(rates)
    with pytest.raises(Interrupted):
        train(start(), digits, recipe, seed=1, folder=tmp_path / "parts", progress=stop_after(2))
    parts = train(start(), digits, recipe, seed=1, folder=tmp_path / "parts", keep_epochs=True)
    whole = train(start(), digits, recipe, seed=1, folder=tmp_path / "whole", keep_epochs=True)
    assert equal_states(whole.model.state_dict(), parts.model.state_dict())
    steady = train(start(), digits, replace(recipe, annealing="constant"), seed=1, folder=tmp_path / "steady")
    assert equal_states(whole.model.state_dict(), steady.model.state_dict()) == (annealing == "constant")


def test_kept_epochs(digits, tmp_path):
    trained = train(start(), digits, RECIPE, seed=1, folder=tmp_path, keep_epochs=True).model
    kept = [load_file(tmp_path / EPOCH.format(number)) for number in (1, 2, 3)]
    assert equal_states(kept[-1], trained.state_dict())
    assert not equal_states(kept[0], kept[1])


def test_the_papers_recipes():
    paper, authors, short = RECIPES.values()
    assert paper["fc3", "mnist"] == Recipe("rmsprop", 1e-3, epochs=30, batch_size=128)
    assert paper["lenet5", "cifar10"] == Recipe("sgd", 1e-2, epochs=256)
    assert paper["vgg16", "cifar10"] == Recipe("adam", 1e-2, epochs=30, batch_size=128)
    for key, rate in ((("lenet5", "cifar10"), 1e-2), (("vgg16", "cifar10"), 0.1)):
        assert replace(authors[key], epochs=1) == Recipe(
            "sgd", rate, epochs=1, momentum=0.9, nesterov=True, weight_decay=5e-4, augmented=True
        )
    assert {key for key in authors if authors[key] != paper[key]} == {
        ("lenet5", "cifar10"),
        *(("vgg16", data) for data in ("mnist", "fashion_mnist", "cifar10")),
    }
    assert {network for network, _ in short} == set(MODELS)
    assert Recipe(**short["vgg16", "cifar10"].to_dict()) == short["vgg16", "cifar10"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annealing": "cosine"}, "annealing: found 'cosine'"),
        ({"weight_decay": -1.0}, "weight_decay: found -1.0"),
        ({"nesterov": True}, "nesterov: found without momentum"),
        ({"freeze_from": 0.0}, "freeze_from: found 0.0"),
    ],
)
def test_further_settings_of_a_recipe(change, message):
    with pytest.raises(InvalidSettingError, match=message):
        Recipe("sgd", 0.1, epochs=1, **change)

"""Transferring: what is chosen on one data set, trained on another from the same initial weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import critical_neurons as cn
from critical_neurons.io.models import read_checkpoint
from critical_neurons.removal.metrics import count_parameters, measure_accuracy
from critical_neurons_reproduction.baselines import measure_sensitivity
from critical_neurons_reproduction.experiments.cells import find_recipe
from critical_neurons_reproduction.experiments.pruning import score_on, score_reference
from critical_neurons_reproduction.experiments.runner import run_cells
from critical_neurons_reproduction.store import Store
from critical_neurons_reproduction.training import CHECKPOINT, INITIAL, train

KEPT, IMAGES = 0.45, 128
LENET5_PARAMETERS, LENET5_WEIGHTS, LENET5_UNITS = 62_006, 61_770, 226


def equal_states(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def find_training(runs, record):
    """The folder that keeps the training of a cell."""
    (folder,) = {path.parent for path in runs.folder.rglob(CHECKPOINT) if record.key in path.parts}
    return folder


def draw_first_images(runs, data):
    """The images SNIP is shown: training images at random, by the seed of the cell."""
    training = runs.load(data).training
    return training.select(torch.randperm(len(training), generator=torch.Generator().manual_seed(0))[:IMAGES])


class TestUnits:
    @pytest.mark.parametrize(
        ("table", "only"), [("table-3", "mnist/fashion/lenet5"), ("snip-transfer", "mnist/fashion/ours")]
    )
    def test_the_initial_network_without_them_is_trained_on_the_target(self, finish, runs, tmp_path, table, only):
        record = finish(table, only)
        settings, initial, target = record.cell.settings, runs.build("lenet5", 0), runs.load("fashion")
        if settings["initial"]:
            scores = score_on(initial, runs.load("mnist"), settings)
        else:
            _, _, scores = score_reference(settings, runs)
        smaller = cn.prune(initial, cn.plan(scores, threshold=0.2), target.test.inputs[:1])
        assert equal_states(load_file(find_training(runs, record) / INITIAL), smaller.state_dict())
        recipe = runs.schedule.shorten(find_recipe("lenet5", "fashion"))
        by_hand = train(smaller, target, recipe, seed=0, folder=tmp_path).model
        assert record.result["accuracy"] == measure_accuracy(by_hand, target.test.inputs, target.test.labels)
        assert record.result["parameters"] == 1 - count_parameters(smaller) / LENET5_PARAMETERS
        assert 0 < record.result["as_published"] < record.result["parameters"] < 1
        reference = runs.train_reference("lenet5", "fashion", 0)
        assert record.result["reference"] == measure_accuracy(reference, target.test.inputs, target.test.labels)
        assert record.result["solver"]["status"] == "optimal"

    @pytest.mark.slow
    def test_both_networks_begin_with_the_same_weights(self, finish, runs):
        """Every weight of the smaller one is the one of the whole network between the units that stayed."""
        record = finish("table-3", "mnist/fashion/lenet5")
        smaller = load_file(find_training(runs, record) / INITIAL)
        (path,) = (path for path in runs.folder.rglob(f"fashion/lenet5/seed-0/{INITIAL}"))
        whole = load_file(path)
        _, _, scores = score_reference(record.cell.settings, runs)
        kept = {name: torch.from_numpy(np.flatnonzero(values >= 0.2)) for name, values in scores.items()}
        before = torch.arange(3)
        for name in ("0", "3", "6", "9"):
            rows = kept[name]
            assert torch.equal(smaller[f"{name}.weight"], whole[f"{name}.weight"][rows][:, before])
            assert torch.equal(smaller[f"{name}.bias"], whole[f"{name}.bias"][rows])
            before = rows

    def test_snip_keeps_a_share_of_all_units(self, finish, runs):
        """Those with the largest summed sensitivity, over all layers."""
        record = finish("snip-transfer", "mnist/fashion/snip")
        batch = draw_first_images(runs, "mnist")
        sensitivity = measure_sensitivity(runs.build("lenet5", 0), batch.inputs, batch.labels)
        sums = {name: sensitivity[name].flatten(1).sum(1).numpy() for name in ("0", "3", "6", "9")}
        count = int(KEPT * LENET5_UNITS)
        least = np.sort(np.concatenate(list(sums.values())))[-count]
        smaller = load_file(find_training(runs, record) / INITIAL)
        whole = runs.build("lenet5", 0).state_dict()
        for name, values in sums.items():
            assert torch.equal(smaller[f"{name}.bias"], whole[f"{name}.bias"][torch.from_numpy(values >= least)])
        assert record.result["units"] == pytest.approx(1 - count / LENET5_UNITS)
        assert record.result["solver"] is None

    def test_nothing_is_trained_on_the_source_at_initialisation(self, find, runs, tmp_path):
        reported = []
        own = replace(runs, folder=tmp_path / "runs", on_epoch=lambda training, *_: reported.append(training))
        (cell,) = find("snip-transfer", "mnist/fashion/ours")
        assert run_cells([cell], Store(tmp_path / "results"), own) == []
        assert dict.fromkeys(reported) == dict.fromkeys(["fashion/lenet5/seed-0", f"cells/{cell.key}"])

    @pytest.mark.slow
    def test_vgg16_is_trained_in_parts_again(self, finish):
        record = finish("table-3", "cifar10/mnist/vgg16")
        assert record.cell.settings["parts"] == {"box": "image", "score_heads": True}
        assert 0.36 <= record.result["as_published"] < record.result["parameters"] < 1
        assert 0 <= record.result["accuracy"] <= 1


class TestConnections:
    @pytest.fixture
    def masks(self, runs):
        """Of all weights the 45 % with the largest sensitivity; the first of equal ones."""
        batch = draw_first_images(runs, "fashion")
        sensitivity = measure_sensitivity(runs.build("lenet5", 0), batch.inputs, batch.labels)
        flat = torch.cat([values.flatten() for values in sensitivity.values()])
        stays = torch.zeros(len(flat), dtype=torch.bool)
        stays[flat.argsort(descending=True, stable=True)[: int(KEPT * len(flat))]] = True
        parts = stays.split([values.numel() for values in sensitivity.values()])
        return {name: part.reshape(sensitivity[name].shape) for name, part in zip(sensitivity, parts, strict=True)}

    def test_they_stay_masked_in_training(self, finish, runs, masks):
        record = finish("snip", "fashion/snip")
        folder = find_training(runs, record)
        before, after = load_file(folder / INITIAL), read_checkpoint(folder / CHECKPOINT)["model"]
        whole = runs.build("lenet5", 0).state_dict()
        assert masks.keys() == {"0", "3", "6", "9", "11"}
        model = runs.build("lenet5", 0)
        for name, mask in masks.items():
            weight, kept = (f"{name}.parametrizations.weight.{end}" for end in ("original", "0.mask"))
            assert torch.equal(before[weight], whole[f"{name}.weight"])
            assert torch.equal(after[kept], mask.to(after[kept]))
            assert torch.equal(after[weight][~mask], before[weight][~mask])
            assert not torch.equal(after[weight][mask], before[weight][mask])
            model.get_submodule(name).weight.data = torch.where(mask, after[weight], 0.0)
            model.get_submodule(name).bias.data = after[f"{name}.bias"]
        test = runs.load("fashion").test
        assert record.result["accuracy"] == measure_accuracy(model, test.inputs, test.labels)

    def test_shares(self, finish, masks):
        result = finish("snip", "fashion/snip").result
        removed = sum(int((~mask).sum()) for mask in masks.values())
        assert removed == LENET5_WEIGHTS - int(KEPT * LENET5_WEIGHTS)
        assert result["as_published"] == removed / LENET5_PARAMETERS
        assert (result["units"], result["parameters"], result["solver"]) == (0, 0, None)

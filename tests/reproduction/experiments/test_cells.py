"""Cells: the paper's protocol in settings, and names and keys that tell every run from every other."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError
from critical_neurons_reproduction.datasets import PICTURES
from critical_neurons_reproduction.experiments.cells import (
    DATA,
    FINE_TUNING,
    NETWORKS,
    OWN_RECIPES,
    QUICK,
    SHARE_SLACK,
    STEPS,
    TABLES,
    WHOLE,
    Schedule,
    describe_schedule,
    list_cells,
    select_cells,
)
from critical_neurons_reproduction.experiments.runner import RUNNERS
from critical_neurons_reproduction.published_values import TABLES as PUBLISHED
from critical_neurons_reproduction.recipes import RECIPES, Recipe
from critical_neurons_reproduction.score_settings import read_score_settings

ROUNDING = 1e-12
"""Differences of percentages, as shares."""

SEEDS = (0, 1, 2)

TABLE_2 = {
    "mnist/fc3": (0.1, 44.5, 95.9),
    "mnist/fc4": (0.1, 42.9, 96.6),
    **dict.fromkeys(("mnist/lenet5/balanced", "mnist/lenet5/authors"), (0.2, 17.2, 98.7)),
    "fashion/fc3": (0.1, 68.0, 80.0),
    "fashion/fc4": (0.1, 60.8, 86.9),
    **dict.fromkeys(("fashion/lenet5/balanced", "fashion/lenet5/authors"), (0.2, 17.8, 87.7)),
    **dict.fromkeys(("cifar10/lenet5/balanced", "cifar10/lenet5/authors"), (0.3, 9.9, 67.7)),
}
"""Threshold, percent of the parameters removed, percent accuracy left: as the paper prints them."""


def settings_of(table):
    return {cell.name.removesuffix("/seed-0"): cell.settings for cell in list_cells(table, seeds=[0])}


def every_cell(**options):
    return [cell for table in TABLES for cell in list_cells(table, seeds=SEEDS, **options)]


class TestProtocol:
    def test_all_classes_at_once_class_by_class_or_imbalanced(self):
        found = settings_of("table-1")
        assert found.keys() == {
            f"{data}/lenet5/{method}{objective}"
            for data in ("mnist", "fashion")
            for method in ("sim", "idp", "imidp")
            for objective in ("/balanced", "/authors")
        }
        for name, settings in found.items():
            _, _, method, objective = name.split("/")
            assert settings["score"]["objective"] == objective
            assert settings["score"]["by_class"] is (method != "sim")
            assert settings["score"]["loss_weight"] == 1
            assert settings["thresholds"] == [0.01]
            imbalanced = settings["batch"]["varying"], settings["batch"]["per_class"] > 1
            assert imbalanced == ((True, True) if method == "imidp" else (False, False))
            assert settings["batch"]["per_class"] == (10 if method == "imidp" else 1)

    def test_table_1_by_threshold(self):
        found = settings_of("table-1-appendix")
        assert {name.split("/")[2] for name in found} == {"idp", "sim"}
        assert all(settings["thresholds"] == [0.1, 0.01] for settings in found.values())

    def test_table_2(self):
        found = settings_of("table-2")
        assert found.keys() == TABLE_2.keys()
        for name, (threshold, removed, left) in TABLE_2.items():
            assert found[name]["kind"] == "comparison"
            assert found[name]["thresholds"] == [threshold]
            goal = found[name]["goal"]
            least = (removed - SHARE_SLACK) / 100
            assert (goal["share"], goal["accuracy"]) == pytest.approx((least, left / 100), abs=ROUNDING)
            assert goal["steps"] == STEPS
        for settings in found.values():
            assert settings["batch"] == {"per_class": 1, "varying": False, "correct": True, "seed": None}
            assert settings["score"]["loss_weight"] == 5
            assert settings["score"]["integer"] is False
            assert settings["score"]["input_radius"] == 1e-5

    @pytest.mark.parametrize(("table", "kind"), [("table-2-deep", "decoupled"), ("table-2-given", "given")])
    def test_vgg16(self, table, kind):
        found = settings_of(table)
        assert len(found) == 13
        for name, settings in found.items():
            assert settings["kind"] == kind
            assert settings["thresholds"] == [0.3]
            assert settings["share"] == (0.36 if "/share/" in name else None)
            assert settings["score"]["input_radius"] == (0 if "linearised" in name else 1e-5)
            assert settings["score"]["objective"] == "authors"
            mixed = kind == "decoupled"
            assert Recipe(**settings["fine_tuning"]) == replace(FINE_TUNING, mixed_precision=mixed)

    def test_transfer(self):
        found = settings_of("table-3")
        assert {(each["network"], each["data"], each["target"]) for each in found.values()} == {
            ("lenet5", "mnist", "fashion"),
            ("lenet5", "mnist", "cifar10"),
            ("vgg16", "cifar10", "mnist"),
            ("vgg16", "cifar10", "fashion"),
        }
        for settings in found.values():
            assert not settings["initial"]
            assert Recipe(**settings["retraining"]) == recipe_of(settings["network"], settings["target"])

    @pytest.mark.parametrize("table", ["snip", "snip-transfer"])
    def test_removal_at_initialisation(self, table):
        for settings in settings_of(table).values():
            assert settings["initial"]
            assert "recipe" not in settings
            assert settings["snip"] == {"kept": 0.45, "images": 128}
            assert (settings["score"]["loss_weight"], settings["threshold"]) == (1, 0.2)
        assert {name: settings["method"] for name, settings in settings_of("snip").items()} == {
            "fashion/lenet5/snip": "connections",
            "fashion/lenet5/ours/balanced": "scores",
            "fashion/lenet5/ours/authors": "scores",
        }
        units = {each["method"] for name, each in settings_of("snip-transfer").items() if name.endswith("snip")}
        assert units == {"units"}

    def test_rescaling_with_every_objective(self):
        found = {
            (each["data"], each["score"]["objective"], each["score"]["rescale"])
            for each in settings_of("rescale").values()
        }
        assert found == {
            (data, objective, rescale)
            for data in ("mnist", "fashion")
            for objective in ("balanced", "authors", "paper")
            for rescale in (0, 1, 2)
        }

    def test_figures(self):
        batches = settings_of("batches").values()
        assert not any(each["batch"]["correct"] for each in batches)
        by_network = Counter((each["data"], each["network"], each["score"]["objective"]) for each in batches)
        assert set(by_network.values()) == {25}
        assert {key[:2] for key in by_network} == {
            (data, network) for data in ("mnist", "fashion") for network in ("lenet5", "fc3")
        }
        weights = [each["score"]["loss_weight"] for each in settings_of("lambda").values()]
        assert len(set(weights)) == len(weights) / 2 > 5
        assert {each["incremental"] for each in settings_of("training").values()} == {False, True}
        assert {each["kind"] for each in settings_of("training").values()} == {"epochs"}

    def test_differences_are_one_change_each(self):
        found = settings_of("differences")
        for network in ("fc3", "lenet5"):
            base = found[f"fashion/{network}/as-in-table-2"]
            table = settings_of("table-2")[f"fashion/{network}" + ("/balanced" if network == "lenet5" else "")]
            shared = {name: value for name, value in table.items() if name not in ("goal", "fine_tuning", "draws")}
            assert base == {**shared, "kind": "removal"}
            others = [each for name, each in found.items() if network in name and each != base]
            assert len(others) == (6 if network == "lenet5" else 5)
            for settings in others:
                assert len([key for key in base if settings[key] != base[key]]) == 1

    def test_parts_are_scored_as_in_the_deep_table_but_for_one_change(self):
        base, *others = settings_of("parts").values()
        deep = settings_of("table-2-deep")["cifar10/vgg16/paper/share/ours"]
        assert base == {**{key: deep[key] for key in base}, "kind": "parts"}
        for settings in others:
            assert len([key for key in settings if settings[key] != base.get(key)]) == 1

    def test_recipes_are_those_of_the_paper(self):
        for cell in every_cell():
            if "recipe" in cell.settings and cell.settings["kind"] not in OWN_RECIPES:
                assert Recipe(**cell.settings["recipe"]) == recipe_of(cell.settings["network"], cell.settings["data"])

    def test_every_row_of_the_paper_has_its_cells(self):
        assert PUBLISHED.keys() <= TABLES.keys()
        for cell in every_cell():
            assert cell.settings["data"] in DATA
            assert cell.settings["network"] in NETWORKS
            assert cell.settings["kind"] in RUNNERS
        assert {cell.settings["kind"] for cell in every_cell()} == {*RUNNERS}

    def test_all_ways_to_solve_are_accepted(self):
        """Found here, not after hours of training."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        inputs, labels = torch.rand(2, 3), torch.tensor([0, 1])
        ways = {
            str(cell.settings["score"]): cell.settings["score"] for cell in every_cell() if "score" in cell.settings
        }
        assert len(ways) > 10
        for score in ways.values():
            assert math.isfinite(cn.score(model, inputs, labels, **read_score_settings(score)).logit_error)


def recipe_of(network, data):
    return RECIPES["short"][network, {"fashion": "fashion_mnist"}.get(data, data)]


@pytest.mark.parametrize("recipes", RECIPES)
def test_recipes_by_name(recipes):
    cells = {cell.name: cell.settings for cell in list_cells("table-2", seeds=[0], recipes=recipes)}
    settings = cells["cifar10/lenet5/balanced/seed-0"]
    assert Recipe(**settings["recipe"]) == RECIPES[recipes]["lenet5", "cifar10"]
    assert settings["fine_tuning"] == {**settings["recipe"], "epochs": 1}
    for cell in list_cells("table-2-deep", seeds=[0], recipes=recipes):
        assert Recipe(**cell.settings["recipe"]) == RECIPES[recipes]["vgg16", "cifar10"]
        assert Recipe(**cell.settings["fine_tuning"]) == replace(FINE_TUNING, mixed_precision=True)
    with pytest.raises(InvalidSettingError, match=r"--recipes: found 'own'\. Accepted: paper, authors, short"):
        list_cells("table-2", seeds=[0], recipes="own")


class TestNamesAndKeys:
    def test_unique_over_all_tables_seeds_and_schedules(self):
        whole, short, quick = every_cell(), every_cell(schedule=Schedule(epochs=2)), every_cell(profile="quick")
        for cells in (whole, short, quick):
            assert len({(cell.table, cell.name) for cell in cells}) == len(cells)
        cells = [*whole, *short, *quick, *every_cell(profile="quick", schedule=QUICK)]
        assert len({cell.key for cell in cells}) == len(cells)

    def test_seeds_change_the_settings_and_nothing_else(self):
        first, second = (list_cells("table-2", seeds=[seed])[0] for seed in (0, 7))
        assert (first.name, second.name) == ("mnist/fc3/seed-0", "mnist/fc3/seed-7")
        assert {**first.settings, "seed": 7} == second.settings

    def test_quick_cells_take_any_images(self):
        quick, full = (
            [cell.settings["batch"]["correct"] for cell in every_cell(profile=profile) if "batch" in cell.settings]
            for profile in ("quick", "full")
        )
        assert len(quick) == len(full)
        assert not any(quick)
        assert any(full)


def test_cells_know_the_pictures_they_are_for():
    for cell in every_cell():
        wanted = {cell.settings["data"], cell.settings.get("target", cell.settings["data"])}
        assert cell.settings["pictures"].keys() == wanted
    (cell,) = select_cells(list_cells("table-2-deep", seeds=[0]), ["paper/share/ours"])
    assert cell.settings["pictures"] == {"cifar10": PICTURES["cifar10"]}


class TestSchedules:
    def test_whole_ones_are_not_described(self):
        assert {cell.schedule for cell in every_cell()} == {None}

    @pytest.mark.parametrize(
        ("schedule", "described"),
        [
            (Schedule(epochs=30), None),
            (Schedule(epochs=3), "3 of 30 epochs"),
            (Schedule(images=50), "50 training images"),
            (Schedule(epochs=1, measured=20), "1 of 30 epochs, 20 images measured"),
            (Schedule(narrow=4), "VGG-16 with 1/4 of its maps"),
        ],
    )
    def test_what_is_cut_down_is_described(self, schedule, described):
        cell = list_cells("table-2", seeds=[0], schedule=schedule)[0]
        assert cell.schedule == described == describe_schedule(cell.settings, schedule)
        assert (cell.key == list_cells("table-2", seeds=[0])[0].key) is (described is None)

    def test_the_longest_training_counts(self):
        found = {cell.name: cell.schedule for cell in list_cells("table-3", seeds=[0], schedule=Schedule(epochs=30))}
        assert found["mnist/fashion/lenet5/balanced/seed-0"] is None
        assert found["mnist/cifar10/lenet5/balanced/seed-0"] == "30 of 256 epochs"

    def test_recipes_become_shorter_never_longer(self):
        recipe = Recipe("sgd", 0.1, epochs=5)
        assert [Schedule(epochs).shorten(recipe).epochs for epochs in (3, 5, 8, None)] == [3, 5, 5, 5]

    @pytest.mark.parametrize("name", ["epochs", "images", "measured", "narrow"])
    def test_refusals(self, name):
        with pytest.raises(InvalidSettingError, match=f"--{name}: found 0. Accepted: at least one"):
            Schedule(**{name: 0})


class TestSelecting:
    @pytest.mark.parametrize(
        ("only", "expected"),
        [
            (["fashion/fc4"], ["fashion/fc4/seed-0", "fashion/fc4/seed-1"]),
            (["fashion/lenet5/authors/"], ["fashion/lenet5/authors/seed-0", "fashion/lenet5/authors/seed-1"]),
            (["fc4/seed-1"], ["mnist/fc4/seed-1", "fashion/fc4/seed-1"]),
            (["fc4/seed-0", "mnist/fc3/seed-0"], ["mnist/fc3/seed-0", "mnist/fc4/seed-0", "fashion/fc4/seed-0"]),
        ],
    )
    def test_by_whole_parts_of_the_name(self, only, expected):
        cells = list_cells("table-2", seeds=[0, 1])
        assert [cell.name for cell in select_cells(cells, only)] == expected

    def test_in_order(self):
        """A transfer from MNIST to CIFAR-10, not the other way."""
        names = [cell.name for cell in select_cells(list_cells("table-3", seeds=[0]), ["mnist/cifar10"])]
        assert names == ["mnist/cifar10/lenet5/balanced/seed-0", "mnist/cifar10/lenet5/authors/seed-0"]

    def test_all_without_a_text(self):
        cells = list_cells("snip", seeds=[0])
        assert select_cells(cells, []) == cells

    @pytest.mark.parametrize("text", ["fash", "fashion/vgg16", "lenet5/fashion", ""])
    def test_what_is_in_no_name(self, text):
        cells = list_cells("table-2", seeds=[0, 1])
        with pytest.raises(InvalidSettingError, match=rf"--only {text}: no such cell.*mnist/fc3, .* and 2 more\."):
            select_cells(cells, ["mnist", text])


def test_unknown_tables_and_seeds():
    with pytest.raises(InvalidSettingError, match=r"table-4: no such table.*Accepted: table-1, .*, all\."):
        list_cells("table-4", seeds=[0])
    with pytest.raises(InvalidSettingError, match=r"seeds: found -1\. Accepted: zero or above"):
        list_cells("table-1", seeds=[0, -1])
    assert list_cells("table-1", seeds=[], schedule=WHOLE) == []

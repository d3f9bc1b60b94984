"""benchmarks/choosing_data.py: which images are drawn, and the way from trained networks to the page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import stdtr
from torch import nn

import critical_neurons as cn
from choices import CHOICES, CLASSES, QUESTIONS, SIZES, Choice
from choosing_data import CASES, TABLE, Trial, list_cells, run_cells, search_by_class
from choosing_data_page import CONFIDENCE, Difference, build_page, collect, judge, write_page
from critical_neurons.cli.options import MOST_PER_CLASS
from critical_neurons.removal.refit.stream import LEAST_INPUTS
from critical_neurons.selection import effort
from critical_neurons_reproduction.datasets import Dataset, LabelledImages
from critical_neurons_reproduction.experiments.cells import Schedule
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.store import Cell, Record, Store
from quality import PLAIN, Case, build_subject
from tests.blocks import CLASSES as BLOCKS
from tests.blocks import write_blocks

TOLERANCE = 1e-9
FEATURES, POINTS, FEW = 6, 400, 40
HOW_MANY, WHICH, BY_CLASS = QUESTIONS


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Searches make one choice each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(effort.EFFORTS, "standard", effort.EFFORTS["quick"])
        yield


def make_part(count: int, seed: int) -> LabelledImages:
    generator = torch.Generator().manual_seed(seed)
    return LabelledImages(torch.rand(count, FEATURES, generator=generator), torch.arange(count) % 4)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return Dataset(make_part(POINTS, 0), make_part(FEW, 1), make_part(FEW, 2))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4)).eval()


def measure_margins(model: nn.Module, inputs: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        outputs = np.sort(model(inputs).numpy(), axis=1)
    return outputs[:, -1] - outputs[:, -2]


@pytest.mark.parametrize("kind", ["even", "unsure", "sure"])
def test_as_many_of_every_class_are_drawn(model, data, kind):
    drawn = Trial(model, data, 0).draw(Choice(FEW, kind))
    assert drawn.labels.bincount().tolist() == [FEW // 4] * 4
    assert not drawn.labels.equal(drawn.labels.sort().values)  # what is held out of them is of all classes
    assert len({row.numpy().tobytes() for row in drawn.inputs}) == FEW


def test_the_reference_is_what_the_quality_benchmark_is_calibrated_on(model, data):
    drawn = Trial(model, data, 3).draw(Choice(FEW))
    subject = build_subject(Case(PLAIN, "fashion", (3,)), model, data.training, 3, FEW)
    assert torch.equal(drawn.inputs, subject.inputs)
    assert torch.equal(drawn.labels, subject.labels)


def test_any_are_drawn_from_all_whatever_their_class(model, data):
    drawn = [Trial(model, data, seed).draw(Choice(FEW, "any")) for seed in range(3)]
    assert all(len({row.numpy().tobytes() for row in each.inputs}) == FEW for each in drawn)
    assert len({each.digest for each in drawn}) == 3
    assert any(len(set(each.labels.bincount().tolist())) > 1 for each in drawn)


def test_correct_ones_are_correct(data):
    """A network that is right where the first feature is above a half."""
    labels = data.training.labels
    outputs = nn.functional.one_hot(torch.where(data.training.inputs[:, 0] > 0.5, labels, (labels + 1) % 4), 4)

    class Known(nn.Module):
        def forward(self, inputs):
            rows = (inputs[:, None] == data.training.inputs).all(2).float()
            return rows @ outputs.float()

    drawn = Trial(Known(), data, 0).draw(Choice(FEW, "correct"))
    assert (drawn.inputs[:, 0] > 0.5).all()
    assert drawn.labels.bincount().tolist() == [FEW // 4] * 4


@pytest.mark.parametrize(("kind", "sign"), [("unsure", 1), ("sure", -1)])
def test_margins_say_how_sure_the_network_is(model, data, kind, sign):
    """Of every class, those that are drawn against those that are not."""
    drawn, training = Trial(model, data, 0).draw(Choice(FEW, kind)), data.training
    for label in range(4):
        ours = sign * measure_margins(model, drawn.inputs[drawn.labels == label])
        theirs = sign * measure_margins(model, training.inputs[training.labels == label])
        np.testing.assert_allclose(np.sort(ours), np.sort(theirs)[: FEW // 4], rtol=1e-4)


def test_by_class_is_the_mean_of_one_search_per_class(model, data):
    images = Trial(model, data, 0).draw(Choice(4 * LEAST_INPUTS))
    search = partial(cn.search, model, units=0.4, compensate="least_squares", seed=0)
    found = search_by_class(search, images)
    parts = [search(images.inputs[images.labels == label]) for label in range(4)]
    for layer in found:
        np.testing.assert_allclose(found[layer], np.mean([part[layer] for part in parts], axis=0), atol=TOLERANCE)
    plan = cn.plan(found)
    assert {name: len(plan.kept[name]) for name in found} == {"0": 3, "2": 2}
    for layer, values in found.items():
        kept = plan.kept[layer]
        assert values[kept].min() >= np.delete(values, kept).max()
    assert len(found.inputs) == len(images)


def test_test_images_have_no_part(model, data):
    """Other test images, the same result; other validation images, another."""
    choice = Choice(FEW)

    def measure(validation: LabelledImages, test: LabelledImages) -> dict:
        result = Trial(model, Dataset(data.training, validation, test), 0).run(choice, "least_squares")
        return {name: value for name, value in result.items() if name != "seconds"}

    usual = measure(data.validation, data.test)
    assert measure(data.validation, make_part(8, 5)) == usual
    assert measure(make_part(FEW, 6), data.test)["images"]["digest"] != usual["images"]["digest"]


def test_cells_of_all_choices_differ():
    cells = [cell for case in CASES for cell in list_cells(case, CHOICES)]
    assert len({cell.key for cell in cells}) == len({cell.name for cell in cells}) == len(cells)
    assert len(cells) == sum(len(case.seeds) for case in CASES) * len(CHOICES) * 2


def test_defaults_are_among_the_answers():
    """And every size can be drawn, and searched with."""
    assert all(question.default in question.answers for question in QUESTIONS)
    assert HOW_MANY.answers[HOW_MANY.default].images == CLASSES * MOST_PER_CLASS
    assert all(size % CLASSES == 0 and size >= LEAST_INPUTS for size in SIZES)
    assert Choice().images // CLASSES >= LEAST_INPUTS  # class by class


@pytest.mark.parametrize(
    ("choice", "compensate"),
    [
        (Choice(4 * LEAST_INPUTS, by_class=True), "least_squares"),
        pytest.param(Choice(FEW), "none", marks=pytest.mark.slow),
    ],
)
def test_what_is_measured_is_refitted_on_all_images(model, data, choice, compensate):
    trial = Trial(model, data, 0)
    result = trial.run(choice, compensate)
    images = trial.draw(choice)
    search = partial(cn.search, model, units=0.3, compensate=compensate, seed=0)
    scores = search_by_class(search, images) if choice.by_class else search(images.inputs)
    smaller = cn.prune(model, cn.plan(scores), images.inputs, compensate=compensate)
    with torch.no_grad():
        right = smaller(data.validation.inputs).argmax(1) == data.validation.labels
    assert result["accuracy"] == pytest.approx(right.double().mean().item())
    assert result["kept"] == {"0": 2, "2": 1, "4": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Cell], Store]:
    """784-300-100-10 on blocks, refitted, two choices."""
    folder = tmp_path_factory.mktemp("choosing")
    store = Store(folder / "results")
    case = Case(PLAIN, "fashion", (0,), stored=True, measured=20)
    cells = [cell for cell in list_cells(case, [Choice(40), Choice(80, "any")]) if "least_squares" in cell.name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "hugging_face")
        runs = Runs(folder / "runs", write_blocks(folder / "data"), Schedule(epochs=2), folder / "cache")
        assert run_cells(case, cells, store, runs) == []
        (failed,) = run_cells(case, list_cells(case, [Choice(BLOCKS)])[:1], store, runs)
    assert failed.startswith(f"fashion/{PLAIN}/seed-0/images-{BLOCKS}/even/at-once/none: ")
    return cells, store


def test_results_say_what_was_measured(finished):
    cells, store = finished
    assert store.find_missing(cells) == []
    for record in store.find_all(TABLE):
        result, choice = record.result, record.cell.settings["choice"]
        assert 0 <= result["accuracy"] <= 1
        assert sum(result["images"]["drawn"]) == choice["images"]
        assert result["images"]["measured"] == 20
        assert list(result["kept"].values()) == [90, 30, BLOCKS]
        assert set(result["seconds"]) == {"search", "prune", "cell"}
        assert result["seconds"]["cell"] >= result["seconds"]["search"] > 0


def test_page_from_a_run(finished, tmp_path):
    cells, store = finished
    write_page(store.find_all(TABLE), [*cells, *list_cells(CASES[0], [Choice()])], tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "2 cells" in page
    assert "**Not complete.** 6 of 8 cells are not measured yet." in page
    assert f"{PLAIN}, Fashion-MNIST:" in page


def test_page_of_nothing():
    assert "Nothing has been measured yet." in build_page([], list_cells(CASES[0], CHOICES))


def make_records(lost: dict[Choice, tuple[float, ...]]) -> tuple[list[Record], list[Cell]]:
    """Cells of the first case in which a choice loses so many points, by seed, with and without compensation."""
    machine, records, cells = {"processor": "some", "cores": 2}, [], []
    for cell in list_cells(CASES[0], list(lost)):
        seed, choice = cell.settings["seed"], Choice(**cell.settings["choice"])
        result = {
            "before": 0.9,
            "accuracy": 0.9 - lost[choice][seed] / 100,
            "seconds": {"search": 2.0},
            "images": {"measured": 100},
            "threads": 1,
            "source": "here",
        }
        records.append(Record(cell, result, 1, "2026-01-01", {"torch": "2"}, machine))
        cells.append(cell)
    return records, cells


@pytest.mark.parametrize(
    ("other", "verdict"),
    [((3.0, 3.1, 3.2), "worse"), ((1.0, 1.2, 1.1), "better"), ((2.3, 1.8, 2.1), "inconclusive")],
)
def test_verdicts_are_those_of_a_paired_test(other, verdict):
    default = (2.0, 2.1, 2.0)
    difference = Difference(tuple(theirs - ours for theirs, ours in zip(other, default, strict=True)))
    assert difference.verdict == verdict
    pairs = np.subtract(other, default)
    assert difference.mean == pytest.approx(pairs.mean())
    # An end of the interval, as a hypothesis, is rejected with just this confidence.
    statistic = difference.reach / (pairs.std(ddof=1) / len(pairs) ** 0.5)
    assert 1 - 2 * stdtr(len(pairs) - 1, -statistic) == pytest.approx(CONFIDENCE)


def test_a_single_pair_tells_nothing():
    assert Difference((5.0,)).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("by_class", "state"),
    [
        ((3.0, 3.1, 3.1), "**supported**. Worse: by class without compensation (+1.03"),
        ((1.0, 1.2, 1.1), "**not supported**. Better: by class without compensation (-0.93"),
        ((2.3, 1.8, 2.1), "**neither supported nor contradicted**. Inconclusive: by class without"),
    ],
)
def test_defaults_are_judged(by_class, state):
    lost = {Choice(): (2.0, 2.1, 2.0), Choice(by_class=True): by_class}
    assert f"*at once*: {state}" in judge(collect(*make_records(lost)), BY_CLASS)


def test_nothing_is_judged_before_it_is_whole():
    records, cells = make_records({Choice(): (2.0, 2.1, 2.0), Choice(by_class=True): (1.0, 1.2, 1.1)})
    assert judge(collect(records[:-1], cells), BY_CLASS) == "the default is *at once*. Not fully measured yet."


def test_differences_are_paired_over_seeds_that_have_both():
    """Seed 1 of the default is missing: what the other loses there counts in its mean, not in the difference."""
    records, cells = make_records({Choice(): (2.0, 9.0, 4.0), Choice(kind="sure"): (3.0, 1.0, 8.0)})
    left = [each for each in records if "seed-1/images-1000/even" not in each.cell.name]
    study = collect(left, cells)
    difference = study.compare(study.cases, Choice(kind="sure"), Choice(), "none")
    assert difference.pairs == pytest.approx((1.0, 4.0))
    page = build_page(left, cells)
    assert "| largest margin | 4.00 ± 3.61 | +2.50 ± 1.50 | 2.0 |" in page
    assert "| class-balanced | 3.00 ± 1.41 (2 of 3 seeds) | default | 2.0 |" in page


def test_results_of_other_settings_do_not_count():
    records, cells = make_records({Choice(): (2.0, 2.1, 2.0)})
    assert "Nothing has been measured yet." in build_page(records, list_cells(CASES[1], CHOICES))
    assert "6 cells" in build_page(records, cells)

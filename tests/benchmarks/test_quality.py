"""benchmarks/quality.py: what the methods prefer, and the way from trained networks to the page, on tiny data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.io.builtin_models import lenet5, vgg16
from critical_neurons.removal.refit.ridge import add_ridge
from critical_neurons.selection import effort
from critical_neurons_reproduction.experiments.cells import Schedule
from critical_neurons_reproduction.experiments.workspace import Runs
from critical_neurons_reproduction.store import Cell, Record, Store
from preferring import METHODS, Subject, list_methods, prefer
from quality import CASES, PAPER, PLAIN, TABLE, Case, count_missing, find_uniform_share, list_cells, run_cells
from quality_page import OURS, UNIFORM, collect, list_bars, write_page
from tests.blocks import write_blocks

TOLERANCE = 1e-6
IMAGES = 24


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Searches make one choice each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(effort.EFFORTS, "standard", effort.EFFORTS["quick"])
        yield


def build_subject(model: nn.Module, *shape: int, program=PAPER) -> Subject:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(IMAGES, *shape, generator=generator)
    labels = torch.arange(IMAGES) % 4
    return Subject(model.eval(), inputs, labels, program)


@pytest.fixture(scope="module")
def small() -> Subject:
    torch.manual_seed(1)
    return build_subject(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4)), 6)


@pytest.fixture(scope="module")
def deep() -> Subject:
    torch.manual_seed(0)
    return build_subject(vgg16(narrow=32), 3, 32, 32, program={"formulation": "linearised"})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_number_for_every_unit(deep, method):
    subject = deep
    before = {name: values.clone() for name, values in subject.model.state_dict().items()}
    values = prefer(method, subject)
    assert values.shape == (subject.structure.unit_count,)
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    assert all(torch.equal(before[name], now) for name, now in subject.model.state_dict().items())


def test_norms_of_batches_need_batch_norms():
    assert "BN scale" in list_methods(vgg16(narrow=32))
    assert "BN scale" not in list_methods(lenet5())


def test_taylor_and_hessian_see_all_images(small):
    """By hand, from the gradients of single images: incoming weights and those that read the unit, averaged."""
    model = small.model
    first, second = model[0], model[2]
    gradients = []
    for inputs, label in zip(small.inputs, small.labels, strict=True):
        loss = nn.functional.cross_entropy(model(inputs[None]), label[None])
        gradients.append(torch.autograd.grad(loss, [first.weight, second.weight]))
    incoming, outgoing = (torch.stack(each) for each in zip(*gradients, strict=True))
    expected = {
        "Taylor": (first.weight * incoming.mean(0)).abs().sum(1) + (second.weight * outgoing.mean(0)).abs().sum(0),
        "Hessian": (first.weight**2 * (incoming**2).mean(0)).sum(1)
        + (second.weight**2 * (outgoing**2).mean(0)).sum(0),
    }
    for method, values in expected.items():
        wanted = (values / values.mean()).detach().numpy()
        np.testing.assert_allclose(prefer(method, small)[:8], wanted, rtol=1e-4)


def test_greedy_elimination_removes_what_costs_the_next_layer_least(small):
    """The first to go is the one without which the least-squares fit of the next layer is best; removed singly, every
    unit counts by that fit."""
    values = prefer("greedy elimination", small)[:8]
    (moments,) = small.moments["2"]
    squares = add_ridge(moments.covariance.double()).numpy()
    weight = small.model[2].weight.detach().double().numpy().T

    def fit(kept: list[int]) -> float:
        inside = np.ix_(kept, kept)
        fitted = np.linalg.solve(squares[inside], squares[kept] @ weight)
        return float(np.trace(weight.T @ squares @ weight - (squares[kept] @ weight).T @ fitted))

    errors = {next(iter({*range(8)} - {*kept})): fit(list(kept)) for kept in combinations(range(8), 7)}
    assert int(values.argmin()) == min(errors, key=errors.__getitem__)
    alone, wanted = prefer("single removal", small)[:8], np.array([errors[unit] for unit in range(8)])
    np.testing.assert_allclose(alone, wanted / wanted.mean(), rtol=1e-6)


def test_activations_are_those_behind_the_relu(small):
    with torch.no_grad():
        read = small.model[:2](small.inputs)
    wanted = {
        "mean activation": read.mean(0),
        "mean x outgoing norm": read.mean(0) * small.model[2].weight.norm(dim=0),
        "deviation x outgoing norm": read.std(0, correction=0) * small.model[2].weight.norm(dim=0),
    }
    for method, values in wanted.items():
        expected = (values / values.mean()).detach().numpy()
        np.testing.assert_allclose(prefer(method, small)[:8], expected, rtol=1e-3, atol=TOLERANCE)


def test_one_share_fits_and_no_larger_one_does(small):
    scores = cn.search(small.model, small.inputs, macs=0.5)
    share = find_uniform_share(small, scores, 0.5)
    bare = replace(scores, settings={})

    def count(units: float) -> int:
        kept = cn.plan(bare, units=units).kept
        widths = [6, len(kept["0"]), len(kept["2"]), 4]
        return sum(a * b for a, b in pairwise(widths))

    whole = count(1.0)
    assert count(share) <= 0.5 * whole < count(share + 0.001)


def test_cells_of_all_cases_differ():
    cells = [cell for case in CASES for cell in list_cells(case, "test")]
    assert len({cell.key for cell in cells}) == len({cell.name for cell in cells}) == len(cells)
    validation = [cell for case in CASES for cell in list_cells(case, "validation")]
    assert not {cell.key for cell in cells} & {cell.key for cell in validation}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """784-300-100-10 and LeNet-5 on blocks, a few methods, by share and by multiply-adds."""
    folder = tmp_path_factory.mktemp("quality")
    store = Store(folder / "results")
    common = {"removed": (0.7,), "sizes": (20,), "methods": ("L1", "greedy elimination"), "draws": 2, "measured": 40}
    cases = [
        Case(PLAIN, "fashion", (0,), macs=(0.3,), stored=True, **common),
        Case("lenet5", "mnist", (0,), macs=(), **common),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "hugging_face")
        runs = Runs(folder / "runs", write_blocks(folder / "data"), Schedule(epochs=2), folder / "cache")
        for case in cases:
            cells = list_cells(case, "validation")
            assert run_cells(case, cells, store, runs) == []
            assert store.find_missing(cells) == []
        cell = list_cells(cases[0], "validation")[0]
        before = store.find(cell)
        assert run_cells(cases[0], [cell], store, runs, known=store) == []
        again = store.find(cell)
        assert before
        assert again
        assert again.result["accuracy"] == before.result["accuracy"]
        assert again.result["seconds"]["methods"] == before.result["seconds"]["methods"]
        searched, search = [], cn.search
        patch.setattr(
            cn, "search", lambda *given, **wanted: searched.append(wanted["compensate"]) or search(*given, **wanted)
        )
        assert run_cells(cases[0], [cell], store, runs, known=store, searched=("none",)) == []
        once_more = store.find(cell)
        assert once_more
        assert once_more.result["accuracy"] == before.result["accuracy"]
        assert searched == ["none"]
    return store.find_all(TABLE)


@pytest.mark.slow
def test_results_say_what_was_measured(records):
    assert len(records) == 3
    for record in records:
        accuracy, macs = record.result["accuracy"], record.result["macs"]
        by_macs = "macs" in record.cell.settings["budget"]
        names = {"random", "L1", "greedy elimination"}
        assert set(accuracy) == {OURS} | names | ({name + UNIFORM for name in names} if by_macs else set())
        shares = [record.result["before"], *(each for found in accuracy.values() for each in found.values())]
        assert all(0 <= share <= 1 for share in shares)
        assert set(record.result["seconds"]["search"]) == {"none", "least_squares"}
        assert record.result["images"]["measured"] <= 40
        reached = [each for found in macs.values() for each in found.values()]
        if by_macs:
            assert max(reached) <= 0.3
        else:
            assert max(reached) == min(reached)  # the same counts


@pytest.mark.slow
def test_page_from_a_run(records, tmp_path):
    usual = [*records, *(relabel(record, images=1000) for record in records)]
    write_page(usual, tmp_path / "quality.md", {"mnist/fc3": 7})
    page = (tmp_path / "quality.md").read_text() + (tmp_path / "quality-cells.md").read_text()
    assert "not measured yet: mnist/fc3 (7)." in page
    assert "784-300-100-10, Fashion-MNIST, 70 % removed (validation)" in page
    for name in ("fashion-784-300-100-10", "mnist-lenet5", "mnist-lenet5-images"):
        for suffix in (".png", ".svg"):
            assert (tmp_path / "quality" / f"{name}{suffix}").stat().st_size > 0
        assert f"quality/{name}.svg" in page


def test_cells_are_missing_until_they_are_stored():
    case = CASES[0]
    names = [cell.name for cell in list_cells(case, "test")]
    assert count_missing([])[f"{case.data}/{case.network}"] == len(names)
    assert count_missing(names[1:])[f"{case.data}/{case.network}"] == 1
    assert f"{case.data}/{case.network}" not in count_missing(names)


def test_page_of_nothing(tmp_path):
    write_page([], tmp_path / "quality.md", {})
    assert "Nothing has been measured yet." in (tmp_path / "quality-cells.md").read_text()
    assert (tmp_path / "quality.md").exists()


def relabel(record: Record, **settings) -> Record:
    return replace(record, cell=replace(record.cell, settings={**record.cell.settings, **settings}))


def make_record(seed: int, ours: float, best: float, *, part: str = "test", removed: float = 0.8) -> Record:
    """A cell in which ours leaves `ours` and L1 `best`, of 0.9, with and without compensation; random leaves 0.1."""
    settings = {
        "network": PLAIN,
        "data": "fashion",
        "seed": seed,
        "images": 1000,
        "budget": {"removed": removed},
        "part": part,
    }
    left = {OURS: ours, "random": 0.1, "L1": best}
    result = {
        "before": 0.9,
        "accuracy": {name: {"none": share, "least_squares": share} for name, share in left.items()},
        "seconds": {
            "search": {"none": 50.0, "least_squares": 1.0},
            "prune": {"none": 11.0, "least_squares": 1.0},
            "methods": {"L1": 0.1},
        },
        "images": {"measured": 100},
        "threads": 1,
        "torch_pruning": "1.6.1",
    }
    machine = {"processor": "some", "cores": 2}
    return Record(Cell(TABLE, f"{seed} {part} {removed}", settings), result, 1, "2026-01-01", {"torch": "2"}, machine)


def test_differences_are_paired_over_seeds():
    """1 and 3 points: 2 in the mean, with a standard error of 1."""
    (found,) = collect([make_record(0, 0.80, 0.79), make_record(1, 0.70, 0.67)])
    difference = found.compare("none")
    assert difference.best == "L1"
    assert difference.mean == pytest.approx(2.0)
    assert difference.error == pytest.approx(1.0)
    assert difference.verdict == "wins"
    assert str(difference) == "+2.00 ± 1.00"
    assert found.lose(OURS, "none") == pytest.approx([10.0, 20.0])


@pytest.mark.parametrize(
    ("ours", "best", "verdict"),
    [((0.7, 0.7), (0.71, 0.69), "ties"), ((0.7, 0.7), (0.71, 0.72), "loses"), ((0.7,), (0.71,), "loses")],
)
def test_verdicts(ours, best, verdict):
    pairs = zip(ours, best, strict=True)
    (found,) = collect([make_record(seed, *pair) for seed, pair in enumerate(pairs)])
    assert found.compare("none").verdict == verdict


def test_bars_name_what_falls_short():
    """0.6 of a point above at 80 %: enough with compensation, not without; too much lost; a second too long."""
    bars = list(list_bars(collect([make_record(0, 0.806, 0.8), make_record(1, 0.806, 0.8)])))
    states = [(bar.asked, len(bar.short)) for bar in bars]
    assert states == [(1, 0), (1, 1), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1), (0, 0)]
    assert bars[0].state == "met"
    assert bars[1].state == "**0 of 1**"
    assert bars[-1].state == "not measured"
    assert "80 % removed +0.60 ± 0.00 (L1, losing 10.00)" in bars[1].short[0]


def test_test_images_count_where_there_are_any():
    validation = [make_record(seed, 0.8, 0.7, part="validation") for seed in range(3)]
    (found,) = collect(validation)
    assert (found.part, len(found.results)) == ("validation", 3)
    (found,) = collect([*validation, make_record(0, 0.6, 0.7)])
    assert (found.part, len(found.results)) == ("test", 1)

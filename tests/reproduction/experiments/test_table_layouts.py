"""Rendering, plotting and the page, from stores filled by hand."""

import csv
import io
import json
import shutil

import pytest

from critical_neurons_reproduction.experiments import TABLES, build_tables, list_cells, write_page, write_tables
from critical_neurons_reproduction.experiments.cells import PART_CHANGES, QUICK, Schedule, select_cells
from critical_neurons_reproduction.experiments.overview import NOT_RUN, explain, mark, sum_up
from critical_neurons_reproduction.experiments.plots import draw_figure
from critical_neurons_reproduction.experiments.table_layouts import FIGURES, LAYOUTS
from critical_neurons_reproduction.result_tables import Figure, Row, Table
from critical_neurons_reproduction.store import Store

SEEDS = range(2)
COMMON = {"seconds": 3, "test_images": {"mnist": "0123456789abcdef"}}
SOLVER = {"status": "optimal", "objective": -1.5, "gap": 2e-5, "seconds": 2, "logit_error": 0, "scores": {}}


def removal(threshold, seed, rule="paper"):
    """Accuracies that tell rules, thresholds and seeds apart."""
    accuracy = 0.8 + 0.1 * threshold + 0.01 * seed + 0.001 * (rule == "validation")
    return {
        "rule": rule,
        "threshold": threshold,
        "units": 0.25,
        "as_published": 0.5,
        "parameters": 0.75,
        "accuracy": accuracy,
        "biases_left": 0.7,
        "random": [0.2, 0.4],
        "critical": 0.1,
        "L1": 0.6,
        "L2": 0.61,
        "fine_tuned": 0.9,
    }


def invent(cell):
    """A result of the right form."""
    settings = cell.settings
    seed = settings["seed"]
    match settings["kind"]:
        case "removal":
            removals = [removal(threshold, seed) for threshold in settings["thresholds"]]
            return {"reference": 0.95, "solver": SOLVER, "removals": removals, **COMMON}
        case "comparison":
            threshold = settings["thresholds"][0]
            chosen = removal(threshold, seed, "validation")
            removals = [
                removal(threshold, seed),
                {**chosen, "threshold": {"0": threshold, "2": threshold / 2}},
            ]
            return {"reference": 0.95, "solver": SOLVER, "removals": removals, **COMMON}
        case "transfer":
            shares = {"units": 0.25, "as_published": 0.5, "parameters": 0.75}
            solver = {"solver": SOLVER} if settings["method"] == "scores" else {}
            return {"reference": 0.95, "accuracy": 0.9, **shares, **solver, **COMMON}
        case "given" | "decoupled":
            found = removal(settings["thresholds"][0], seed)
            kept = ("threshold", "units", "as_published", "parameters", "accuracy", "fine_tuned")
            scores = {"solver": SOLVER, "mean_score": 0.4, "below": 0.3, "removed": {"0": 3, "7": 21}}
            return {"reference": 0.95, **scores, **{k: found[k] for k in kept}, **COMMON}
        case "parts":
            found = removal(settings["thresholds"][0], seed)
            kept = ("threshold", "units", "as_published", "parameters", "accuracy")
            scores = {"solver": SOLVER, "mean_score": 0.4, "below": 0.3}
            return {"reference": 0.95, **scores, **{k: found[k] for k in kept}, **COMMON}
        case "replay":
            return {"accuracy": 0.7, "losses": [1.0, 0.5], "threads": 2, **COMMON}
        case "epochs":
            point = {"reference": 0.95, "accuracy": 0.9, "units": 0.25, "as_published": 0.5, "solver": SOLVER}
            return {"epochs": [{"epoch": number, **point} for number in (1, 2, 3)], **COMMON}


@pytest.fixture(scope="module")
def cells():
    return [cell for table in TABLES for cell in list_cells(table, seeds=SEEDS)]


@pytest.fixture(scope="module")
def filled(cells, tmp_path_factory):
    found = Store(tmp_path_factory.mktemp("filled"))
    for cell in cells:
        found.add(cell, invent(cell))
    return found


@pytest.fixture(scope="module")
def tables(cells, filled):
    return build_tables(cells, filled)


@pytest.fixture
def store(filled, tmp_path):
    """A copy that a test may add to."""
    return Store(shutil.copytree(filled.folder, tmp_path / "results"))


def read_csv(table):
    return list(csv.DictReader(io.StringIO(table.to_csv())))


def find_row(table, *labels):
    return next(row for row in table.rows if row.labels == labels)


def test_every_table_has_a_layout():
    assert set(LAYOUTS) == set(TABLES)


def test_nothing_is_missing_of_a_full_store(tables):
    for name, table in tables.items():
        assert table.rows, name
        assert "missing" not in table.to_markdown(), name
        assert " seeds)" not in table.to_markdown(), name


def test_everything_is_missing_of_an_empty_store(cells, tmp_path):
    tables = build_tables(cells, Store(tmp_path))
    assert find_row(tables["table-2"], "MNIST", "FC-3", "0.1").ours.get("Ours") is None
    assert "missing" in tables["table-2"].to_markdown()
    assert not tables["batches-fashion-lenet5"].rows


def test_table_1_tells_methods_apart_and_percent_from_shares(tables):
    table = tables["table-1"]
    for method in ("IDP", "IMIDP", "SIM"):
        row = find_row(table, "Fashion-MNIST", method)
        assert row.ours["accuracy"].mean == pytest.approx(100 * (0.8 + 0.1 * 0.01 + 0.005))
        assert row.ours["prune"].mean == 50
        assert row.ours["units"].mean == 25
    assert find_row(table, "MNIST", "Ref").ours["accuracy"].seeds == len(SEEDS)


def test_the_appendix_has_both_thresholds(tables):
    table = tables["table-1-appendix"]
    means = [find_row(table, "MNIST", "SIM", each).ours["accuracy"].mean for each in ("0.1", "0.01")]
    assert means == pytest.approx([81.5, 80.6])


def test_table_2_by_both_rules_and_both_programs_of_vgg16(tables):
    paper = find_row(tables["table-2"], "MNIST", "FC-3", "0.1")
    chosen = find_row(tables["table-2-chosen"], "MNIST", "FC-3")
    assert paper.ours["Ours"].mean + 0.1 == pytest.approx(chosen.ours["Ours"].mean)
    assert chosen.ours["threshold, mean"].mean == pytest.approx(7.5)
    assert paper.ours["RP"].mean == pytest.approx(30)
    rows = [row.labels for row in tables["table-2-deep"].rows]
    assert rows == [(program, rule) for program in ("paper", "linearised") for rule in ("share", "paper")]
    for name in ("table-2", "table-2-chosen"):
        assert "VGG-16" not in {row.labels[1] for row in tables[name].rows}
        assert {row.labels[1] for row in tables[f"{name}-authors"].rows} == {"LeNet-5"}


def test_rescale_keeps_the_objectives_apart(cells, store, tmp_path):
    (cell,) = [each for each in cells if each.name == "mnist/lenet5/paper/rescale-1/seed-0"]
    lower = invent(cell) | {"reference": 0.5}
    store.add(cell, lower)
    tables = build_tables(cells, store)
    assert find_row(tables["rescale-printed"], "MNIST", "s - 1").ours["Ref"].mean == pytest.approx(72.5)
    for name in ("rescale", "rescale-authors"):
        assert find_row(tables[name], "MNIST", "s - 1").ours["Ref"].mean == pytest.approx(95)


def test_quick_cells_never_count(tmp_path):
    store = Store(tmp_path)
    quick = list_cells("lambda", seeds=[0], profile="quick", schedule=QUICK)
    for cell in quick:
        store.add(cell, invent(cell))
    full = list_cells("lambda", seeds=[0])
    assert not build_tables(full, store)["lambda"].rows
    assert len(build_tables(quick, store)["lambda"].rows) == len(quick)
    assert {state.state for state in store.report_status(full)} == {"missing"}


def test_a_shortened_row_says_so(tmp_path):
    store = Store(tmp_path)
    shortened = list_cells("snip", seeds=[0], schedule=Schedule(epochs=2, images=100))
    for cell in shortened:
        store.add(cell, invent(cell))
    row = find_row(build_tables(list_cells("snip", seeds=[0]), store)["snip"], "Ours")
    assert row.schedule == "2 of 30 epochs, 100 training images"


def test_seeds_of_different_schedules_are_not_averaged(tmp_path):
    store = Store(tmp_path)
    (whole,) = select_cells(list_cells("lambda", seeds=[0]), ["lambda-5/balanced"])
    (short,) = select_cells(list_cells("lambda", seeds=[1], schedule=Schedule(epochs=2)), ["lambda-5/balanced"])
    store.add(short, invent(short) | {"reference": 0.5})
    wanted = list_cells("lambda", seeds=[0, 1])
    row = find_row(build_tables(wanted, store)["lambda"], "balanced", "5")
    assert (row.ours["reference"].mean, row.schedule) == (50, "2 of 30 epochs")
    store.add(whole, invent(whole))
    row = find_row(build_tables(wanted, store)["lambda"], "balanced", "5")
    assert (row.ours["reference"].mean, row.ours["reference"].seeds, row.schedule) == (pytest.approx(95), 1, None)


@pytest.mark.slow
def test_files_of_all_formats(cells, filled, tmp_path):
    written = {path.name for path in write_tables(cells, filled, tmp_path / "tables")}
    names = {name for layouts in LAYOUTS.values() for name in layouts}
    assert written == {f"{name}{suffix}" for name in names for suffix in (".md", ".csv", ".tex")} | {
        f"{name}{suffix}" for name in FIGURES for suffix in (".png", ".svg")
    }
    assert (tmp_path / "tables" / "batches-mnist-fc3.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "tables" / "training-fashion-lenet5.svg").read_bytes()[:1000]


def test_the_same_results_give_the_same_pictures(tables):
    table = tables["lambda"]
    assert draw_figure(table) == draw_figure(table)


def test_figures_have_every_point(tables):
    weights = ["0.1", "0.25", "0.5", "1", "2.5", "5", "10", "25"]
    for objective in ("balanced", "authors"):
        found = [row["λ"] for row in read_csv(tables["lambda"]) if row["objective"] == objective]
        assert found == weights
    assert len(read_csv(tables["batches-mnist-fc3"])) == 25
    assert len(read_csv(tables["batches-mnist-lenet5"])) == 50
    assert [row.labels for row in tables["training-fashion-fc3"].rows][:4] == [
        ("plain, balanced", "1"),
        ("plain, balanced", "2"),
        ("plain, balanced", "3"),
        ("incremental, balanced", "1"),
    ]


def test_the_page_has_everything(cells, store, tmp_path):
    path = tmp_path / "docs" / "reproduction.md"
    path.parent.mkdir()
    write_page(cells, store, path)
    text = path.read_text()
    for table in TABLES:
        assert f"\n## {table}\n" in text
    assert "../results/tables/batches-fashion-lenet5.svg" in text
    assert "| fashion/lenet5/balanced (50) | 5 | 0.2 | balanced | relaxed | 1e-05 | paper | optimal |" in text
    assert "| fashion/lenet5/authors (50) | 5 | 0.2 | authors | relaxed | 1e-05 | paper | optimal |" in text
    assert "| SNIP |" in text


def test_the_page_judges_by_the_figures(cells, store, tmp_path):
    """MNIST FC-3 in the paper: 95.9 ± 0.87 ours, 44.5 removed, 97.8 fine-tuned, RP 83.6, CP 44.5."""
    (cell,) = [each for each in cells if each.table == "table-2" and each.name == "mnist/fc3/seed-0"]
    good = invent(cell)
    good["removals"][1] |= {"accuracy": 0.97, "fine_tuned": 0.979, "critical": 0.5, "random": [0.9]}
    (other,) = [each for each in cells if each.table == "table-2" and each.name == "mnist/fc3/seed-1"]
    for each in (cell, other):
        store.add(each, good)
    path = tmp_path / "page.md"
    write_page(cells, store, path)
    text = path.read_text()
    assert (
        "- MNIST, FC-3: accuracy +1.1 (met); share +5.5 (met); fine-tuned +0.1 (met); "
        "RP 7.0 below ours, **not met**; CP 47.0 below ours, met." in text
    )
    assert "accuracy -" in text


@pytest.mark.slow
def test_the_page_begins_with_every_row_of_the_paper(cells, store, tmp_path):
    """Fashion-MNIST with LeNet-5 in the paper: 87.7 ± 2.2 at 17.8 removed, 89.8 ± 0.4 fine-tuned."""
    shortened = list_cells("snip", seeds=SEEDS, schedule=Schedule(epochs=2))
    lacking = Store(tmp_path / "lacking")
    for cell in [*(each for each in cells if each.table != "snip"), *shortened]:
        if "rescale-0" not in cell.name:
            lacking.add(cell, invent(cell))
    write_page(cells, lacking, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    for line in (
        "| table-2 | Fashion-MNIST, LeNet-5, 0.2: Ours | 87.7 / 17.8 | 82.5 / 50.0 ✗ | 82.5 / 50.0 ✗ |",
        "| table-2 | Fashion-MNIST, LeNet-5, 0.2: Ours + FT | 89.8 / 17.8 | 90.0 / 50.0 ✓ | 90.0 / 50.0 ✓ |",
        "| table-2-deep | VGG-16 in parts, program paper, rule share: Ours + FT | 85.3 / 36.0 | 90.0 / 50.0 ✓ |  |",
        "- table-2, Fashion-MNIST, LeNet-5, 0.2, Ours: 32.2 points more of the parameters removed, accuracy -5.2",
        "- rescale, MNIST, s, masked: not run.",
        "| table-3 | LeNet-5, MNIST, CIFAR-10: Ref | 72.2 | 95.0 ✓ |  |",
        "| snip | Ours | 88.7 / 58.4 | 90.0 / 50.0 ◐ | 90.0 / 50.0 ◐ |",
        "| rescale | MNIST, s: masked | 98.9 / 8.0 | missing | missing |",
    ):
        assert line in text, line


def test_a_row_reaches_the_paper_within_its_deviation():
    paper = {"masked": Figure(90.0, 1.0), "prune": Figure(20.0)}
    for accuracy, share, expected in ((89.1, 20.0, "✓"), (88.9, 20.0, "✗"), (95.0, 19.9, "≷")):
        row = Row(("x",), {"masked": Figure(accuracy, 0.1, 3), "prune": Figure(share, None, 3)}, paper)
        assert mark(row, "masked", "prune").endswith(expected)


def test_the_page_of_nothing(cells, tmp_path):
    write_page(cells, Store(tmp_path), tmp_path / "page.md")
    assert "Nothing has been run yet." in (tmp_path / "page.md").read_text()


def test_status_is_plain_data(cells, filled):
    states = filled.report_status(cells)
    assert len(states) == len(cells)
    assert json.dumps([vars(state) for state in states])


def test_one_seed_alone_says_so():
    row = Row(("x",), {"masked": Figure(95.0, None, 1), "prune": Figure(20.0, None, 1)}, {"masked": Figure(90.0)})
    assert mark(row, "masked", "prune", seeds=3) == "95.0 / 20.0 ✓¹"
    assert mark(row, "masked", "prune") == "95.0 / 20.0 ✓"


@pytest.mark.slow
def test_vgg16_in_a_way_that_was_not_run_is_said_once(cells, store, tmp_path):
    """Rows of both ways where both were; of one, and what the other costs, where that was not."""
    half = Store(tmp_path / "half")
    for cell in cells:
        if cell.settings["kind"] != "decoupled":
            half.add(cell, invent(cell))
    for each, parts in ((store, True), (half, False)):
        write_page(cells, each, tmp_path / "page.md")
        text = (tmp_path / "page.md").read_text()
        assert "VGG-16 from given weights, program paper, rule share: Ours + FT" in text
        assert "- cifar10/vgg16/paper/share/ours: 3, 21." in text
        assert ("VGG-16 in parts, program paper" in text) is parts
        assert (NOT_RUN["table-2-deep"] in text) is not parts


def test_choices_for_a_narrow_vgg16_are_rows_of_one_table(cells, tmp_path):
    store, mine = Store(tmp_path), [cell for cell in cells if cell.table == "parts-narrow"]
    for cell in mine:
        if "/linearised/threshold/random/" not in cell.name:
            store.add(cell, invent(cell))
    table = build_tables(mine, store)["parts-narrow"]
    assert len(table.rows) == 2 * len(PART_CHANGES)
    row = find_row(table, "box around the part's input", "share")
    columns = ("mean score", "below 0.3", "Ref", "RP", "CP", "Ours + FT", "Ref + FT")
    assert [row.ours[each].mean for each in columns] == pytest.approx([40, 30, 95, 90, 90, 90, 90])
    assert "RP" not in find_row(table, "linearised", "paper").ours


def test_a_row_says_when_random_units_are_as_good():
    paper = {"Ours": Figure(85.3), "prune": Figure(36.0)}
    ours = {"Ref": Figure(86.0), "Ours": Figure(86.1), "prune": Figure(35.0)}
    shown = (
        "1.0 points fewer of the parameters removed, accuracy +0.8 compared with the paper; "
        "+0.1 compared with our own"
    )
    assert explain(Row(("VGG-16",), {**ours, "RP": Figure(50.0)}, paper), "Ours", "prune") == f"{shown} reference."
    better = explain(Row(("VGG-16",), {**ours, "RP": Figure(86.4)}, paper), "Ours", "prune")
    assert better == f"{shown} reference; no better than removing random units, which leaves 86.4."


@pytest.mark.parametrize(("by_chance", "said"), [(86.4, True), (85.0, False)])
def test_the_first_table_names_rows_that_random_units_reach(by_chance, said):
    paper = {"Ours + FT": Figure(85.3), "prune": Figure(36.0)}
    ours = {"Ours + FT": Figure(86.1), "prune": Figure(37.0), "RP": Figure(by_chance)}
    headings, columns = ("program", "rule"), ("Ref", "Ours + FT", "prune", "RP")
    deep = Table("deep", headings, columns, (Row(("paper", "share"), ours, paper),), 1)
    text = sum_up({"table-2-deep": deep, "table-2-chosen": Table("chosen", (), (), (), 1)})
    assert "86.1 / 37.0 ✓" in text
    assert ("which leaves 86.4." in text.partition("no gain over random units")[2]) is said

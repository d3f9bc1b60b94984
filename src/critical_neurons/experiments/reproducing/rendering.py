"""Rendering: the store to tables in the paper's layout, ours beside the paper's, and to files of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from critical_neurons.experiments.paper import TABLES as PUBLISHED
from critical_neurons.experiments.reproducing.cells import DATA, NETWORKS, Settings
from critical_neurons.experiments.reproducing.plotting import draw_figure
from critical_neurons.experiments.store import Cell, Record, Store
from critical_neurons.experiments.tables import Labels, Published, Row, Table, set_beside, summarise
from critical_neurons.files import make_folder, write_atomically

Values: TypeAlias = Mapping[str, float | None]
"""Shares by column, of one seed; None where there can be none."""

Entries: TypeAlias = Iterable[tuple[Labels, Values]]

REMOVED = ("units", "parameters")
"""Units removed, and parameters really removed; `prune` is what the authors count."""

NORMS = ("L1", "L2")
"""As many units of every layer removed, those with the smallest norm of incoming weights."""

FURTHER = (*REMOVED, *NORMS)
"""What the paper's tables have not."""

NOTHING_REMOVED: Values = dict.fromkeys(FURTHER)

FIGURES = ("batches", "training", "lambda")
"""What the paper draws. Their tables have one row for every point."""


@dataclass(frozen=True)
class Layout:
    """How a table is made of results: `read` gives the rows that a cell has figures for. `published` has them in the
    paper's order; where there is none, they come in the order of the cells."""

    published: Published
    read: Callable[[Cell, Settings], Entries]
    further: tuple[str, ...] = FURTHER
    notes: tuple[str, ...] = ()


def find_records(cells: Iterable[Cell], store: Store) -> list[Record]:
    """What there is of the cells; of each the best, by the paper's schedule where it can be."""
    return [record for record in store.find_best(*cells) if record is not None]


def build_tables(cells: Collection[Cell], store: Store) -> dict[str, Table]:
    """The tables of the cells, by the names of their files."""
    records = find_records(cells, store)
    seeds = len({cell.settings["seed"] for cell in cells})
    return {
        name: _build(layout, [record for record in records if record.cell.table == table], seeds)
        for table in dict.fromkeys(cell.table for cell in cells)
        for name, layout in LAYOUTS[table].items()
    }


def write_tables(cells: Collection[Cell], store: Store, folder: Path) -> list[Path]:
    """As Markdown, CSV and LaTeX, and figures as pictures too."""
    target = make_folder(folder)
    files: dict[Path, bytes] = {}
    for name, table in build_tables(cells, store).items():
        texts = {".md": table.to_markdown(), ".csv": table.to_csv(), ".tex": table.to_latex()}
        files |= {target / f"{name}{suffix}": text.encode() for suffix, text in texts.items()}
        if name in FIGURES and table.rows:
            files |= {target / f"{name}{suffix}": content for suffix, content in draw_figure(table).items()}
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _build(layout: Layout, records: Iterable[Record], seeds: int) -> Table:
    entries: dict[Labels, list[tuple[str | None, Values]]] = {}
    for record in records:
        for labels, shares in layout.read(record.cell, record.result):
            entries.setdefault(labels, []).append((record.cell.schedule, shares))
    values: dict[Labels, dict[str, list[float] | None]] = {}
    schedules: dict[Labels, str] = {}
    for labels, found in entries.items():
        schedule = _choose_schedule([each for each, _ in found])
        if schedule is not None:
            schedules[labels] = schedule
        row = values.setdefault(labels, {})
        for column, share in (item for each, shares in found if each == schedule for item in shares.items()):
            row[column] = None if share is None else [*(row.get(column) or []), 100 * share]
    published = replace(layout.published, notes=layout.published.notes + layout.notes)
    if published.figures:
        return set_beside(published, values, seeds=seeds, schedules=schedules, further=layout.further)
    rows = tuple(
        Row(labels, {column: summarise(given or []) for column, given in row.items()}, {}, schedules.get(labels))
        for labels, row in values.items()
    )
    columns = (*published.columns, *layout.further)
    return Table(published.title, published.headings, columns, rows, seeds, published.notes)


def _choose_schedule(schedules: Sequence[str | None]) -> str | None:
    """Seeds of different schedules are not averaged: the paper's counts alone where it is among them, else the most
    frequent one."""
    return None if None in schedules else max(schedules, key=schedules.count)


def _removed(removal: Mapping[str, Any]) -> dict[str, float]:
    columns = [*REMOVED, *(norm for norm in NORMS if norm in removal)]
    return {"prune": removal["as_published"], **{column: removal[column] for column in columns}}


def name_method(settings: Settings) -> str:
    """SIM, IDP or IMIDP."""
    if not settings["score"].get("by_class"):
        return "SIM"
    return "IMIDP" if settings["batch"]["varying"] else "IDP"


def _read_table_1(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
    data, method = DATA[cell.settings["data"]], name_method(cell.settings)
    if method == "SIM":
        yield (data, "Ref"), {"accuracy": result["reference"], **NOTHING_REMOVED}
    for removal in result["removals"]:
        yield (data, method), {"accuracy": removal["accuracy"], **_removed(removal)}


def _read_appendix(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
    data, method = DATA[cell.settings["data"]], name_method(cell.settings)
    if method == "SIM":
        yield (data, "Ref", ""), {"accuracy": result["reference"], **NOTHING_REMOVED}
    for removal in result["removals"]:
        yield (
            (data, method, f"{removal['threshold']:g}"),
            {"accuracy": removal["accuracy"], **_removed(removal)},
        )


def _read_table_2(rule: str, *formulations: str | None) -> Callable[[Cell, Settings], Entries]:
    def read(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
        settings = cell.settings
        if settings["score"].get("formulation") not in formulations:
            return
        labels = (DATA[settings["data"]], NETWORKS[settings["network"]], f"{settings['thresholds'][0]:g}")
        for removal in result["removals"]:
            if removal["rule"] == rule:
                yield (
                    labels,
                    {
                        "Ref": result["reference"],
                        "RP": fmean(removal["random"]),
                        "CP": removal["critical"],
                        "Ours": removal["accuracy"],
                        "Ours + FT": removal["fine_tuned"],
                        **_removed(removal),
                    },
                )

    return read


def _read_transfer(cell: Cell, result: Settings) -> Entries:
    settings = cell.settings
    labels = NETWORKS[settings["network"]], DATA[settings["data"]], DATA[settings["target"]]
    return [(labels, {"Ref": result["reference"], "masked": result["accuracy"], **_removed(result)})]


def _name_snip(settings: Settings) -> str:
    return "Ours" if settings["method"] == "scores" else "SNIP"


def _read_snip(cell: Cell, result: Settings) -> Entries:
    values = {"accuracy": result["accuracy"], **_removed(result), "Ref": result["reference"]}
    return [((_name_snip(cell.settings),), values)]


def _read_snip_transfer(cell: Cell, result: Settings) -> Entries:
    labels = DATA[cell.settings["target"]], _name_snip(cell.settings)
    return [(labels, {"Ref": result["reference"], "masked": result["accuracy"], **_removed(result)})]


def _read_rescale(objective: str) -> Callable[[Cell, Settings], Entries]:
    def read(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
        score = cell.settings["score"]
        if score["objective"] == objective:
            subtracted = f"s - {score['rescale']}" if score["rescale"] else "s"
            (removal,) = result["removals"]
            yield (
                (DATA[cell.settings["data"]], subtracted),
                {"Ref": result["reference"], "masked": removal["accuracy"], **_removed(removal)},
            )

    return read


def _read_point(label: Callable[[Settings], str]) -> Callable[[Cell, Settings], Entries]:
    def read(cell: Cell, result: Settings) -> Entries:
        (removal,) = result["removals"]
        values = {"reference": result["reference"], "accuracy": removal["accuracy"], **_removed(removal)}
        return [((label(cell.settings),), values)]

    return read


def _read_epochs(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
    form = "incremental" if cell.settings["incremental"] else "plain"
    for epoch in result["epochs"]:
        yield (
            (form, str(epoch["epoch"])),
            {
                "reference": epoch["reference"],
                "accuracy": epoch["accuracy"],
                "prune": epoch["as_published"],
                "units": epoch["units"],
            },
        )


def _read_difference(cell: Cell, result: Settings) -> Entries:
    (removal,) = result["removals"]
    _, network, change, _ = cell.name.split("/")
    values = {
        "reference": result["reference"],
        "accuracy": removal["accuracy"],
        "biases left": removal["biases_left"],
        **_removed(removal),
    }
    return [((NETWORKS[network], change.replace("-", " ")), values)]


def _unpublished(title: str, headings: Labels, *columns: str) -> Published:
    return Published(title, headings, columns, {})


POINT = ("reference", "accuracy", "prune")
DEEP = {labels: figures for labels, figures in PUBLISHED["table-2"].figures.items() if labels[1] == NETWORKS["vgg16"]}
SHALLOW = {labels: figures for labels, figures in PUBLISHED["table-2"].figures.items() if labels not in DEEP}

LAYOUTS: Mapping[str, Mapping[str, Layout]] = {
    "table-1": {"table-1": Layout(PUBLISHED["table-1"], _read_table_1)},
    "table-1-appendix": {"table-1-appendix": Layout(PUBLISHED["table-1-appendix"], _read_appendix)},
    "table-2": {
        "table-2": Layout(
            PUBLISHED["table-2"],
            _read_table_2("paper", None, "linearised"),
            FURTHER,
            (
                "Ours at the paper's thresholds, VGG-16 linearised. L1, L2: as many units of every layer removed, "
                "those with the smallest norm of weights.",
            ),
        ),
        "table-2-chosen": Layout(
            replace(PUBLISHED["table-2"], figures=SHALLOW),
            _read_table_2("validation", None),
            FURTHER,
            (
                "Ours at thresholds chosen on validation images, one for every layer: raised until the paper's share "
                "less 5 points is removed, then while no more accuracy is lost than in the paper.",
            ),
        ),
        "table-2-deep": Layout(
            replace(PUBLISHED["table-2"], figures=DEEP),
            _read_table_2("paper", "paper"),
            FURTHER,
            ("VGG-16 with the paper's rows.",),
        ),
    },
    "table-3": {"table-3": Layout(PUBLISHED["table-3"], _read_transfer, REMOVED)},
    "snip": {"snip": Layout(PUBLISHED["snip"], _read_snip, (*REMOVED, "Ref"))},
    "snip-transfer": {"snip-transfer": Layout(PUBLISHED["snip-transfer"], _read_snip_transfer, REMOVED)},
    "rescale": {
        "rescale": Layout(PUBLISHED["rescale"], _read_rescale("balanced"), notes=("The balanced objective.",)),
        "rescale-printed": Layout(PUBLISHED["rescale"], _read_rescale("paper"), notes=("The objective as printed.",)),
    },
    "batches": {
        "batches": Layout(
            _unpublished("Robustness to the batch: LeNet-5 on Fashion-MNIST", ("batch",), *POINT),
            _read_point(lambda settings: str(settings["batch"]["seed"])),
        )
    },
    "training": {
        "training": Layout(
            _unpublished("Scores during training: LeNet-5 on Fashion-MNIST", ("form", "epoch"), *POINT),
            _read_epochs,
            ("units",),
        )
    },
    "lambda": {
        "lambda": Layout(
            _unpublished("Accuracy and share by λ: LeNet-5 on Fashion-MNIST", ("λ",), *POINT),
            _read_point(lambda settings: f"{settings['score']['loss_weight']:g}"),
        )
    },
    "differences": {
        "differences": Layout(
            _unpublished(
                "What the paper leaves open, one change at a time: Fashion-MNIST",
                ("network", "change"),
                "reference",
                "accuracy",
                "biases left",
                "prune",
            ),
            _read_difference,
            notes=("Biases left: masked as in the authors' code, which leaves removed units their biases.",),
        )
    },
}
"""By table or figure, then by file."""

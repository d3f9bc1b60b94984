"""Table layouts: stored results as tables in the paper's layout, ours beside the published ones, and their files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from critical_neurons.core.files import make_folder, write_atomically
from critical_neurons_reproduction.experiments.cells import DATA, FOLLOWED, NETWORKS, PART_CHANGES, TITLES, Settings
from critical_neurons_reproduction.experiments.plots import draw_figure
from critical_neurons_reproduction.published_values import TABLES as PUBLISHED
from critical_neurons_reproduction.result_tables import Labels, Published, Row, Table, set_beside, summarise
from critical_neurons_reproduction.store import Cell, Record, Store

Values: TypeAlias = Mapping[str, float | None]
"""Values of one seed by column, as shares; None where there can be no value."""

Entries: TypeAlias = Iterable[tuple[Labels, Values]]

ReadRows: TypeAlias = Callable[[Cell, Settings], Entries]
"""From a cell and its result to the table rows it has values for."""

REMOVED = ("units", "parameters")
"""Share of units removed, and of parameters actually removed; `prune` is the authors' count."""

NORMS = ("L1", "L2")
"""Magnitude pruning of as many units of every layer, by the norm of their incoming weights."""

FURTHER = (*REMOVED, *NORMS)
"""Columns that the paper's tables do not have."""

NOTHING_REMOVED: Values = dict.fromkeys(FURTHER)


@dataclass(frozen=True)
class Layout:
    """How a table is made from results: `read` yields the rows that a cell has values for. Rows are ordered as in
    `published`; if that has none, by cell."""

    published: Published
    read: ReadRows
    further: tuple[str, ...] = FURTHER
    notes: tuple[str, ...] = ()
    only_run: bool = False
    """Whether rows of the paper without a result of ours are left out."""


def find_records(cells: Iterable[Cell], store: Store) -> list[Record]:
    """The best stored result of each cell, if any: by the paper's schedule rather than a shortened one."""
    return [record for record in store.find_best(*cells) if record is not None]


def build_tables(cells: Collection[Cell], store: Store) -> dict[str, Table]:
    """The tables of the cells, by file name."""
    records = find_records(cells, store)
    seeds = len({cell.settings["seed"] for cell in cells})
    return {
        name: _build(layout, [record for record in records if record.cell.table == table], seeds)
        for table in dict.fromkeys(cell.table for cell in cells)
        for name, layout in LAYOUTS[table].items()
    }


def write_tables(cells: Collection[Cell], store: Store, folder: Path) -> list[Path]:
    """Write tables as Markdown, CSV and LaTeX, and figures as images too."""
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
        beside = set_beside(published, values, seeds=seeds, schedules=schedules, further=layout.further)
        return replace(beside, rows=tuple(filter(_has_results, beside.rows))) if layout.only_run else beside
    rows = tuple(
        Row(labels, {column: summarise(given or []) for column, given in row.items()}, {}, schedules.get(labels))
        for labels, row in values.items()
    )
    columns = (*published.columns, *layout.further)
    return Table(published.title, published.headings, columns, rows, seeds, published.notes)


def _has_results(row: Row) -> bool:
    return any(row.ours.get(column) for column in row.paper)


def _choose_schedule(schedules: Sequence[str | None]) -> str | None:
    """Seeds of different schedules are not averaged: only the paper's count if there are any, else the most frequent
    schedule."""
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


def _read_table_2(rule: str) -> ReadRows:
    """Rows of networks scored as a whole. For thresholds chosen per layer, their mean is shown."""

    def read(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
        settings = cell.settings
        labels: Labels = (DATA[settings["data"]], NETWORKS[settings["network"]])
        for removal in result["removals"] if settings["kind"] == "comparison" else ():
            if removal["rule"] != rule:
                continue
            if rule == "paper":
                yield (*labels, f"{removal['threshold']:g}"), _read_comparison(result, removal)
            else:
                used = fmean(removal["threshold"].values())
                yield labels, {**_read_comparison(result, removal), USED: used}

    return read


def _read_deep(choices: Collection[str], *, summary: bool = False) -> ReadRows:
    """Every cell fills one column of a row, by its choice and rule, "ours" the shares too; the unpruned network fills
    all rows of the choices. `summary`: with columns that summarise the scores."""

    def read(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
        removed, choice = cell.settings["removed"], _name_change(cell)
        rule = "paper" if cell.settings["share"] is None else "share"
        match removed:
            case "ours":
                figures = {"Ref": result["reference"], "Ours": result["accuracy"], "Ours + FT": result["fine_tuned"]}
                scores = _summarise(result) if summary else {}
                yield (choice, rule), {**scores, **figures, **_removed(result), USED: result["threshold"]}
            case "nothing":
                for labels in product(choices, RULES):
                    yield labels, {TUNED: result["fine_tuned"]}
            case _:
                yield (choice, rule), {{"random": "RP", "critical": "CP"}[removed]: result["fine_tuned"]}

    return read


def _summarise(result: Settings) -> dict[str, float]:
    """The mean score, and the share below the paper's threshold."""
    return {MEAN: result["mean_score"], LOW: result["below"]}


def _read_comparison(result: Settings, removal: Mapping[str, Any]) -> dict[str, float]:
    return {
        "Ref": result["reference"],
        "RP": fmean(removal["random"]),
        "CP": removal["critical"],
        "Ours": removal["accuracy"],
        "Ours + FT": removal["fine_tuned"],
        **_removed(removal),
    }


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


def _read_rescale(cell: Cell, result: Settings) -> Entries:
    subtracted = cell.settings["score"]["rescale"]
    (removal,) = result["removals"]
    labels = (DATA[cell.settings["data"]], f"s - {subtracted}" if subtracted else "s")
    return [(labels, {"Ref": result["reference"], "masked": removal["accuracy"], **_removed(removal)})]


def _read_point(label: Callable[[Settings], str]) -> ReadRows:
    def read(cell: Cell, result: Settings) -> Entries:
        (removal,) = result["removals"]
        values = {"reference": result["reference"], "accuracy": removal["accuracy"], **_removed(removal)}
        return [((cell.settings["score"]["objective"], label(cell.settings)), values)]

    return read


def _read_epochs(cell: Cell, result: Settings) -> Iterator[tuple[Labels, Values]]:
    form = "incremental" if cell.settings["incremental"] else "plain"
    for epoch in result["epochs"]:
        yield (
            (f"{form}, {cell.settings['score']['objective']}", str(epoch["epoch"])),
            {
                "reference": epoch["reference"],
                "accuracy": epoch["accuracy"],
                "prune": epoch["as_published"],
                "units": epoch["units"],
            },
        )


def _read_difference(cell: Cell, result: Settings) -> Entries:
    (removal,) = result["removals"]
    values = {
        "reference": result["reference"],
        "accuracy": removal["accuracy"],
        "biases left": removal["biases_left"],
        **_removed(removal),
    }
    return [((NETWORKS[cell.settings["network"]], _name_change(cell)), values)]


def _read_parts(cell: Cell, result: Settings) -> Entries:
    values = {**_summarise(result), "accuracy": result["accuracy"], **_removed(result)}
    return [((_name_change(cell),), values)]


def _name_change(cell: Cell) -> str:
    part = cell.name.split("/")[2]
    return TITLES.get(part, part)


def _read_replay(cell: Cell, result: Settings) -> Entries:
    return [((str(cell.settings["buffer_size"]),), {"accuracy": result["accuracy"]})]


def _restrict(read: ReadRows, keep: Callable[[Settings], bool]) -> ReadRows:
    return lambda cell, result: read(cell, result) if keep(cell.settings) else ()


def _has_objective(objective: str) -> Callable[[Settings], bool]:
    """SNIP's cells have no program and count for every objective; VGG-16, with one objective only, counts as ours."""

    def counts(settings: Settings) -> bool:
        if settings["network"] == "vgg16":
            return objective == "balanced"
        return settings.get("method", "scores") != "scores" or bool(settings["score"]["objective"] == objective)

    return counts


def _per_objective(name: str, layout: Layout, **objectives: str) -> dict[str, Layout]:
    """The same table for every objective, by name and suffix."""
    return {
        name + end: replace(
            layout,
            published=layout.published if objective == "balanced" else _without_others(layout.published),
            read=_restrict(layout.read, _has_objective(objective)),
            notes=(*layout.notes, OBJECTIVES[objective]),
        )
        for end, objective in {"": "balanced", "-authors": "authors", **objectives}.items()
    }


def _without_others(published: Published) -> Published:
    """Only the rows of LeNet-5, the one network that is scored with every objective."""
    others = set(NETWORKS.values()) - {NETWORKS["lenet5"]}
    return replace(published, figures={k: v for k, v in published.figures.items() if not others & set(k)})


def _per_network(
    name: str, title: str, headings: Labels, read: ReadRows, further: tuple[str, ...]
) -> dict[str, Layout]:
    """A figure for each pair of data set and network in `FOLLOWED`."""
    return {
        f"{name}-{data}-{network}": Layout(
            Published(f"{title}: {NETWORKS[network]} on {DATA[data]}", headings, POINT, {}),
            _restrict(read, partial(_is_of, data, network)),
            further,
        )
        for data, network in FOLLOWED
    }


def _is_of(data: str, network: str, settings: Settings) -> bool:
    return (settings["data"], settings["network"]) == (data, network)


def _lay_out_deep(training: str, note: str) -> Layout:
    """VGG-16, by program and rule."""
    return Layout(
        replace(
            PUBLISHED_2,
            title=f"Table 2, VGG-16 on CIFAR-10, {training}",
            headings=("program", "rule"),
            figures=dict.fromkeys(product(PROGRAMS, RULES), DEEP),
        ),
        _read_deep(PROGRAMS),
        (TUNED, USED, *REMOVED),
        (
            f"{note}Rules: the threshold that removes the paper's share, and the paper's threshold, 0.3. RP, CP and "
            "Ref + FT: fine-tuned for one epoch, as ours. Programs have a time limit of one minute, after which the "
            "incumbent and its gap are taken. The linearised program, and what else can be chosen, is measured on a "
            "narrower network in parts-narrow.",
        ),
        only_run=True,
    )


OBJECTIVES = {
    "balanced": "Our objective: the mean score of every layer. For VGG-16, that of the authors' code.",
    "authors": "The objective of the authors' code: a convolution's scores are also divided by its kernel's size.",
    "paper": "The objective as printed.",
}

USED = "threshold, mean"
"""Column: mean of the thresholds used, in percent."""

TUNED = "Ref + FT"
"""Column: the unpruned network after the same epoch of fine-tuning."""

MEAN, LOW = "mean score", "below 0.3"
"""Columns of VGG-16 in parts: the mean score, and the share of units scored below the paper's threshold."""

PROGRAMS, RULES = ("paper", "linearised"), ("share", "paper")

POINT = ("reference", "accuracy", "prune")
PUBLISHED_2 = PUBLISHED["table-2"]
DEEP = next(figures for labels, figures in PUBLISHED_2.figures.items() if labels[1] == NETWORKS["vgg16"])
SHALLOW = {labels: figures for labels, figures in PUBLISHED_2.figures.items() if labels[1] != NETWORKS["vgg16"]}
CHOSEN = replace(
    PUBLISHED_2,
    headings=PUBLISHED_2.headings[:2],
    figures={labels[:2]: figures for labels, figures in SHALLOW.items()},
)
TITLE_LAMBDA = f"Accuracy and share by λ: {NETWORKS['lenet5']} on {DATA['fashion']}"


LAYOUTS: Mapping[str, Mapping[str, Layout]] = {
    "table-1": _per_objective("table-1", Layout(PUBLISHED["table-1"], _read_table_1)),
    "table-1-appendix": _per_objective("table-1-appendix", Layout(PUBLISHED["table-1-appendix"], _read_appendix)),
    "table-2": {
        **_per_objective(
            "table-2",
            Layout(
                replace(PUBLISHED_2, figures=SHALLOW),
                _read_table_2("paper"),
                FURTHER,
                (
                    "Ours at the paper's thresholds. L1, L2: the same number of units per layer removed, those with "
                    "the smallest norm of weights.",
                ),
            ),
        ),
        **_per_objective(
            "table-2-chosen",
            Layout(
                CHOSEN,
                _read_table_2("validation"),
                (USED, *FURTHER),
                (
                    "Ours at thresholds chosen on validation images, one for every layer: raised until the paper's "
                    "share minus 5 points is removed, then while no more accuracy is lost than in the paper.",
                ),
            ),
        ),
    },
    "table-2-deep": {
        "table-2-deep": _lay_out_deep(
            "trained in parts",
            "Every part was trained on the loss of its own head. ",
        )
    },
    "table-2-given": {
        "table-2-given": _lay_out_deep(
            "from weights trained end to end",
            "The weights were trained end to end for 9 epochs on a JPEG-compressed copy of the images; every part "
            "has an auxiliary head that was trained with the body frozen. Some of our validation images, never "
            "test images, were among those the weights were trained on. ",
        )
    },
    "parts": {
        "parts": Layout(
            Published(
                "What can be chosen for parts, one change at a time: VGG-16 on CIFAR-10, trained in parts",
                ("change",),
                (MEAN, LOW, "accuracy", "prune"),
                {},
            ),
            _read_parts,
            REMOVED,
            (
                "Accuracy without the lowest scores, as many as make up the paper's share, and without fine-tuning. "
                "Below 0.3: share of the units scored below the paper's threshold. Scores are in percent, too.",
            ),
        )
    },
    "parts-narrow": {
        "parts-narrow": Layout(
            Published(
                "What can be chosen for parts: VGG-16 with a quarter of its maps on CIFAR-10, fine-tuned",
                ("change", "rule"),
                (MEAN, LOW, "Ref", "RP", "CP", "Ours", "Ours + FT", "prune"),
                {},
            ),
            _read_deep(tuple(PART_CHANGES), summary=True),
            (TUNED, USED, *REMOVED),
            (
                "The same choices for a network that takes minutes to train. Rules: the threshold "
                "that removes the paper's share of the parameters, and the paper's threshold, 0.3. RP: the same "
                "number of units per layer removed at random. CP: the same number of the highest-scored units. RP, "
                "CP, Ours + FT, Ref + FT: fine-tuned for one epoch.",
                "Where the image's box has been propagated through many parts, bounds are so wide that no row of the "
                "head binds: the same units are removed whether heads are scored or not, and whatever their width.",
            ),
        )
    },
    "replay": {
        "replay": Layout(
            Published(
                "Replay buffers: VGG-16 with a quarter of its maps, trained in parts on CIFAR-10 for 6 epochs",
                ("batches in a buffer",),
                ("accuracy",),
                {},
            ),
            _read_replay,
            (),
        )
    },
    "table-3": _per_objective("table-3", Layout(PUBLISHED["table-3"], _read_transfer, REMOVED)),
    "snip": _per_objective("snip", Layout(PUBLISHED["snip"], _read_snip, (*REMOVED, "Ref"))),
    "snip-transfer": _per_objective(
        "snip-transfer", Layout(PUBLISHED["snip-transfer"], _read_snip_transfer, REMOVED)
    ),
    "rescale": _per_objective("rescale", Layout(PUBLISHED["rescale"], _read_rescale), **{"-printed": "paper"}),
    "batches": _per_network(
        "batches",
        "Robustness to the batch",
        ("objective", "batch"),
        _read_point(lambda settings: str(settings["batch"]["seed"])),
        FURTHER,
    ),
    "training": _per_network("training", "Scores during training", ("form", "epoch"), _read_epochs, ("units",)),
    "lambda": {
        "lambda": Layout(
            Published(TITLE_LAMBDA, ("objective", "λ"), POINT, {}),
            _read_point(lambda settings: f"{settings['score']['loss_weight']:g}"),
        )
    },
    "differences": {
        "differences": Layout(
            Published(
                "What the paper leaves open, one change at a time: Fashion-MNIST",
                ("network", "change"),
                ("reference", "accuracy", "biases left", "prune"),
                {},
            ),
            _read_difference,
            notes=("Biases left: masked as in the authors' code, which leaves removed units their biases.",),
        )
    },
}
"""By table or figure, then by file name."""

FIGURES = tuple(name for table in ("batches", "training", "lambda") for name in LAYOUTS[table])
"""Tables that are drawn as figures, with one row per point."""

"""The command `reproduce`, for the paper's tables and figures; registered as an entry point."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.options import Json, WorkersChoice
from critical_neurons.cli.terminal import note, reports_errors, show, show_json
from critical_neurons.errors import InvalidSettingError, WorkersError
from critical_neurons_reproduction.progress_bars import show_bars

RESULTS, RUNS, PAGE = Path("results"), Path("runs"), Path("docs/reproduction.md")
SEEDS = 3
"""Random seeds per cell, as in the paper."""


@reports_errors
@takes_settings
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="table-1, table-1-appendix, table-2, table-2-deep (VGG-16), table-2-given (with --vgg-weights), "
            "parts, parts-narrow, replay, table-3, snip, snip-transfer, rescale, batches, training, lambda, "
            "differences, or all; status; page.",
            metavar="TABLE",
        ),
    ],
    profile: Annotated[
        Literal["quick", "full"],
        typer.Option(help="full: the paper's schedule; quick: a smoke test of everything, in minutes."),
    ] = "full",
    seeds: Annotated[
        int | None, typer.Option(help="Number of random seeds, from 0 on. Default: 3, quick: 1.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Cells with these parts in their names, as fashion/lenet5; repeatable.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with mnist, fashion_mnist, cifar10. Default: from the Hugging Face hub."),
    ] = None,
    *,
    worker_options: WorkersChoice,
    epochs: Annotated[int | None, typer.Option(help="Train for at most this number of epochs.")] = None,
    recipes: Annotated[
        str,
        typer.Option(help="Training recipes: paper (as printed), authors (as in their code), short (ours)."),
    ] = "short",
    images: Annotated[int | None, typer.Option(help="Train on this number of images only, the first ones.")] = None,
    vgg_weights: Annotated[
        Path | None,
        typer.Option(help="Weights of VGG-16, for table-2-given. Without them, all skips that table."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of results (one JSON line per cell) and tables.")] = RESULTS,
    runs: Annotated[Path, typer.Option(help="Folder of training checkpoints, to resume from.")] = RUNS,
    output: Annotated[Path, typer.Option(help="File that page writes.")] = PAGE,
    as_json: Json = False,
) -> None:
    """Run the paper's experiments and compare our results with the published ones.

    Finished cells are skipped, and an interrupted run resumes where it stopped. Tables (Markdown, CSV, LaTeX) and
    figures (PNG, SVG) are written next to the results, from the stored results alone. status lists what is done;
    page rewrites all tables and figures, and one page with all of them.

    \b
    Examples:
      critical-neurons reproduce table-2 --only fashion/lenet5 --data data --jobs 2
      critical-neurons reproduce table-2-deep --only paper/share --epochs 2 --images 10000
      critical-neurons reproduce status --json
    """
    from critical_neurons.core.files import check_writable
    from critical_neurons_reproduction.experiments import (
        QUICK,
        TABLES,
        Runs,
        Schedule,
        build_tables,
        find_work,
        list_cells,
        run_cells,
        select_cells,
        write_page,
        write_tables,
    )
    from critical_neurons_reproduction.store import Cell, Store
    from critical_neurons_reproduction.terminal_tables import report_figures, report_states

    count = (1 if profile == "quick" else SEEDS) if seeds is None else seeds
    if count < 1:
        raise InvalidSettingError(f"--seeds: found {count}. Accepted: at least one.")
    if profile == "quick" and (epochs is not None or images is not None):
        raise InvalidSettingError("--epochs and --images: --profile quick sets them. Give one or the other.")
    workers = worker_options.read()
    store = Store(results)
    named = list(TABLES) if what in ("all", "status", "page") else [what]
    if what == "all" and vgg_weights is None:
        named.remove("table-2-given")
    schedule = QUICK if profile == "quick" else Schedule(epochs, images)

    def list_all(count: int) -> list[Cell]:
        listed = (
            list_cells(each, seeds=range(count), profile=profile, schedule=schedule, recipes=recipes)
            for each in named
        )
        return [cell for cells in listed for cell in cells]

    cells = select_cells(list_all(count), only or [])
    shown = list_all(max(count, SEEDS)) if profile == "full" else cells  # everything stored, not only what is run
    for problem in store.find_problems():
        note(f"Skipped: {problem}")
    if what == "status":
        states = store.report_status(cells)
        if as_json:
            show_json([asdict(state) for state in states])
        else:
            show(report_states(states))
        return
    if what == "page":
        check_writable(output)
        written = write_tables(shown, store, results / "tables")
        write_page(shown, store, output)
        if as_json:
            show_json({"written": [str(path) for path in (output, *written)]})
        note(f"Written: {output}")
        return
    threads = max(1, (os.cpu_count() or 1) // workers.jobs)
    place = Runs(
        runs, data, schedule, recipes=recipes, weights=vgg_weights, scores=results / "scores", threads=threads
    )
    references, missing = find_work(cells, store, place)
    try:
        with show_bars(len(references) + len(missing)) as (finished, on_epoch):
            failures = run_cells(cells, store, replace(place, on_epoch=on_epoch), workers=workers, finished=finished)
    except (KeyboardInterrupt, WorkersError):
        note("Finished cells are kept: run the same command again to resume.")
        raise
    if profile == "full":
        written = write_tables(shown, store, results / "tables")
        note(f"Written: {len(written)} files in {results / 'tables'}")
    if as_json:
        show_json({"cells": [asdict(state) for state in store.report_status(cells)], "failures": failures})
    else:
        for table in build_tables(shown, store).values():
            show(report_figures(table))
    for failure in failures:
        note(f"Failed: {failure}")
    if failures:
        raise typer.Exit(1)

"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.outputs import check_files
from critical_neurons.cli.terminal import note, reports_errors


@reports_errors
@takes_settings
def report(
    folder: options.SmallerFolder,
    output: Annotated[Path, typer.Option(help="The page, one .html file to open in a browser.")] = Path(
        "report.html"
    ),
    scores: Annotated[Path | None, typer.Option(help="Scores written by score --output, if FOLDER has none.")] = None,
    comparison: Annotated[
        Path | None, typer.Option(help="A comparison written by evaluate --output, instead of that in FOLDER.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data of the comparison, to show images whose prediction changed.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    split: options.Split = "test",
    *,
    form: options.DataForm,
) -> None:
    """Write a page about the smaller network in FOLDER: comparison, plan and provenance.

    The page is one self-contained file. `compress --save` writes everything that it shows; for a folder of `prune` it
    shows the plan, and what --scores and --comparison add.

    \b
    Examples:
      critical-neurons report smaller
      critical-neurons report smaller --comparison comparison.json --data test.npz --output report.html
    """
    from critical_neurons.io.checkpoint import WRITTEN, read_results

    check_files(
        [("--output", output)],
        [
            *(("FOLDER", folder / name) for name in WRITTEN),
            ("--scores", scores),
            ("--comparison", comparison),
            ("--data", data),
        ],
        folder=folder,
    )
    import critical_neurons as cn

    found = read_results(folder)
    inputs = None
    if data is not None:
        inputs, _ = form.load(data, split=split)
    cn.report(
        output,
        comparison=found.comparison if comparison is None else cn.Comparison.load(comparison),
        plan=found.plan,
        scores=found.scores if scores is None else cn.Scores.load(scores),
        inputs=inputs,
        title=folder.resolve().name if title is None else title,
        files=found.files,
        call=found.call,
    )
    note(f"Written: {output}. Open it in a browser.")

"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli.options import Channels, Mean, Resize, SmallerFolder, Split, Std, read_numbers
from critical_neurons.cli.outputs import check_apart
from critical_neurons.cli.terminal import note, reports_errors


@reports_errors
def report(
    folder: SmallerFolder,
    output: Annotated[Path, typer.Option(help="The page, one .html file to open in a browser.")] = Path(
        "report.html"
    ),
    scores: Annotated[
        Path | None, typer.Option(help="Scores, as score --output wrote them, where FOLDER has none.")
    ] = None,
    comparison: Annotated[
        Path | None, typer.Option(help="A comparison, as evaluate --output wrote it, in place of that in FOLDER.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data of the comparison: images with another answer are shown.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="What the page is called.")] = None,
    split: Split = "test",
    mean: Mean = "",
    std: Std = "",
    resize: Resize = None,
    channels: Channels = None,
) -> None:
    """Write a page about the smaller network in FOLDER: what was gained, what was removed, where it comes from.

    The page is one file that needs nothing else. `compress --save` writes all that it shows; of a folder of `prune`
    it shows the plan, and what --scores and --comparison add.

    \b
    Examples:
      critical-neurons report smaller
      critical-neurons report smaller --comparison comparison.json --data test.npz --output report.html
    """
    from critical_neurons.core.files import check_writable
    from critical_neurons.io.checkpoint import WRITTEN, read_results

    check_apart(
        [("--output", output)],
        [
            *(("FOLDER", folder / name) for name in WRITTEN),
            ("--scores", scores),
            ("--comparison", comparison),
            ("--data", data),
        ],
        folder=folder,
    )
    check_writable(output)
    import critical_neurons as cn
    from critical_neurons.io.data import Look, load_batch

    found = read_results(folder)
    inputs = None
    if data is not None:
        look = Look(channels, resize, read_numbers("--mean", mean), read_numbers("--std", std))
        inputs, _ = load_batch(data, split=split, look=look)
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

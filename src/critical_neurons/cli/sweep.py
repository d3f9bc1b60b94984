"""The command `sweep`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.outputs import Read, check_files, name_written
from critical_neurons.cli.terminal import name_command, note, reports_errors, show, show_json, show_progress
from critical_neurons.errors import InvalidSettingError, MissingExtraError

if TYPE_CHECKING:
    from critical_neurons import Curve

PICTURES = (".svg", ".png", ".pdf")

SHARES = "Shares to keep at most, separated by commas."


@reports_errors
@takes_settings
def sweep(
    model: options.ModelName,
    data: options.DataName,
    folder: Annotated[
        Path,
        typer.Option(help="Folder for every network found; those already in it are not searched again."),
    ],
    weights: options.Weights = None,
    macs: Annotated[str, typer.Option(help=f"Of the multiply-adds. {SHARES}")] = "",
    params: Annotated[str, typer.Option(help=f"Of the parameters. {SHARES}")] = "",
    units: Annotated[str, typer.Option(help=f"Of the units of every layer. {SHARES}")] = "",
    methods: Annotated[str, typer.Option(help="How units are chosen: search, paper, norm, random.")] = "search",
    test_data: options.TestData = None,
    test_split: options.TestSplit = None,
    report: Annotated[Path | None, typer.Option(help="A page with the curve, one .html file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A picture of the curve: .svg, .png or .pdf.")] = None,
    pick: Annotated[float | None, typer.Option(help="The share of the network for --save and --report.")] = None,
    save: Annotated[Path | None, typer.Option(help="A new folder for the network of --pick.")] = None,
    overwrite: options.Overwrite = False,
    compensate: options.Compensate = "least_squares",
    effort: options.Effort = "standard",
    distance: options.Distance = "auto",
    ignore: options.Ignore = None,
    per_class: Annotated[int | None, typer.Option(help="Inputs of every class, at random.")] = None,
    split: options.Split = "train",
    *,
    form: options.DataForm,
    seed: options.Seed = 0,
    worker_options: options.WorkersChoice,
    as_json: options.Json = False,
) -> None:
    """Make networks of several sizes from MODEL, and compare each with it.

    Repeating the command continues an interrupted sweep. With --pick one of the networks is written to --save,
    without another search.

    \b
    Examples:
      critical-neurons sweep lenet5 train.npz --weights lenet5.pt --macs 0.8,0.6,0.4,0.2 --folder sweep \\
        --test-data test.npz --report report.html
      critical-neurons sweep lenet5 train.npz --weights lenet5.pt --macs 0.4 --folder sweep --test-data test.npz \\
        --pick 0.4 --save smaller
    """
    texts = {"macs": macs, "params": params, "units": units}
    shares = {name: options.read_numbers(f"--{name}", text) for name, text in texts.items()}
    if sum(map(bool, shares.values())) != 1:
        raise InvalidSettingError(
            "Give the shares of one of --macs, --params and --units, such as --macs 0.8,0.6,0.4."
        )
    if (pick is None) != (save is None) and (pick is None or report is None):
        raise InvalidSettingError("--pick and --save go together: the share of a network, and the folder it goes to.")
    if pick is not None and pick not in next(filter(None, shares.values())):
        raise InvalidSettingError(f"--pick: {pick:g} is not among the shares of the sweep.")
    from critical_neurons.core.files import check_folder
    from critical_neurons.io.checkpoint import WRITTEN

    read: Read = [
        *(("MODEL", options.find_model_file(model)), ("DATA", data)),
        *(("--test-data", test_data), ("--weights", weights)),
    ]
    check_files([("--report", report), ("--picture", picture)], read, folder=save)
    if picture is not None:
        _check_picture(picture)
    if save is not None:
        check_folder(save, WRITTEN, overwrite=overwrite)
    import critical_neurons as cn
    from critical_neurons.io.models import load_model

    test = form.load_test(data, test_data, test_split)
    inputs, labels = form.load(
        data, per_class=per_class, most_per_class=options.MOST_PER_CLASS, seed=seed, split=split
    )
    network = load_model(model, weights, options.find_shape(inputs))
    chosen: list[Any] = [name.strip() for name in methods.split(",")]
    with show_progress() as progress:
        found = cn.sweep(
            network,
            inputs,
            labels,
            macs=shares["macs"],
            params=shares["params"],
            units=shares["units"],
            methods=chosen,
            test=test,
            compensate=compensate,
            effort=effort,
            distance=distance,
            ignore=tuple(ignore or ()),
            seed=seed,
            folder=folder,
            workers=worker_options.read(),
            progress=note,
            detail=progress,
        )
    if picture is not None:
        _draw(found.curve, picture)
    picked = None if pick is None else found.pick(pick, chosen[0])
    if picked is not None:
        picked = replace(picked, call=name_command())
    if picked is not None and save is not None:
        picked.save(save, overwrite=overwrite)
    if report is not None and picked is not None:
        picked.report(report, curve=found.curve)
    elif report is not None:
        cn.report(report, curve=found, call=name_command())
    if as_json:
        show_json(found.curve.to_dict())
    else:
        from critical_neurons.cli.tables import report_curve

        show(report_curve(found.curve))
    note(name_written(folder, picture, save, report))


def _check_picture(path: Path) -> None:
    """Raise before the work if the picture cannot be written."""
    if path.suffix not in PICTURES:
        raise InvalidSettingError(f"--picture: found {path}. Accepted: a name that ends in {' or '.join(PICTURES)}.")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")


def _draw(curve: Curve, path: Path) -> None:
    from critical_neurons.core.files import write_atomically

    content = BytesIO()
    curve.plot().figure.savefig(content, format=path.suffix.removeprefix("."))
    write_atomically(path, content.getvalue())

"""The command `compress`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import describe_choice, name_option, takes_settings
from critical_neurons.cli.outputs import Read, check_exports, name_written, write_exported
from critical_neurons.cli.terminal import name_command, note, reports_errors, show, show_json, show_progress
from critical_neurons.core.distillation import Distillation
from critical_neurons.core.formulation import FORMULATIONS, FormulationName
from critical_neurons.core.settings import Compensation, list_settings
from critical_neurons.core.solver import Solver
from critical_neurons.errors import InvalidSettingError


@reports_errors
@takes_settings
def compress(
    model: options.ModelName,
    data: options.DataName,
    save: options.Folder = None,
    *,
    weights: options.Weights = None,
    macs: options.Macs = None,
    params: options.Params = None,
    units: options.Units = None,
    latency: options.Latency = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Remove as much as possible while the accuracy on a held-out part of DATA falls by at most this; "
            "0.01 is one point."
        ),
    ] = None,
    compensate: Annotated[
        Compensation | None,
        typer.Option(
            help=f"{options.COMPENSATE_HELP} Default: least_squares; distil with --effort thorough, unless there is "
            "a --max-drop; none with --paper."
        ),
    ] = None,
    distillation: Distillation | None,
    effort: options.Effort = "standard",
    distance: options.Distance = "auto",
    keep: options.Keep = None,
    min_units: options.MinUnits = 1,
    round_to: options.RoundTo = 1,
    per_class: Annotated[
        int | None,
        typer.Option(help="Inputs of every class, at random. Default: up to 100 of a data set, all of a file."),
    ] = None,
    split: options.Split = "train",
    test_data: options.TestData = None,
    test_split: options.TestSplit = None,
    overwrite: options.Overwrite = False,
    output: options.Exports = None,
    report: Annotated[
        Path | None, typer.Option(help="A page about the result for a browser, one .html file.")
    ] = None,
    no_onnx: options.NoOnnx = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Choose units by the paper's scores and settings, not by a search.")
    ] = False,
    formulation: Annotated[
        FormulationName | None,
        typer.Option(help=f"Choose units by scores of a program, not by a search: {describe_choice(FORMULATIONS)}"),
    ] = None,
    solver: Solver,
    ignore: options.Ignore = None,
    start: options.Start = None,
    stop: options.Stop = None,
    worker_options: options.WorkersChoice,
    form: options.DataForm,
    as_json: options.Json = False,
) -> None:
    """Make MODEL smaller with inputs from DATA: search, plan, remove, refit, compare, save.

    Give one of --macs, --params, --units, --latency and --max-drop, and --save or --output. The units to keep are
    found by a search, unless --paper or --formulation asks for a program's scores. Files are written only when
    everything has succeeded. Ctrl-C during solving, the rounds of a search, the search for --max-drop and
    distillation continues with the best result so far; at any other time it ends the command.

    \b
    Examples:
      critical-neurons compress lenet5 train.npz --weights lenet5.pt --macs 0.5 --test-data test.npz \\
        --save smaller --output smaller.onnx --report report.html
      critical-neurons compress model.onnx train.npz --macs 0.5 --output smaller.onnx
      critical-neurons compress vgg16 uoft-cs/cifar10 --weights vgg16.pt --max-drop 0.01 --test-split test \\
        --save smaller
      critical-neurons compress lenet5 train.npz --weights lenet5.pt --units 0.7 --paper --save smaller
    """
    paths = output or []
    read: Read = [
        ("MODEL", options.find_model_file(model)),
        ("DATA", data),
        ("--test-data", test_data),
        ("--weights", weights),
    ]
    check_exports(paths, save, read=read, overwrite=overwrite, report=report)
    if sum(value is not None for value in (macs, params, units, latency, max_drop)) != 1:
        raise InvalidSettingError("Give one of --macs, --params, --units, --latency and --max-drop.")
    by_program, unused = paper or formulation is not None, Solver(seed=solver.seed)
    if solver != unused and not by_program:
        changed = [each for each in list_settings(Solver) if getattr(solver, each.name) != getattr(unused, each.name)]
        names = ", ".join(name_option(each) for each in changed)
        raise InvalidSettingError(
            f"{names}: only for a program, but units are chosen by a search. Add --paper or --formulation."
        )
    compensation, workers = options.join_compensation(compensate, distillation), worker_options.read()
    import critical_neurons as cn
    from critical_neurons.cli.tables import compression_to_dict, describe_batch, report_compression
    from critical_neurons.io.builtin_models import MODELS
    from critical_neurons.io.models import load_model

    if model in MODELS and weights is None:
        note(f"{model} without --weights is untrained: its weights are random, and differ from run to run.")
    test = form.load_test(data, test_data, test_split)
    inputs, labels = form.load(
        data, per_class=per_class, most_per_class=options.MOST_PER_CLASS, seed=solver.seed, split=split
    )
    if labels is None and (max_drop is not None or by_program):
        option = "--max-drop" if max_drop is not None else "--paper" if paper else "--formulation"
        raise InvalidSettingError(f"{option}: needs the right classes, but {data} holds no labels.")
    network = load_model(model, weights, options.find_shape(inputs))
    note(describe_batch(inputs, labels))
    if test is None and labels is not None:
        note("No test data: the comparison uses these inputs, and its accuracy is labelled calibration.")
    with show_progress() as progress:
        found = cn.compress(
            network,
            inputs,
            labels,
            units=units,
            params=params,
            macs=macs,
            latency=latency,
            max_drop=max_drop,
            compensate=compensation,
            effort=effort,
            distance=distance,
            test=test,
            keep=tuple(keep or ()),
            min_units=min_units,
            round_to=round_to,
            paper=paper,
            formulation=formulation,
            solver=solver if by_program else None,
            ignore=tuple(ignore or ()),
            start=start,
            stop=stop,
            seed=solver.seed,
            onnx=not no_onnx,
            workers=workers,
            progress=note,
            detail=progress,
        )
        if paths:
            note("Exporting")
        found = replace(found, call=name_command())
        keeping = partial(found.save, save, overwrite=overwrite) if save else None
        exports = write_exported(found.model, paths, inputs, keeping)
        if report is not None:
            found.report(report)
    if not found.plan.removed:
        note("The plan removes nothing: every unit stays.")
    if as_json:
        written = {
            "save": save and str(save),
            "output": [{**vars(each), "path": str(each.path)} for each in exports],
            "report": report and str(report),
        }
        show_json(compression_to_dict(found) | {"written": written})
        return
    show(report_compression(found))
    note(name_written(save, *paths, report))

"""The command `score`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.outputs import check_files
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress
from critical_neurons.core.budget import Budget
from critical_neurons.core.formulation import Exact, Formulation
from critical_neurons.core.settings import help_of
from critical_neurons.core.solver import Solver
from critical_neurons.core.workers import HERE
from critical_neurons.errors import InvalidSettingError


@reports_errors
@takes_settings
def score(
    model: options.ModelName,
    data: options.DataName,
    weights: options.Weights = None,
    output: Annotated[Path | None, typer.Option(help="File for the scores, as JSON.")] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="File for a table of all units, as CSV.")] = None,
    per_class: options.PerClass = None,
    split: options.Split = "train",
    *,
    form: options.DataForm,
    formulation: Formulation,
    budget: Budget | None,
    by_class: Annotated[bool, typer.Option("--by-class", help="One program per class, scores averaged.")] = False,
    worker_options: options.WorkersChoice,
    earlier: Annotated[
        Path | None, typer.Option(help="Scores by class of an interrupted run, whose finished classes are reused.")
    ] = None,
    incumbent: Annotated[
        Path | None,
        typer.Option(help=f"{help_of(Exact, 'incumbent')} With --formulation exact --binary."),
    ] = None,
    solver: Solver,
    ignore: options.Ignore = None,
    start: options.Start = None,
    stop: options.Stop = None,
    as_json: options.Json = False,
) -> None:
    """Score the units of MODEL on a few labelled inputs from DATA.

    A budget, one of --units, --params and --macs, replaces the sparsity term and its loss weight. Ctrl-C stops the
    solver, and the best scores so far are reported and saved; with --by-class, the average over the finished classes.
    --jobs and --backend dask solve several classes at once.

    \b
    Examples:
      critical-neurons score lenet5 ylecun/mnist --weights lenet5.pt --resize 32 --channels 3 --output scores.json
      critical-neurons score model.onnx batch.npz --output scores.json
      critical-neurons score my_package.models:make_net batch.npz --no-integer --input-radius 1e-5 --json
      critical-neurons score resnet:make batch.npz --formulation linearised --macs 0.5 --output scores.json
      critical-neurons score lenet5 batch.npz --weights lenet5.pt --by-class --jobs 4 --output scores.json
      critical-neurons score lenet5 batch.npz --weights lenet5.pt --loss-increase 0.01
      critical-neurons score my_package.models:make_net batch.npz --formulation exact --binary --units 0.5 \\
        --incumbent plan.json
    """
    check_files(
        [("--output", output), ("--csv", table)],
        [
            *(("MODEL", options.find_model_file(model)), ("DATA", data)),
            *(("--weights", weights), ("--incumbent", incumbent)),
        ],
    )
    workers = worker_options.read()
    if not by_class and (workers != HERE or earlier is not None):
        raise InvalidSettingError(
            "--jobs, --backend and --earlier: go with --by-class. A single program is not split."
        )
    if incumbent is not None:
        if not isinstance(formulation, Exact):
            raise InvalidSettingError(
                f"--incumbent: no setting of --formulation {formulation.name}. It goes with --formulation exact."
            )
        formulation = replace(formulation, incumbent=options.read_incumbent(incumbent))
    import critical_neurons as cn
    from critical_neurons.cli.tables import describe_batch, report_scores
    from critical_neurons.io.builtin_models import MODELS
    from critical_neurons.io.data import is_file
    from critical_neurons.io.models import load_model

    every_class = None
    if by_class:
        known = None if earlier is None else cn.Scores.load(earlier)
        every_class = cn.ByClass(formulation, workers=workers, earlier=known)
    per_class = 1 if per_class is None and not is_file(data) else per_class
    inputs, labels = form.load(data, per_class=per_class, seed=solver.seed, split=split)
    network = load_model(model, weights, options.find_shape(inputs))
    if model in MODELS and weights is None:
        note(f"{model} without --weights is untrained: its weights are random, and differ from run to run.")
    note(describe_batch(inputs, labels))
    with show_progress() as progress:
        scores = cn.score(
            network,
            inputs,
            labels,
            formulation=formulation if every_class is None else every_class,
            budget=budget,
            solver=solver,
            ignore=tuple(ignore or ()),
            start=start,
            stop=stop,
            progress=progress,
        )
    if all((values == 1).all() for values in scores.values()):
        note("Every unit scores 1: no point better than the whole network was found.")
    if output:
        scores.save(output)
        note(f"Scores written to {output}")
    if table:
        scores.to_csv(table)
        note(f"Table written to {table}")
    if as_json:
        written = {"output": output and str(output), "csv": table and str(table)}
        show_json({"scores": scores.to_dict(), "labels": None if labels is None else labels.tolist(), **written})
    else:
        show(report_scores(scores))

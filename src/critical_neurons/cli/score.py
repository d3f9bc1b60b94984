"""The command `score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli.options import (
    Backend,
    BoundsMethod,
    Budget,
    Channels,
    DataName,
    Formulation,
    Ignore,
    Jobs,
    Json,
    Mean,
    ModelName,
    Objective,
    PerClass,
    Resize,
    Scheduler,
    Seed,
    SolverOptions,
    Split,
    Start,
    Std,
    Stop,
    Threads,
    TimeLimit,
    Weights,
    read_incumbent,
    read_loss_weight,
    read_numbers,
    read_pairs,
    read_workers,
)
from critical_neurons.cli.outputs import check_apart
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress


@reports_errors
def score(
    model: ModelName,
    data: DataName,
    weights: Weights = None,
    output: Annotated[Path | None, typer.Option(help="Where the scores go, as JSON.")] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Where a table of all units goes, as CSV.")] = None,
    per_class: PerClass = None,
    split: Split = "train",
    mean: Mean = "",
    std: Std = "",
    resize: Resize = None,
    channels: Channels = None,
    loss_weight: Annotated[
        str,
        typer.Option(
            help="Weight of the loss against sparsity (the paper's lambda); auto: searched for --units; lagrangian: "
            "searched for --loss-increase."
        ),
    ] = "5.0",
    units: Annotated[float | None, typer.Option(help="The mean score wanted, with --loss-weight auto.")] = None,
    loss_increase: Annotated[
        float | None,
        typer.Option(help="By how much the mean loss may rise, with --loss-weight lagrangian."),
    ] = None,
    input_radius: Annotated[float, typer.Option(help="Half width of the box around each input.")] = 0.0,
    objective: Objective = "balanced",
    rescale: Annotated[float, typer.Option(help="The constant c in the sparsity term.")] = 2.0,
    formulation: Formulation = "paper",
    relaxed: Annotated[bool, typer.Option("--relaxed", help="Let gates take values between 0 and 1.")] = False,
    binary: Annotated[bool, typer.Option("--binary", help="Scores of 0 or 1, with the exact formulation.")] = False,
    bounds: BoundsMethod = "interval",
    budget: Budget = "",
    by_class: Annotated[bool, typer.Option("--by-class", help="One program per class, scores averaged.")] = False,
    jobs: Jobs = 1,
    backend: Backend = "local",
    scheduler: Scheduler = None,
    earlier: Annotated[
        Path | None, typer.Option(help="Scores by class of an interrupted run; classes it finished are taken over.")
    ] = None,
    incumbent: Annotated[
        Path | None,
        typer.Option(help="A plan, or scores that are one, to begin with and to judge, with --binary."),
    ] = None,
    solver: Annotated[str, typer.Option(help="auto, highs, barrier, scip, or cvxpy:NAME.")] = "auto",
    solver_option: SolverOptions = None,
    time_limit: TimeLimit = 300.0,
    gap: Annotated[float, typer.Option(help="Relative gap at which the solver is content.")] = 1e-4,
    threads: Threads = None,
    seed: Seed = 0,
    ignore: Ignore = None,
    start: Start = None,
    stop: Stop = None,
    as_json: Json = False,
) -> None:
    """Score the units of MODEL on a few labelled inputs from DATA.

    Ctrl-C stops the solver, and the best scores so far are reported and saved: with --by-class, the average of the
    classes done. --jobs and --backend dask solve several classes at once.

    \b
    Examples:
      critical-neurons score lenet5 ylecun/mnist --weights lenet5.pt --resize 32 --channels 3 --output scores.json
      critical-neurons score my_package.models:make_net batch.npz --relaxed --input-radius 1e-5 --json
      critical-neurons score resnet:make batch.npz --formulation linearised --budget macs=0.5 --output scores.json
      critical-neurons score lenet5 batch.npz --weights lenet5.pt --by-class --jobs 4 --output scores.json
      critical-neurons score lenet5 batch.npz --weights lenet5.pt --loss-weight lagrangian --loss-increase 0.01
      critical-neurons score my_package.models:make_net batch.npz --formulation exact --binary --budget units=0.5 \\
        --incumbent plan.json
    """
    from critical_neurons.core.files import check_writable

    check_apart(
        [("--output", output), ("--csv", table)],
        [("DATA", data), ("--weights", weights), ("--incumbent", incumbent)],
    )
    for path in (output, table):
        if path:
            check_writable(path)
    workers = read_workers(jobs, backend, scheduler)
    import critical_neurons as cn
    from critical_neurons.cli.tables import describe_batch, report_scores
    from critical_neurons.io.builtin_models import MODELS
    from critical_neurons.io.data import Look, is_file, load_batch
    from critical_neurons.io.models import load_model

    look = Look(channels, resize, read_numbers("--mean", mean), read_numbers("--std", std))
    proposed = None if incumbent is None else read_incumbent(incumbent)
    network = load_model(model, weights)
    per_class = 1 if per_class is None and not is_file(data) else per_class
    inputs, labels = load_batch(data, per_class=per_class, seed=seed, split=split, look=look)
    if model in MODELS and weights is None:
        note(f"{model} without --weights is untrained, and other weights every time.")
    note(describe_batch(inputs.shape[1:], labels.tolist()))
    with show_progress() as progress:
        scores = cn.score(
            network,
            inputs,
            labels,
            loss_weight=read_loss_weight(loss_weight),
            input_radius=input_radius,
            objective=objective,
            rescale=rescale,
            formulation=formulation,
            integer=not relaxed,
            binary=binary,
            bounds=bounds,
            budget=read_pairs("--budget", budget.split(",")) if budget else None,
            units=units,
            loss_increase=loss_increase,
            by_class=by_class,
            solver=solver,
            solver_options=read_pairs("--solver-option", solver_option or []),
            time_limit=time_limit,
            gap=gap,
            threads=threads,
            seed=seed,
            ignore=tuple(ignore or ()),
            start=start,
            stop=stop,
            progress=progress,
            workers=workers,
            earlier=None if earlier is None else cn.Scores.load(earlier),
            incumbent=proposed,
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
        show_json({"scores": scores.to_dict(), "labels": labels.tolist(), **written})
    else:
        show(report_scores(scores))

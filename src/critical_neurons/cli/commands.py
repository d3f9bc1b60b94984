"""The first commands: demo, inspect, score; those that follow are in files of their own."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from critical_neurons.cli.options import (
    Backend,
    BoundsMethod,
    Budget,
    Channels,
    DataName,
    DataOption,
    Formulation,
    Ignore,
    InputShape,
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
    read_sizes,
    read_workers,
)
from critical_neurons.cli.outputs import check_apart
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress
from critical_neurons.errors import InvalidSettingError
from critical_neurons.surroundings import describe_versions

if TYPE_CHECKING:
    from torch import Tensor

DEMO_UNITS = 0.125
"""With many more kept, refitting makes up for whatever is removed, and there is nothing to compare."""

app = typer.Typer(
    name="critical-neurons",
    help="Score the units of a trained network with a mixed integer program, and remove the unimportant ones.\n\n"
    "\b\nExamples:\n"
    "  critical-neurons demo\n"
    "  critical-neurons compress lenet5 train.npz --weights lenet5.pt --macs 0.5 --save smaller\n"
    "  critical-neurons inspect lenet5\n"
    "  critical-neurons score lenet5 ylecun/mnist --weights lenet5.pt --resize 32 --channels 3 --output scores.json\n"
    "  critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --threshold 0.1 --save smaller\n"
    "  critical-neurons evaluate lenet5 smaller --weights lenet5.pt --data test.npz\n"
    "  critical-neurons export lenet5 smaller --output smaller.onnx\n"
    "  critical-neurons reproduce table-2 --data data --jobs 2",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_versions(wanted: bool) -> None:
    if wanted:
        show(", ".join(f"{name} {number}" for name, number in describe_versions("torch", "highspy").items()))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Print versions and leave."),
    ] = False,
) -> None:
    """Options of no command in particular."""


@app.command()
@reports_errors
def demo(
    save: Annotated[Path, typer.Option(help="The folder that is written; what a demo wrote is replaced.")] = Path(
        "critical_neurons_demo"
    ),
    units: Annotated[float, typer.Option(help="Keep at most this share of the units of every layer.")] = DEMO_UNITS,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a small network on scikit-learn's digits, make it smaller, measure, save and export it.

    Takes less than a minute. As many units are also removed at random, for comparison. The folder holds both
    networks, the digits and the comparison: enough to try the other commands on.

    \b
    Example:
      critical-neurons demo --save demo
    """
    from critical_neurons.experiments.demo import ORIGINAL, TEST, TRAINING, check_demo, run_demo, save_demo
    from critical_neurons.reporting import demo_to_dict, report_demo

    check_demo(save)
    with show_progress() as progress:
        result = run_demo(seed=seed, units=units, progress=note, detail=progress)
        note("Saving, exporting and reading back")
        read_back = save_demo(result, save)
    if as_json:
        show_json({**demo_to_dict(result, read_back), "save": str(save)})
        return
    show(report_demo(result, read_back))
    note(f"Written: {save}")
    training, original, test = (quote(str(save / name)) for name in (TRAINING, ORIGINAL, TEST))
    note(
        f"Next: critical-neurons compress critical_neurons.experiments.demo:small_network {training} "
        f"--weights {original} --test-data {test} --max-drop 0.01 --save smaller"
    )


@app.command()
@reports_errors
def inspect(
    model: ModelName,
    weights: Weights = None,
    data: DataOption = None,
    input_shape: InputShape = None,
    start: Start = None,
    stop: Stop = None,
    as_json: Json = False,
) -> None:
    """Show which layers of MODEL get scores, and why the others do not.

    \b
    Examples:
      critical-neurons inspect vgg16
      critical-neurons inspect my_package.models:make_net --input-shape 1,28,28
      critical-neurons inspect my_package.models:make_hybrid --input-shape 3,64,64 --start body --stop body
    """
    import critical_neurons as cn
    from critical_neurons.loading import load_batch, load_model
    from critical_neurons.reporting import network_to_dict, report_network

    inputs = load_batch(data, per_class=1)[0] if data else None
    example = choose_example(model, inputs, input_shape)
    network = cn.inspect(load_model(model, weights), example, start=start, stop=stop)
    if as_json:
        show_json(network_to_dict(network))
    else:
        show(report_network(network))


@app.command()
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
    from critical_neurons.files import check_writable

    check_apart(
        [("--output", output), ("--csv", table)],
        [("DATA", data), ("--weights", weights), ("--incumbent", incumbent)],
    )
    for path in (output, table):
        if path:
            check_writable(path)
    workers = read_workers(jobs, backend, scheduler)
    import critical_neurons as cn
    from critical_neurons.experiments.models import MODELS
    from critical_neurons.loading import Look, is_file, load_batch, load_model
    from critical_neurons.reporting import describe_batch, report_scores

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


def choose_example(model: str, inputs: Tensor | None, input_shape: str | None) -> Tensor:
    """Inputs the model can be read with: from the data, of the given shape, or of the built-in network's."""
    import torch

    from critical_neurons.experiments.models import MODELS

    if inputs is not None:
        return inputs
    if input_shape is not None:
        shape = read_sizes("--input-shape", input_shape, "3,32,32")
    elif model in MODELS:
        shape = MODELS[model].input_shape
    else:
        raise InvalidSettingError(f"{model}: say what an input looks like, with --input-shape 3,32,32 or --data.")
    try:
        return torch.rand((2, *shape), generator=torch.Generator().manual_seed(0))
    except (RuntimeError, TypeError) as error:
        raise InvalidSettingError(f"--input-shape: {input_shape} is more than the memory holds.") from error

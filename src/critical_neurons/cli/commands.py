"""The commands: demo, inspect, score, prune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from critical_neurons.cli.options import (
    BoundsMethod,
    Budget,
    Channels,
    DataName,
    DataOption,
    Folder,
    Formulation,
    InputShape,
    Json,
    Mean,
    ModelName,
    Objective,
    PerClass,
    Resize,
    Scope,
    Seed,
    SolverOptions,
    Split,
    Start,
    Std,
    Stop,
    Weights,
    WeightsOutput,
    read_loss_weight,
    read_numbers,
    read_pairs,
    read_sizes,
    read_threshold,
)
from critical_neurons.cli.outputs import check_outputs, write_smaller
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress
from critical_neurons.errors import InvalidSettingError

if TYPE_CHECKING:
    from torch import Tensor


app = typer.Typer(
    name="critical-neurons",
    help="Score the units of a trained network with a mixed integer program, and remove the unimportant ones.\n\n"
    "\b\nExamples:\n"
    "  critical-neurons demo\n"
    "  critical-neurons inspect lenet5\n"
    "  critical-neurons score lenet5 ylecun/mnist --weights lenet5.pt --resize 32 --channels 3 --output scores.json\n"
    "  critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --threshold 0.1 --save smaller\n"
    "  critical-neurons evaluate lenet5 smaller --weights lenet5.pt --data test.npz\n"
    "  critical-neurons export lenet5 smaller --output smaller.onnx",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
@reports_errors
def demo(
    output: WeightsOutput = None,
    per_class: Annotated[int, typer.Option(help="Digits of every class to score on.")] = 1,
    threshold: Annotated[float, typer.Option(help="Units that score below are removed.")] = 0.5,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a small network on scikit-learn's digits, score it, remove what scores low, measure.

    Takes less than a minute. Without --output no file is written.

    \b
    Example:
      critical-neurons demo
    """
    if output:
        check_outputs(output, None, None, dry_run=False)
    from critical_neurons.experiments.demo import run_demo
    from critical_neurons.reporting import demo_to_dict, report_demo

    with show_progress() as progress:
        result = run_demo(seed=seed, per_class=per_class, threshold=threshold, announce=note, progress=progress)
    if output:
        write_smaller(result.smaller, result.plan, output, None, None)
    if as_json:
        show_json(demo_to_dict(result))
    else:
        show(report_demo(result))


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
        typer.Option(help="Weight of the loss against sparsity (the paper's lambda); auto: searched for --units."),
    ] = "5.0",
    units: Annotated[float | None, typer.Option(help="The mean score wanted, with --loss-weight auto.")] = None,
    input_radius: Annotated[float, typer.Option(help="Half width of the box around each input.")] = 0.0,
    objective: Objective = "published",
    rescale: Annotated[float, typer.Option(help="The constant c in the sparsity term.")] = 2.0,
    formulation: Formulation = "paper",
    relaxed: Annotated[bool, typer.Option("--relaxed", help="Let gates take values between 0 and 1.")] = False,
    binary: Annotated[bool, typer.Option("--binary", help="Scores of 0 or 1, with the exact formulation.")] = False,
    bounds: BoundsMethod = "interval",
    budget: Budget = "",
    by_class: Annotated[bool, typer.Option("--by-class", help="One program per class, scores averaged.")] = False,
    solver: Annotated[str, typer.Option(help="highs, scip, or cvxpy:NAME.")] = "highs",
    solver_option: SolverOptions = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which the best so far is taken.")] = 300.0,
    gap: Annotated[float, typer.Option(help="Relative gap at which the solver is content.")] = 1e-4,
    threads: Annotated[int | None, typer.Option(help="Threads of the solver.")] = None,
    seed: Seed = 0,
    ignore: Annotated[list[str] | None, typer.Option(help="A layer that gets no scores; repeat for more.")] = None,
    start: Start = None,
    stop: Stop = None,
    as_json: Json = False,
) -> None:
    """Score the units of MODEL on a few labelled inputs from DATA.

    Ctrl-C stops the solver, and the best scores so far are reported and saved.

    \b
    Examples:
      critical-neurons score lenet5 ylecun/mnist --weights lenet5.pt --resize 32 --channels 3 --output scores.json
      critical-neurons score my_package.models:make_net batch.npz --relaxed --input-radius 1e-5 --json
      critical-neurons score resnet:make batch.npz --formulation linearised --budget macs=0.5 --output scores.json
    """
    from critical_neurons.files import check_writable

    if output and output == table:
        raise InvalidSettingError(f"{output}: given to --output and --csv. Give two paths.")
    for path in (output, table):
        if path:
            check_writable(path)
    import critical_neurons as cn
    from critical_neurons.experiments.models import MODELS
    from critical_neurons.loading import Look, is_file, load_batch, load_model
    from critical_neurons.reporting import describe_batch, report_scores

    look = Look(channels, resize, read_numbers("--mean", mean), read_numbers("--std", std))
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


@app.command()
@reports_errors
def prune(
    model: ModelName,
    scores: Annotated[Path, typer.Option(help="Scores of this model, as written by score.")],
    weights: Weights = None,
    threshold: Annotated[str | None, typer.Option(help="Remove units that score below: a number, or mean.")] = None,
    units: Annotated[float | None, typer.Option(help="Keep at most this share of the units, such as 0.5.")] = None,
    params: Annotated[float | None, typer.Option(help="Keep at most this share of the parameters.")] = None,
    macs: Annotated[float | None, typer.Option(help="Keep at most this share of the multiply-adds.")] = None,
    scope: Scope = "layer",
    min_units: Annotated[int, typer.Option(help="Units that stay in every layer.")] = 1,
    round_to: Annotated[int, typer.Option(help="Keep a multiple of so many units per layer.")] = 1,
    keep: Annotated[list[str] | None, typer.Option(help="A layer that loses nothing; repeat for more.")] = None,
    output: WeightsOutput = None,
    plan: Annotated[Path | None, typer.Option(help="Where the plan goes, as JSON.")] = None,
    save: Folder = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Let --save replace what it wrote before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    data: Annotated[str | None, typer.Option(help="Labelled data to measure the accuracy on, as for score.")] = None,
    input_shape: InputShape = None,
    per_class: Annotated[int | None, typer.Option(help="Data points of every class. By default all.")] = None,
    split: Split = "test",
    mean: Mean = "",
    std: Std = "",
    resize: Resize = None,
    channels: Channels = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Remove the low-scored units of MODEL and write the smaller weights.

    \b
    Examples:
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --threshold 0.1 --dry-run
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --units 0.5 --scope global \\
        --output smaller.safetensors --plan plan.json
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --macs 0.5 --save smaller/
    """
    check_outputs(output, plan, save, dry_run=dry_run, overwrite=overwrite)
    import critical_neurons as cn
    from critical_neurons.loading import Look, load_batch, load_model
    from critical_neurons.measuring import count_parameters, measure_accuracy
    from critical_neurons.reading import fingerprint, unwrap
    from critical_neurons.reporting import describe_parameters, report_change, report_plan

    loaded = cn.Scores.load(scores)
    chosen = cn.plan(
        loaded,
        threshold=read_threshold(threshold),
        units=units,
        params=params,
        macs=macs,
        scope=scope,
        min_units=min_units,
        round_to=round_to,
        keep=tuple(keep or ()),
    )
    network = load_model(model, weights)
    look = Look(channels, resize, read_numbers("--mean", mean), read_numbers("--std", std))
    batch = load_batch(data, per_class=per_class, seed=seed, split=split, look=look) if data else None
    smaller = cn.prune(network, chosen, choose_example(model, batch and batch[0], input_shape))
    if fingerprint(unwrap(network)).weights != loaded.fingerprint.weights:
        note("The scores were made with other weights of this network.")
    if not chosen.removed:
        note("The plan removes nothing: every unit stays.")
    before, after = count_parameters(network), count_parameters(smaller)
    accuracies = []
    if batch:
        inputs, labels = batch[0].to(next(network.parameters()).dtype), batch[1]
        accuracies = [measure_accuracy(each, inputs, labels) for each in (network, smaller)]
    if not dry_run:
        write_smaller(smaller, chosen, output, plan, save, overwrite=overwrite)
    outputs = {"output": output, "plan": plan, "save": save}
    if as_json:
        result: dict[str, Any] = {"plan": chosen.to_dict(), "parameters": {"before": before, "after": after}}
        if accuracies:
            result["accuracy"] = {"before": accuracies[0], "after": accuracies[1]}
        written = {} if dry_run else {name: path and str(path) for name, path in outputs.items()}
        show_json(result | {"written": written})
        return
    measured = [("accuracy", f"{accuracies[0]:.2%}", f"{accuracies[1]:.2%}")] if accuracies else []
    show(report_plan(chosen))
    show(report_change([describe_parameters(before, after), *measured]))
    paths = ", ".join(str(path) for path in outputs.values() if path)
    note("Dry run: nothing written." if dry_run else f"Written: {paths}")


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
    return torch.rand((2, *shape), generator=torch.Generator().manual_seed(0))

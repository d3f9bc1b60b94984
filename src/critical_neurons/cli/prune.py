"""The command `prune`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.outputs import Read, check_outputs, write_smaller
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress
from critical_neurons.core.distillation import Distillation
from critical_neurons.errors import InvalidSettingError


@reports_errors
@takes_settings
def prune(
    model: options.ModelName,
    *,
    scores: Annotated[Path | None, typer.Option(help="Scores of this model, as written by score.")] = None,
    carry_out: Annotated[
        Path | None, typer.Option(help="A plan that --plan wrote, instead of scores and a rule.")
    ] = None,
    trust_edited: Annotated[
        bool,
        typer.Option("--trust-edited", help="Accept a plan that was edited by hand; it is still checked."),
    ] = False,
    weights: options.Weights = None,
    threshold: Annotated[str | None, typer.Option(help="Remove units that score below: a number, or mean.")] = None,
    units: options.Units = None,
    params: options.Params = None,
    macs: options.Macs = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Remove as much as possible while the accuracy on --data falls by at most this; 0.01 is one point."
        ),
    ] = None,
    scope: options.Scope = "layer",
    min_units: options.MinUnits = 1,
    round_to: options.RoundTo = 1,
    keep: options.Keep = None,
    compensate: options.Compensate = "none",
    distillation: Distillation | None,
    calibration: Annotated[
        str | None,
        typer.Option(help="Inputs to refit on, as for score; up to 100 of every class of a data set, split train."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the smaller weights, .safetensors, or for the smaller network, .onnx or .pt2."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="File for the plan, as JSON.")] = None,
    save: options.Folder = None,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    data: Annotated[str | None, typer.Option(help="Labelled data to measure the accuracy on, as for score.")] = None,
    input_shape: options.InputShape = None,
    per_class: Annotated[int | None, typer.Option(help="Data points of every class. By default all.")] = None,
    split: options.Split = "test",
    form: options.DataForm,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Remove the low-scored units of MODEL and write the smaller weights or network.

    Ctrl-C during the search for --max-drop leaves the best plan so far, which is then carried out.

    \b
    Examples:
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --threshold 0.1 --dry-run
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --units 0.5 --scope global \\
        --output smaller.safetensors --plan plan.json
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --macs 0.5 --save smaller/ \\
        --compensate least_squares --calibration train.npz
      critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --max-drop 0.01 --data val.npz \\
        --save smaller/
      critical-neurons prune model.onnx --scores scores.json --units 0.5 --output smaller.onnx
    """
    read: Read = [
        *(
            ("MODEL", options.find_model_file(model)),
            ("--scores", scores),
            ("--carry-out", carry_out),
            ("--weights", weights),
        ),
        *(("--data", data), ("--calibration", calibration)),
    ]
    chosen_by = {
        "--threshold": threshold,
        "--units": units,
        "--params": params,
        "--macs": macs,
        "--max-drop": max_drop,
    }
    _check_source(scores, carry_out, chosen_by, trust_edited=trust_edited)
    check_outputs(output, plan, save, read=read, dry_run=dry_run, overwrite=overwrite)
    if compensate != "none" and calibration is None:
        raise InvalidSettingError(f"--compensate {compensate}: say on what inputs, with --calibration.")
    if compensate == "none" and calibration is not None:
        raise InvalidSettingError("--calibration: nothing is refitted. Say what, with --compensate least_squares.")
    if max_drop is not None and data is None:
        raise InvalidSettingError("--max-drop: say on what the accuracy is judged, with --data.")
    compensation = options.join_compensation(compensate, distillation) or compensate
    import critical_neurons as cn
    from critical_neurons.cli.tables import describe_parameters, report_change, report_plan
    from critical_neurons.core.batch import CALIBRATED_ON
    from critical_neurons.io.models import load_model
    from critical_neurons.removal.metrics import count_parameters, measure_accuracy
    from critical_neurons.removal.rows import digest_inputs
    from critical_neurons.structure import fingerprint, unwrap

    loaded = cn.Scores.load(scores) if scores else None
    ready = cn.Plan.load(carry_out, trust_edited=trust_edited) if carry_out else None
    inputs, labels = form.load(data, per_class=per_class, seed=seed, split=split) if data else (None, None)
    if inputs is not None and labels is None:
        note(f"No accuracy: {data} holds no labels.")
    if max_drop is not None and labels is None:
        raise InvalidSettingError(f"--max-drop: judged by accuracy, but {data} holds no labels.")
    fitted = form.load(calibration, most_per_class=options.MOST_PER_CLASS, seed=seed)[0] if calibration else None
    example = options.choose_example(model, fitted if inputs is None else inputs, input_shape)
    network = load_model(model, weights, options.find_shape(example))
    judge = None
    if inputs is not None and labels is not None:
        judge = partial(measure_accuracy, inputs=inputs, labels=labels)
    with show_progress() as progress:
        chosen = ready or cn.plan(
            cast(cn.Scores, loaded),
            threshold=options.read_threshold(threshold),
            units=units,
            params=params,
            macs=macs,
            max_drop=max_drop,
            scope=scope,
            min_units=min_units,
            round_to=round_to,
            keep=tuple(keep or ()),
            model=network,
            evaluate=judge,
            compensate=compensation,
            calibration=example if fitted is None else fitted,
            judged_on=inputs,
            progress=progress,
        )
        smaller = cn.prune(
            network,
            chosen,
            example,
            compensate=compensation,
            calibration=fitted,
            seed=seed,
            progress=progress,
        )
    if fingerprint(unwrap(network)).weights != chosen.structure.fingerprint.weights:
        note("The scores were made with other weights of this network.")
    if not chosen.removed:
        note("The plan removes nothing: every unit stays.")
    result: dict[str, Any] = {
        "plan": chosen.to_dict(),
        "parameters": {"before": count_parameters(network), "after": count_parameters(smaller)},
    }
    rows = [describe_parameters(**result["parameters"])]
    if judge is not None and inputs is not None:
        before, after = judge(network), judge(smaller)
        known = getattr(smaller, CALIBRATED_ON)
        seen = max_drop is not None or not known.isdisjoint(digest_inputs(inputs))
        kind = "calibration" if seen else "test"
        result["accuracy"] = {"before": before, "after": after, "data": kind}
        rows.append((f"accuracy, {kind} data", f"{before:.2%}", f"{after:.2%}"))
    if max_drop is not None:
        note("The plan was chosen by the accuracy on --data: measure anew on other data, with evaluate.")
    if not dry_run:
        write_smaller(smaller, chosen, output, plan, save, example, overwrite=overwrite)
    outputs = {"output": output, "plan": plan, "save": save}
    if as_json:
        show_json(
            result | {"written": {} if dry_run else {name: path and str(path) for name, path in outputs.items()}}
        )
        return
    show(report_plan(chosen))
    show(report_change(rows))
    paths = ", ".join(str(path) for path in outputs.values() if path)
    note("Dry run: nothing written." if dry_run else f"Written: {paths}")


def _check_source(
    scores: Path | None, carry_out: Path | None, chosen_by: Mapping[str, object], *, trust_edited: bool
) -> None:
    """Either scores and a rule, or a finished plan."""
    if (scores is None) == (carry_out is None):
        raise InvalidSettingError("Give one of --scores, with what is kept of them, and --carry-out.")
    given = [name for name, value in chosen_by.items() if value is not None]
    if carry_out is not None and given:
        raise InvalidSettingError(f"{given[0]}: --carry-out says what stays. Leave one of them out.")
    if trust_edited and carry_out is None:
        raise InvalidSettingError("--trust-edited: applies to the plan of --carry-out, which is not given.")

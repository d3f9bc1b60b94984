"""The command `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.outputs import check_files
from critical_neurons.cli.terminal import note, reports_errors, show, show_json


@reports_errors
@takes_settings
def evaluate(
    model: options.ModelName,
    folder: options.SmallerFolder,
    data: Annotated[str, typer.Option(help="Labelled data to measure on, as for score.")],
    weights: options.Weights = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="The data used for scoring and refitting: recognised in --data, and used for int8 ranges."),
    ] = None,
    seen: Annotated[
        bool, typer.Option("--seen", help="The data was used in scoring or refitting: call it calibration data.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Where the comparison goes, as JSON.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes whose latency is measured.")] = "1,64",
    repeats: Annotated[int, typer.Option(help="Samples of every latency.")] = 30,
    threads: Annotated[int, typer.Option(help="Threads of torch and onnxruntime.")] = 1,
    no_onnx: options.NoOnnx = False,
    per_class: Annotated[int | None, typer.Option(help="Data points of every class. By default all.")] = None,
    split: options.Split = "test",
    *,
    form: options.DataForm,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Compare MODEL with the smaller network in FOLDER: accuracy, size, memory, latency, int8.

    \b
    Examples:
      critical-neurons evaluate lenet5 smaller --weights lenet5.pt --data test.npz
      critical-neurons evaluate model.onnx smaller --data test.npz
      critical-neurons evaluate my_package.models:make_net smaller --weights net.pt --data test.npz \\
        --calibration batch.npz --output comparison.json
    """
    sizes = options.read_sizes("--batch-sizes", batch_sizes, "1,64")
    import critical_neurons as cn
    from critical_neurons.cli.tables import report_comparison
    from critical_neurons.io.checkpoint import PLAN, WRITTEN
    from critical_neurons.io.models import load_model
    from critical_neurons.structure import fingerprint, unwrap

    parts = [("FOLDER", folder / name) for name in WRITTEN]
    check_files(
        [("--output", output)],
        [
            *parts,
            ("MODEL", options.find_model_file(model)),
            ("--weights", weights),
            ("--data", data),
            ("--calibration", calibration),
        ],
    )
    inputs, labels = form.load(data, per_class=per_class, seed=seed, split=split)
    network = load_model(model, weights, options.find_shape(inputs))
    smaller = cn.load(folder, network)
    if fingerprint(unwrap(network)).weights != cn.Plan.load(folder / PLAN).structure.fingerprint.weights:
        note("The smaller network was made from other weights than these.")
    comparison = cn.compare(
        network,
        smaller,
        inputs,
        labels,
        data="calibration" if seen else "test",
        calibration=form.load(calibration)[0] if calibration else None,
        batch_sizes=sizes,
        repeats=repeats,
        threads=threads,
        onnx=not no_onnx,
        progress=lambda step: note(f"Measuring {step}"),
    )
    if output:
        comparison.save(output)
        note(f"Comparison written to {output}")
    if as_json:
        show_json(comparison.to_dict())
    else:
        show(report_comparison(comparison))

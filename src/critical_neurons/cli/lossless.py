"""The command `lossless`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli import options
from critical_neurons.cli.fields import takes_settings
from critical_neurons.cli.outputs import check_exports, check_files, name_written, write_exported
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress
from critical_neurons.errors import InvalidInputError, InvalidSettingError


@reports_errors
@takes_settings
def lossless(
    model: options.ModelName,
    weights: options.Weights = None,
    box: Annotated[
        str, typer.Option(help="Range of every input value, such as 0,1; or data: the range of the data.")
    ] = "",
    data: options.DataOption = None,
    radius: Annotated[
        float | None, typer.Option(help="Half width of a box around every data point, instead of one box.")
    ] = None,
    input_shape: options.InputShape = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for proofs; undecided units then stay.")] = 300.0,
    no_collapse: Annotated[bool, typer.Option("--no-collapse", help="Do not merge layers.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="JSON file for every unit's state and proof. An existing record is continued."),
    ] = None,
    output: options.Exports = None,
    save: options.Folder = None,
    overwrite: options.Overwrite = False,
    per_class: options.PerClass = None,
    split: options.Split = "train",
    *,
    form: options.DataForm,
    seed: options.Seed = 0,
    worker_options: options.WorkersChoice,
    as_json: options.Json = False,
) -> None:
    """Remove from MODEL what is proved to make no difference for any input of a box.

    After Ctrl-C or --time-limit the proofs so far are used; with --record a later run continues from there.

    \b
    Examples:
      critical-neurons lossless my_package.models:make_net --input-shape 784 --box 0,1 --save smaller/
      critical-neurons lossless model.onnx --data val.npz --radius 0.01 --output smaller.onnx --record proofs.json
    """
    paths = output or []
    workers = worker_options.read()
    read = [("MODEL", options.find_model_file(model)), ("--weights", weights), ("--data", data)]
    if paths or save is not None:
        check_exports(paths, save, read=read, overwrite=overwrite)
    elif record is None:
        raise InvalidSettingError("Say where the result goes: with --save, --output, or --record for proofs alone.")
    check_files([("--record", record)], read, folder=save)
    import critical_neurons as cn
    from critical_neurons.cli.tables import report_stability
    from critical_neurons.io.models import load_model

    inputs = form.load(data, per_class=per_class, seed=seed, split=split)[0] if data else None
    example = options.choose_example(model, inputs, input_shape)
    shape = options.find_shape(example)
    if shape is None:
        raise InvalidInputError(f"{data}: found several inputs. Accepted by lossless: one, as programs read.")
    network = load_model(model, weights, shape)
    with show_progress() as progress:
        found = cn.lossless(
            network,
            _read_box(box, inputs, shape),
            inputs=inputs,
            radius=radius,
            time_limit=time_limit,
            collapse=not no_collapse and save is None,
            workers=workers,
            record=record,
            seed=seed,
            progress=progress,
        )
    if paths or save is not None:
        keep = partial(cn.save, found.model, save, plan=found.plan, overwrite=overwrite) if save else None
        write_exported(found.model, paths, example, keep)
    before, after = found.parameters
    if as_json:
        show_json({"stability": found.stability.to_dict(), "parameters": {"before": before, "after": after}})
        return
    show(report_stability(found.stability))
    note(f"Parameters: {before:,} before, {after:,} after ({after / before:.1%}).")
    if save is not None and not no_collapse:
        note("No layer was collapsed: --save keeps the architecture. Use --output for a network with fewer layers.")
    note(name_written(*paths, save, record))


def _read_box(text: str, inputs: object, shape: tuple[int, ...]) -> object:
    """The two bounds as arrays of the shape of one input."""
    import numpy as np
    from torch import Tensor

    if text == "data":
        if not isinstance(inputs, Tensor):
            raise InvalidSettingError("--box data: say what data, with --data.")
        return inputs.amin(0).double(), inputs.amax(0).double()
    ends = options.read_numbers("--box", text)
    if not ends:
        return None
    if len(ends) != 2:
        raise InvalidSettingError(f"--box: two numbers with a comma between them, as 0,1; got {text!r}.")
    return tuple(np.full(shape, end) for end in ends)

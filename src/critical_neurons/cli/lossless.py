"""The command `lossless`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli.options import (
    Backend,
    Channels,
    DataOption,
    Folder,
    InputShape,
    Jobs,
    Json,
    Mean,
    ModelName,
    Overwrite,
    PerClass,
    Resize,
    Scheduler,
    Seed,
    Split,
    Std,
    Weights,
    choose_example,
    find_model_file,
    read_numbers,
    read_workers,
)
from critical_neurons.cli.outputs import check_apart, check_exports, write_exported
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress
from critical_neurons.errors import InvalidSettingError


@reports_errors
def lossless(
    model: ModelName,
    weights: Weights = None,
    box: Annotated[
        str, typer.Option(help="What every input value ranges over, as 0,1; or data: the range of the data.")
    ] = "",
    data: DataOption = None,
    radius: Annotated[
        float | None, typer.Option(help="In place of one box, one of this half width around every data point.")
    ] = None,
    input_shape: InputShape = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for proofs; undecided units then stay.")] = 300.0,
    no_collapse: Annotated[bool, typer.Option("--no-collapse", help="Keep layers that could become one.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Where every unit's state and proof go, as JSON; taken up again if it is there."),
    ] = None,
    output: Annotated[
        list[Path] | None, typer.Option(help="The smaller network, as .onnx or .pt2; repeat for more.")
    ] = None,
    save: Folder = None,
    overwrite: Overwrite = False,
    per_class: PerClass = None,
    split: Split = "train",
    mean: Mean = "",
    std: Std = "",
    resize: Resize = None,
    channels: Channels = None,
    seed: Seed = 0,
    jobs: Jobs = 1,
    backend: Backend = "local",
    scheduler: Scheduler = None,
    as_json: Json = False,
) -> None:
    """Remove from MODEL what is proved to make no difference for any input of a box.

    Ctrl-C and --time-limit leave what is proved; with --record a later run goes on from there.

    \b
    Examples:
      critical-neurons lossless my_package.models:make_net --input-shape 784 --box 0,1 --save smaller/
      critical-neurons lossless model.onnx --data val.npz --radius 0.01 --output smaller.onnx --record proofs.json
    """
    paths = output or []
    workers = read_workers(jobs, backend, scheduler)
    read = [("MODEL", find_model_file(model)), ("--weights", weights), ("--data", data)]
    if paths or save is not None:
        check_exports(paths, save, read=read, overwrite=overwrite)
    elif record is None:
        raise InvalidSettingError("Say where the result goes: with --save, --output, or --record for proofs alone.")
    check_apart([("--record", record)], read, folder=save)
    import critical_neurons as cn
    from critical_neurons.cli.tables import report_stability
    from critical_neurons.io.data import Look, load_batch
    from critical_neurons.io.models import load_model

    look = Look(channels, resize, read_numbers("--mean", mean), read_numbers("--std", std))
    inputs = load_batch(data, per_class=per_class, seed=seed, split=split, look=look)[0] if data else None
    example = choose_example(model, inputs, input_shape)
    network = load_model(model, weights, tuple(example.shape[1:]))
    with show_progress() as progress:
        found = cn.lossless(
            network,
            _read_box(box, inputs, tuple(example.shape[1:])),
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
    written = ", ".join(str(path) for path in (*paths, save, record) if path)
    note(f"Written: {written}")


def _read_box(text: str, inputs: object, shape: tuple[int, ...]) -> object:
    """The pair of ends, arrays of the shape of one input."""
    import numpy as np
    from torch import Tensor

    if text == "data":
        if not isinstance(inputs, Tensor):
            raise InvalidSettingError("--box data: say what data, with --data.")
        return inputs.amin(0).double(), inputs.amax(0).double()
    ends = read_numbers("--box", text)
    if not ends:
        return None
    if len(ends) != 2:
        raise InvalidSettingError(f"--box: two numbers with a comma between them, as 0,1; got {text!r}.")
    return tuple(np.full(shape, end) for end in ends)

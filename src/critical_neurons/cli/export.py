"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli.options import (
    DataOption,
    InputShape,
    Json,
    ModelName,
    SmallerFolder,
    choose_example,
    find_given_shape,
    find_model_file,
)
from critical_neurons.cli.outputs import check_apart
from critical_neurons.cli.terminal import note, reports_errors, show_json


@reports_errors
def export(
    model: ModelName,
    folder: SmallerFolder,
    output: Annotated[
        list[Path], typer.Option(help="A file to write: .onnx, or .pt2 of torch.export. Repeat for more.")
    ],
    data: DataOption = None,
    input_shape: InputShape = None,
    as_json: Json = False,
) -> None:
    """Write the smaller network in FOLDER for other programs. MODEL is the original it was made from.

    Every file takes batches of any size. It is loaded, run and compared with the network before it gets its name.

    \b
    Examples:
      critical-neurons export lenet5 smaller --output smaller.onnx --output smaller.pt2
      critical-neurons export model.onnx smaller --output smaller.onnx
      critical-neurons export my_package.models:make_net smaller --input-shape 1,28,28 --output smaller.onnx
    """
    from critical_neurons.core.files import check_writable

    check_apart([("--output", path) for path in output], [("MODEL", find_model_file(model))])
    for path in output:
        check_writable(path)
    import critical_neurons as cn
    from critical_neurons.io.data import load_batch
    from critical_neurons.io.exporters import check_format
    from critical_neurons.io.models import load_model

    for path in output:
        check_format(path)
    inputs = load_batch(data, per_class=1)[0] if data else None
    smaller = cn.load(folder, load_model(model, input_shape=find_given_shape(inputs, input_shape)))
    example = choose_example(model, inputs, input_shape)
    exports = [cn.export(smaller, path, example) for path in output]
    if as_json:
        show_json([{**vars(each), "path": str(each.path)} for each in exports])
        return
    for each in exports:
        note(f"Written: {each.path}, {each.bytes:,} bytes; outputs differ from torch's by {each.difference:.1e}")

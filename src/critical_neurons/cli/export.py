"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli import options
from critical_neurons.cli.outputs import check_files
from critical_neurons.cli.terminal import note, reports_errors, show_json


@reports_errors
def export(
    model: options.ModelName,
    folder: options.SmallerFolder,
    output: Annotated[list[Path], typer.Option(help=options.EXPORTS_HELP)],
    data: options.DataOption = None,
    input_shape: options.InputShape = None,
    as_json: options.Json = False,
) -> None:
    """Write the smaller network in FOLDER for other programs. MODEL is the original it was made from.

    Every file accepts batches of any size. It is loaded, run and compared with the network before it gets its name.

    \b
    Examples:
      critical-neurons export lenet5 smaller --output smaller.onnx --output smaller.pt2
      critical-neurons export model.onnx smaller --output smaller.onnx
      critical-neurons export my_package.models:make_net smaller --input-shape 1,28,28 --output smaller.onnx
    """
    check_files([("--output", path) for path in output], [("MODEL", options.find_model_file(model))])
    import critical_neurons as cn
    from critical_neurons.io.data import load_example
    from critical_neurons.io.exporters import check_format
    from critical_neurons.io.models import load_model

    for path in output:
        check_format(path)
    inputs = load_example(data) if data else None
    smaller = cn.load(folder, load_model(model, input_shape=options.find_given_shape(inputs, input_shape)))
    example = options.choose_example(model, inputs, input_shape)
    exports = [cn.export(smaller, path, example) for path in output]
    if as_json:
        show_json([{**vars(each), "path": str(each.path)} for each in exports])
        return
    for each in exports:
        note(f"Written: {each.path}, {each.bytes:,} bytes; outputs differ from torch's by {each.difference:.1e}")

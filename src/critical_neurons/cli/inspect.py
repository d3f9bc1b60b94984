"""The command `inspect`."""

from __future__ import annotations

from critical_neurons.cli import options
from critical_neurons.cli.terminal import reports_errors, show, show_json


@reports_errors
def inspect(
    model: options.ModelName,
    weights: options.Weights = None,
    data: options.DataOption = None,
    input_shape: options.InputShape = None,
    start: options.Start = None,
    stop: options.Stop = None,
    as_json: options.Json = False,
) -> None:
    """Show which layers of MODEL can lose units, which go together, and why the others cannot.

    \b
    Examples:
      critical-neurons inspect vgg16
      critical-neurons inspect model.onnx
      critical-neurons inspect my_package.models:make_net --input-shape 1,28,28
      critical-neurons inspect my_package.models:make_hybrid --input-shape 3,64,64 --start body --stop body
    """
    import critical_neurons as cn
    from critical_neurons.cli.tables import report_structure, structure_to_dict
    from critical_neurons.io.data import load_example
    from critical_neurons.io.models import load_model

    inputs = load_example(data) if data else None
    example = options.choose_example(model, inputs, input_shape)
    structure = cn.inspect(load_model(model, weights, options.find_shape(example)), example, start=start, stop=stop)
    if as_json:
        show_json(structure_to_dict(structure))
    else:
        show(report_structure(structure))

"""The public `export`: a model to ONNX or `torch.export`, by the ending of the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from critical_neurons.io.exporters import EXPORTERS, Export, check_format
from critical_neurons.readers import isolated
from critical_neurons.removal.rows import gather_inputs, match_model
from critical_neurons.structure import copy_model, join_rows, unwrap


@isolated
def export(model: nn.Module, path: str | os.PathLike[str], example: Any) -> Export:
    """Write the model as ONNX (`.onnx`, extra `onnx`) or with `torch.export` (`.pt2`), for batches of any size.

    `example` is a batch of inputs: a tensor or array, or a tuple or dict of them for a model of several inputs.
    Before the file gets its name it is loaded, run on rows of the example at several batch sizes and compared with
    the model, output by output. If the rows cannot be separated, as the nodes of a graph, the batch size is fixed.

    >>> written = cn.export(model, "model.onnx", inputs)
    >>> written.difference < 1e-5
    True
    """
    check_format(path)
    source = unwrap(model)
    inputs = match_model(gather_inputs(example), source)
    return EXPORTERS[Path(path).suffix](source, path, join_rows(copy_model(source), inputs))

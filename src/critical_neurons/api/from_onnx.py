"""The public `from_onnx`: an ONNX file to an nn.Module."""

from __future__ import annotations

import os

from torch import nn

from critical_neurons.io.onnx_import import import_onnx
from critical_neurons.readers import isolated


@isolated
def from_onnx(path: str | os.PathLike[str], *, input_shape: tuple[int, ...] | None = None) -> nn.Module:
    """The network in an ONNX file, made of torch's layers, on the CPU in evaluation mode (extra `onnx`).

    It accepts batches of any size, and is compared with onnxruntime on random inputs: a difference is an error.
    `input_shape` is the shape of one input, such as (3, 32, 32), for files that leave it open. Layers are named after
    their weights in the file, such as `features.0` for `features.0.weight`, or after the operator.

    >>> written = cn.export(model, "model.onnx", inputs)
    >>> again = cn.from_onnx("model.onnx")
    >>> torch.allclose(again(inputs), model(inputs), atol=1e-5)
    True
    """
    return import_onnx(path, input_shape)

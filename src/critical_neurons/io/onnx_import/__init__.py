"""ONNX import: an ONNX file to an nn.Module, compared with onnxruntime."""

from critical_neurons.io.onnx_import.conversion import import_onnx
from critical_neurons.io.onnx_import.onnx_file import read_input_shape

__all__ = ["import_onnx", "read_input_shape"]

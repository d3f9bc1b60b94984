"""Readers: nn.Module to Network."""

from critical_neurons.readers.forward_pass import Passage, run_model
from critical_neurons.readers.isolation import isolated
from critical_neurons.readers.layers import (  # noqa: F401  importing them registers the built-in readers
    activations,
    operators,
    pooling,
    rearranging,
    reshaping,
    standard,
)
from critical_neurons.readers.registry import LEFT_OUT, NO_PROGRAM, reads
from critical_neurons.readers.trace import check_architecture, copy_for_reading, read_network

__all__ = [
    "LEFT_OUT",
    "NO_PROGRAM",
    "Passage",
    "check_architecture",
    "copy_for_reading",
    "isolated",
    "read_network",
    "reads",
    "run_model",
]

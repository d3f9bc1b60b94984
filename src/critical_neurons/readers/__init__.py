"""Readers: nn.Module to Network."""

from critical_neurons.readers.forward_pass import Passage, run_model
from critical_neurons.readers.interpreter import are_probabilities, take_logarithms
from critical_neurons.readers.isolation import isolated
from critical_neurons.readers.layers import activations as _activations  # noqa: F401  registers built-in readers
from critical_neurons.readers.layers import arithmetic as _arithmetic  # noqa: F401  so do these
from critical_neurons.readers.layers import pooling as _pools  # noqa: F401  so do these
from critical_neurons.readers.layers import rearranging as _rearranging  # noqa: F401  so do these
from critical_neurons.readers.layers import reshaping as _shapes  # noqa: F401  so do these
from critical_neurons.readers.layers import standard as _layers  # noqa: F401  so do these
from critical_neurons.readers.registry import (
    LEFT_OUT,
    Adds,
    Call,
    Concatenates,
    Ends,
    Filters,
    KeepsChannels,
    Mixes,
    Passes,
    PoolsMaximum,
    Reading,
    Rearranges,
    Rectifies,
    Reshapes,
    Scales,
    TakesMaximum,
    reads,
)
from critical_neurons.readers.trace import (
    check_architecture,
    copy_for_reading,
    read_network,
    trace_model,
)

__all__ = [
    "LEFT_OUT",
    "Adds",
    "Call",
    "Concatenates",
    "Ends",
    "Filters",
    "KeepsChannels",
    "Mixes",
    "Passage",
    "Passes",
    "PoolsMaximum",
    "Reading",
    "Rearranges",
    "Rectifies",
    "Reshapes",
    "Scales",
    "TakesMaximum",
    "are_probabilities",
    "check_architecture",
    "copy_for_reading",
    "isolated",
    "read_network",
    "reads",
    "run_model",
    "take_logarithms",
    "trace_model",
]

"""Reading: nn.Module to Network."""

from critical_neurons.reading import arithmetic as _arithmetic  # noqa: F401  registers built-in readers
from critical_neurons.reading import layers as _layers  # noqa: F401  so do these
from critical_neurons.reading import pools as _pools  # noqa: F401  so do these
from critical_neurons.reading import shapes as _shapes  # noqa: F401  so do these
from critical_neurons.reading.placing import on_cpu
from critical_neurons.reading.registry import (
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
    Rectifies,
    Reshapes,
    Scales,
    reads,
)
from critical_neurons.reading.running import Passage, run_model
from critical_neurons.reading.tracing import (
    check_architecture,
    copy_for_reading,
    fingerprint,
    read_network,
    run_alike,
    trace_model,
    unwrap,
)
from critical_neurons.reading.walking import are_probabilities, take_logarithms

__all__ = [
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
    "Rectifies",
    "Reshapes",
    "Scales",
    "are_probabilities",
    "check_architecture",
    "copy_for_reading",
    "fingerprint",
    "on_cpu",
    "read_network",
    "reads",
    "run_alike",
    "run_model",
    "take_logarithms",
    "trace_model",
    "unwrap",
]

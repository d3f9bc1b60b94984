"""Reading: nn.Module to Network."""

from critical_neurons.reading import layers as _layers  # noqa: F401  registers the built-in readers
from critical_neurons.reading.registry import (
    Call,
    Ends,
    KeepsChannels,
    Mixes,
    Passes,
    Reading,
    Rectifies,
    reads,
)
from critical_neurons.reading.tracing import (
    copy_for_reading,
    fingerprint,
    read_network,
    run_to_logits,
    unwrap,
)

__all__ = [
    "Call",
    "Ends",
    "KeepsChannels",
    "Mixes",
    "Passes",
    "Reading",
    "Rectifies",
    "copy_for_reading",
    "fingerprint",
    "read_network",
    "reads",
    "run_to_logits",
    "unwrap",
]

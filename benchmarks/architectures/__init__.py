"""Architectures: public networks, re-implemented from their publications, untrained, each with example inputs.

Sizes are those of the publication unless the class says otherwise; images for ImageNet networks are smaller,
where the network allows it.
"""

from architectures import (
    classic,
    control,
    dense_prediction,
    detection,
    generative,
    mobile,
    modern,
    other,
    residual,
    signals,
    tabular,
    text,
)
from architectures.registry import BATCH, Architecture, Inputs, call, find_output_layers

_FAMILIES = (
    *(classic, residual, mobile, modern, dense_prediction, generative, detection),
    *(signals, text, control, tabular, other),
)

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for family in _FAMILIES for architecture in family.ARCHITECTURES
}

__all__ = ["ARCHITECTURES", "BATCH", "Architecture", "Inputs", "call", "find_output_layers"]

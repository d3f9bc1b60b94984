"""Published: accuracies on CIFAR-10 that other methods report in their papers or documentation, beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from critical_neurons.core.markdown import format_table


@dataclass(frozen=True)
class Figure:
    """Accuracies in percent, before and after removal and the training named."""

    method: str
    network: str
    kept: str
    training: str
    before: float
    after: float
    source: str = "measured here"


NO_TRAINING = "none"
MODELOPT, FOLDING, MODHIFI = "NVIDIA ModelOpt, documentation", "Wang et al., 2025", "ModHiFi, 2025"
PUBLISHED = (
    Figure("FastNAS", "ResNet-20", "73 % of the multiply-adds", NO_TRAINING, 90.9, 60.4, MODELOPT),
    Figure("FastNAS", "ResNet-20", "73 % of the multiply-adds", "120 epochs with labels", 90.9, 90.3, MODELOPT),
    Figure(
        "Torch-Pruning, L1",
        "ResNet-56",
        "48 % of the multiply-adds",
        "full training with labels",
        93.5,
        92.9,
        "Torch-Pruning, README",
    ),
    Figure("model folding", "ResNet-18", "75 % of the channels", NO_TRAINING, 94.6, 92.2, FOLDING),
    Figure("model folding", "ResNet-18", "55 % of the channels", NO_TRAINING, 94.6, 84.3, FOLDING),
    Figure("model folding", "ResNet-18", "35 % of the channels", NO_TRAINING, 94.6, 56.1, FOLDING),
    Figure("ModHiFi", "ResNet-50", "25 % of the multiply-adds", NO_TRAINING, 95.0, 91.0, MODHIFI),
    Figure("ModHiFi", "VGG-19", "42 % of the multiply-adds", NO_TRAINING, 93.5, 91.8, MODHIFI),
    Figure("Neuron Merging", "VGG-16", "a given width of every layer", NO_TRAINING, 93.7, 93.2, "Kim et al., 2020"),
)
NOTE = """\
Model folding repairs the statistics of batch norms on data; ModHiFi has 2 000 synthetic images.
"""


def list_beside(ours: Sequence[Figure]) -> list[str]:
    """A table of our figures and the published ones, network by network."""
    names = list(dict.fromkeys(each.network for each in (*PUBLISHED, *ours)))
    figures = sorted((*ours, *PUBLISHED), key=lambda each: names.index(each.network))
    rows = [
        [each.network, each.kept, each.method, each.training]
        + [f"{value:.1f}" for value in (each.before, each.after, each.before - each.after)]
        + [each.source]
        for each in figures
    ]
    header = ["network", "kept", "method", "training after removal", "before", "after", "lost", "source"]
    return format_table(header, rows, numbers=(4, 5, 6))

"""Scores drawn at random for the zoo: selecting and adapting need no solver."""

from __future__ import annotations

import numpy as np

from critical_neurons.core.network import Network
from critical_neurons.core.scores import Scores
from critical_neurons.core.solution import Status
from tests.zoo import share_case


def draw_scores(name: str, seed: int = 0, *, levels: int = 0) -> Scores:
    """One score per unit; with `levels` only so many different ones, so that many are equal."""
    network = share_case(name).network
    generator = np.random.default_rng(seed)
    per_unit = generator.random(network.unit_count)
    return make_scores(network, np.floor(per_unit * levels) / levels if levels else per_unit)


def make_scores(network: Network, per_unit: np.ndarray) -> Scores:
    return Scores(
        values_by_layer={layer.name: per_unit[layer.units] for layer in network.scored},
        layers=network.layers,
        groups=network.groups,
        holds=network.holds,
        wirings=network.wirings,
        fingerprint=network.fingerprint,
        status=Status.OPTIMAL,
        objective=0.0,
        bound=0.0,
        gap=0.0,
        seconds=0.0,
        settings={},
        history=(),
        sizes={},
        logit_error=0.0,
    )

"""Decoupled greedy learning: a deep network split into parts that are trained and scored layer-wise."""

from critical_neurons_reproduction.decoupled.head_training import train_heads
from critical_neurons_reproduction.decoupled.part_scoring import join_scores, run_to, score_parts
from critical_neurons_reproduction.decoupled.part_training import train_part, train_parts
from critical_neurons_reproduction.decoupled.parts import Decoupled, DecoupledPart, build_head, decouple

__all__ = [
    "Decoupled",
    "DecoupledPart",
    "build_head",
    "decouple",
    "join_scores",
    "run_to",
    "score_parts",
    "train_heads",
    "train_part",
    "train_parts",
]

"""Decoupled greedy learning: a deep network in parts that are trained and scored one by one."""

from critical_neurons.experiments.decoupled.parts import Decoupled, Part, build_head, decouple
from critical_neurons.experiments.decoupled.scoring import join_scores, run_to, score_parts
from critical_neurons.experiments.decoupled.training import train_part, train_parts

__all__ = [
    "Decoupled",
    "Part",
    "build_head",
    "decouple",
    "join_scores",
    "run_to",
    "score_parts",
    "train_part",
    "train_parts",
]

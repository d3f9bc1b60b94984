"""Structures, scores and plans made up: what only looks at them needs neither a model nor a solver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from critical_neurons.core.answers import Answers
from critical_neurons.core.comparison import Comparison, Latency, Measurement
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores, spread_scores
from critical_neurons.core.solution import Status
from critical_neurons.core.structure import NO_UNIT, Fingerprint, Floats, Layer, Structure, Wiring
from tests.zoo import share_case

OUTPUT = "it gives the network's output"


def make_structure(layers: Sequence[Layer], group_sizes: Sequence[int], wirings: Sequence[Wiring] = ()) -> Structure:
    """Without any costs or slices: nothing that it describes can be removed from a model."""
    return Structure(
        tuple(layers), tuple(group_sizes), (), tuple(wirings), (), (), Fingerprint("architecture", "weights")
    )


def make_output(name: str = "out", size: int = 3) -> Layer:
    return Layer(name, "Linear", np.full(size, NO_UNIT), reason=OUTPUT)


def draw_scores(name: str, seed: int = 0, *, levels: int = 0) -> Scores:
    """Of the zoo, one score per unit; with `levels` only so many different ones, so that many are equal."""
    structure = share_case(name).network.structure
    generator = np.random.default_rng(seed)
    per_unit = generator.random(structure.unit_count)
    return make_scores(structure, np.floor(per_unit * levels) / levels if levels else per_unit)


def make_scores(structure: Structure, per_unit: Floats) -> Scores:
    return Scores(
        values_by_layer=spread_scores(structure, per_unit),
        structure=structure,
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


def draw_plan(structure: Structure, seed: int = 0) -> Plan:
    """Of every group between the least and all of its units, whichever."""
    generator = np.random.default_rng(seed)
    stays = np.ones(structure.unit_count + 1, dtype=bool)
    for group in structure.groups:
        count = group.blocks * generator.integers(group.least // group.blocks, len(group) // group.blocks + 1)
        stays[group.units] = group.choose(generator.random(len(group)), count)
    return Plan(structure, stays, {}, "drawn", {})


def make_comparison(labels: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Comparison:
    """Of networks that name these classes; half of everything is left."""
    whole, half = (
        Measurement(
            float(np.mean(np.equal(named, labels))),
            *(size // part for size in (71_754, 371_456, 16_640, 289_000)),
            latencies=(Latency("torch", 1, 0.004 / part, 0.003 / part, 0.005 / part, 30),),
        )
        for named, part in ((before, 1), (after, 2))
    )
    agreement = float(np.mean(np.equal(before, after)))
    answers = Answers.count(*(np.array(each, dtype=np.int64) for each in (before, after, labels)))
    machine, versions = {"processor": "any", "cores": 2}, {"torch": "2.13.0"}
    return Comparison(
        whole, half, agreement, 0.1, len(labels), "test", "calibration", 1, ("A note.",), machine, versions, answers
    )


def count_by_group(plan: Plan) -> list[int]:
    """How many units of every group stay."""
    return [int(plan.stays[group.units].sum()) for group in plan.structure.groups]

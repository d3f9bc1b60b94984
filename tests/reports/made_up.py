"""Networks to report on that nobody trained: a residual one of any depth, with a layer of an evil name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import LayerChoice, Scores
from critical_neurons.core.search_history import Draft, RemovalCost, SearchHistory, SearchStage
from critical_neurons.core.solution import Step
from critical_neurons.core.structure import Layer, Structure, Wiring
from tests.drawing import make_comparison, make_output, make_scores, make_structure

EVIL = "<script>window.evil = true</script>"


def make_residual(blocks: int, width: int = 8) -> Structure:
    """A stem, blocks of two layers of which the second is added to what the stem gave, and an output."""
    stream = np.arange(width)
    layers, wirings, sizes = [Layer(EVIL, "Conv2d", stream)], [], [width]

    def wire(name: str, inputs, outputs) -> None:
        wirings.append(Wiring(name, inputs, outputs, np.zeros(len(inputs))))

    for block in range(blocks):
        inner = width * (1 + block) + stream
        layers += [Layer(f"{block}.inner", "Conv2d", inner), Layer(f"{block}.outer", "Conv2d", stream)]
        wire(f"{block}.inner", stream, inner)
        wire(f"{block}.outer", inner, stream)
        sizes.append(width)
    output = make_output()
    wire(output.name, stream, output.units)
    return make_structure([*layers, output], sizes, wirings)


def make_results(blocks: int = 2, width: int = 8) -> tuple[Comparison, Plan, Scores]:
    structure = make_residual(blocks, width)
    generator = np.random.default_rng(0)
    per_unit = generator.random(structure.unit_count)
    stays = np.append(per_unit >= 0.4, True)
    for group in structure.groups:
        stays[group.units[0]] = True
    plan = Plan(structure, stays, {}, "drawn <b>at random</b>", {})
    history = (Step(0.0, None, -np.inf, 0, 0), Step(0.1, 3.0, 1.0, 5, 1), Step(0.4, 2.0, 1.9, 9, 2))
    choices = tuple(LayerChoice(group.layers, 2.0, 1.0) for group in structure.groups)
    costs = tuple(RemovalCost(group.layers, width, 3, (0.0, 0.1, 0.2, 2.0)) for group in structure.groups)
    stages = (SearchStage("ordering units", 1.0), SearchStage(EVIL, 3.0))
    search = SearchHistory(stages, (Draft(1.0, 0.5, 0.2), Draft(4.0, 0.4, 0.1)), 1, costs)
    scores = replace(
        make_scores(structure, per_unit),
        history=history,
        layer_choices=choices,
        search_history=search,
        sizes={"columns": 1},
        settings={"method": "drawn", "labels": list(range(40)), "nothing": None},
    )
    labels = np.arange(30) % 3
    after = np.where(np.arange(30) % 5 == 0, (labels + 1) % 3, labels)
    before = np.where(np.arange(30) == 7, (labels + 1) % 3, labels)
    return make_comparison(labels.tolist(), before.tolist(), after.tolist()), plan, scores

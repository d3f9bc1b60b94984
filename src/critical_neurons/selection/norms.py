"""Norms: units scored by the norm of their weights, the usual baseline."""

from __future__ import annotations

import numpy as np
from torch import nn

from critical_neurons.core.scores import Scores, spread_scores
from critical_neurons.core.solution import Status
from critical_neurons.core.structure import Floats, Structure

NO_DATA_NOTE = "norms of weights: no inputs or outputs were used"


def score_norms(model: nn.Module, structure: Structure) -> Scores:
    """Ranks within each group, scaled to (0, 1], so that every layer loses about the same share."""
    return Scores(
        values_by_layer=spread_scores(structure, _rank(structure, _square_norms(model, structure))),
        structure=structure,
        status=Status.FEASIBLE,
        objective=None,
        bound=None,
        gap=None,
        seconds=0.0,
        settings={"method": "norm"},
        history=(),
        sizes={},
        logit_error=0.0,
        notes=(*structure.notes, NO_DATA_NOTE),
    )


def _square_norms(model: nn.Module, structure: Structure) -> Floats:
    """Summed over all weights whose first axis holds the unit, that is, of the layers that compute it."""
    squares = np.zeros(structure.unit_count + 1)
    parameters = dict(model.named_parameters())
    for each in structure.slices:
        weights = parameters.get(each.tensor)
        if weights is not None and weights.ndim > 1 and each.axis == 0 and each.units.ndim == 1:
            np.add.at(squares, each.units, weights.detach().double().flatten(1).square().sum(1).cpu().numpy())
    return squares[:-1]


def _rank(structure: Structure, values: Floats) -> Floats:
    ranks = np.zeros(structure.unit_count)
    for group in structure.groups:
        places = np.argsort(np.argsort(values[group.units], kind="stable"))
        ranks[group.units] = (places + 1) / len(group)
    return ranks

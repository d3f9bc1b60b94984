"""Sampling: a calibration batch with all classes, from a part of a data set."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.removal.metrics import predict
from critical_neurons_reproduction.datasets import LabelledImages


def draw_batch(
    part: LabelledImages, per_class: int = 1, *, seed: int, varying: bool = False, correct_by: nn.Module | None = None
) -> LabelledImages:
    """`per_class` images of every class, ordered by class, drawn without replacement.

    `varying` also draws the number of images of every class, from one to `per_class` (the paper's imbalanced IMIDP).
    With `correct_by` only images that this network classifies correctly are drawn. For one seed, and without
    `varying`, batches are nested: a larger one contains the smaller ones.
    """
    if per_class < 1:
        raise InvalidSettingError(f"per_class: found {per_class}. Accepted: at least one image of every class.")
    if seed < 0:
        raise InvalidSettingError(f"seed: found {seed}. Accepted: zero or above.")
    labels = part.labels.numpy()
    allowed = np.ones(len(part), bool)
    if correct_by is not None:
        allowed = (predict(correct_by, part.inputs) == part.labels).numpy()
    drawn, short = [], []
    for label in np.unique(labels):
        generator = np.random.default_rng((seed, label))
        count = int(generator.integers(1, per_class + 1)) if varying else per_class
        rows = generator.permutation(np.flatnonzero((labels == label) & allowed))
        drawn.append(rows[:count])
        if len(rows) < count:
            short.append(f"class {label} has {len(rows)}")
    if short:
        which = "images" if correct_by is None else "correctly classified images"
        raise InvalidInputError(
            f"per_class: {per_class} {which} of every class requested, but {', '.join(short[:6])}. Ask for fewer"
            f"{'' if correct_by is None else ', or drop correct_by'}."
        )
    return part.select(torch.from_numpy(np.concatenate(drawn)))

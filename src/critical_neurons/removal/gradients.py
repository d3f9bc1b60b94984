"""Gradients: of models that change in place what their gradient needs, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

CHANGED_IN_PLACE = "modified by an inplace operation"


def differentiate(run: Callable[[], Result]) -> Result:
    """What `run` gives, which does a forward and a backward pass.

    A ReLU in place behind another ReLU is fine in evaluation but has no gradient in torch. Then it runs once more,
    with copies of what is changed: slower, so only where it is needed.
    """
    try:
        return run()
    except RuntimeError as error:
        if CHANGED_IN_PLACE not in str(error):
            raise
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return run()

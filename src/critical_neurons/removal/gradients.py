"""Gradients: also of models that overwrite tensors which the backward pass needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

CHANGED_IN_PLACE = "modified by an inplace operation"


def differentiate(run: Callable[[], Result]) -> Result:
    """Call `run`, which does a forward and a backward pass, and return its result.

    An in-place ReLU behind another ReLU works in evaluation, but its backward pass fails in torch. Then `run` is
    called again, with copies of the tensors that are overwritten. That is slower, so it is done only where needed.
    """
    try:
        return run()
    except RuntimeError as error:
        if CHANGED_IN_PLACE not in str(error):
            raise
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return run()

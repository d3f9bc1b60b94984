"""The public `load`: the network that `save` wrote, built again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import nn

from critical_neurons.core.batch import CALIBRATED_ON
from critical_neurons.core.plan import Plan
from critical_neurons.errors import InvalidFileError, PlanMismatchError
from critical_neurons.io.checkpoint import (
    MODEL,
    PLAN,
    PROVENANCE,
    Provenance,
    fill_tensors,
    give_biases,
    make_model,
    make_smaller,
    read_part,
    share_tensors,
)
from critical_neurons.readers import isolated
from critical_neurons.structure import fingerprint


@isolated
def load(folder: str | os.PathLike[str], factory: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """The network that `save` wrote, on the CPU in evaluation mode.

    `factory` returns the original architecture, with any weights; or give such a model, which stays as it is.

    >>> cn.save(smaller, "saved", plan=plan)
    >>> cn.load("saved", make_model)[0].out_channels
    2
    """
    directory = Path(folder)
    provenance = Provenance.load_from(directory)
    content = read_part(directory / MODEL, provenance)
    read_part(directory / PLAN, provenance)
    plan = Plan.load(directory / PLAN)
    model = make_model(factory)
    if fingerprint(model).architecture != plan.architecture:
        raise PlanMismatchError(
            f"{folder}: the factory makes another network than the one that was made smaller: names or shapes of "
            "its parameters differ. Give the factory of the original."
        )
    try:
        tensors = safetensors.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidFileError(f"{directory / MODEL}: cannot be read as safetensors ({error}).") from error
    smaller = make_smaller(directory / PLAN, model, plan)
    give_biases(smaller, tensors.keys())
    fill_tensors(directory / MODEL, smaller, tensors)
    for names in provenance.shared:
        share_tensors(directory / PROVENANCE, smaller, names)
    setattr(smaller, CALIBRATED_ON, frozenset(provenance.calibrated_on))
    return smaller.eval()

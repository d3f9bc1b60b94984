"""The public `save`: a smaller network, its plan and its provenance into a folder."""

from __future__ import annotations

import hashlib
import json
import os

from safetensors import torch as safetensors
from torch import Tensor, nn

from critical_neurons.core.batch import CALIBRATED_ON
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.files import write_folder
from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.errors import InvalidInputError
from critical_neurons.io.checkpoint import (
    FORMAT,
    FORMAT_VERSION,
    MODEL,
    PLAN,
    PROVENANCE,
    check_unit_counts,
    digest_content,
    find_shared,
)
from critical_neurons.readers import on_cpu
from critical_neurons.structure import unwrap


@on_cpu
def save(smaller: nn.Module, folder: str | os.PathLike[str], *, plan: Plan, overwrite: bool = False) -> None:
    """Write the smaller network, the plan it was made by and where both come from into a new folder, whole or not at
    all. `overwrite` replaces a folder written before."""
    check_plan(plan)
    model = unwrap(smaller)
    check_unit_counts(model, plan)
    state = model.state_dict(keep_vars=True)
    odd = [name for name, values in state.items() if not isinstance(values, Tensor)]
    if odd:
        raise InvalidInputError(f"{odd[0]}: the model keeps state that is no tensor, which safetensors cannot hold.")
    content = {
        MODEL: safetensors.save({name: values.detach().cpu().contiguous().clone() for name, values in state.items()}),
        PLAN: json.dumps(plan.to_dict(), indent=1).encode(),
    }
    provenance = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "versions": describe_versions("torch", "safetensors"),
        "source": {"architecture": plan.architecture, "weights": plan.provenance.get("weights")},
        "rule": plan.rule,
        "scores": dict(plan.provenance),
        "shared": find_shared(state),
        CALIBRATED_ON: sorted(getattr(model, CALIBRATED_ON, plan.seen)),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
    }
    content[PROVENANCE] = json.dumps({**provenance, "digest": digest_content(provenance)}, indent=1).encode()
    write_folder(folder, content, overwrite=overwrite)

"""The public `save`: a smaller network, its plan and its provenance into a folder."""

from __future__ import annotations

import hashlib
import os

from safetensors import torch as safetensors
from torch import Tensor, nn

from critical_neurons.core.batch import CALIBRATED_ON
from critical_neurons.core.comparison import Comparison
from critical_neurons.core.documents import encode_document
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.files import write_folder
from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.core.scores import Scores
from critical_neurons.errors import InvalidInputError
from critical_neurons.io.checkpoint import (
    CARD,
    COMPARISON,
    MODEL,
    PLAN,
    PROVENANCE,
    SCORES,
    WRITTEN,
    Provenance,
    check_unit_counts,
    find_shared,
)
from critical_neurons.io.model_card import write_card
from critical_neurons.readers import isolated
from critical_neurons.structure import unwrap


@isolated
def save(
    smaller: nn.Module,
    folder: str | os.PathLike[str],
    *,
    plan: Plan,
    scores: Scores | None = None,
    comparison: Comparison | None = None,
    call: str = "",
    base_model: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the smaller network, its plan and its provenance into a new folder, atomically. `overwrite` replaces a
    folder written before.

    With `scores`, `comparison` and the `call` that made them, a report can be made from the folder. It also gets a
    model card, README.md, so that it can be pushed to the Hugging Face hub: with the measurements of `comparison`,
    and `base_model` as the hub's name of the original.

    >>> cn.save(smaller, "out", plan=plan, base_model="my-name/my-model")
    >>> from pathlib import Path
    >>> sorted(path.name for path in Path("out").iterdir())
    ['README.md', 'model.safetensors', 'plan.json', 'provenance.json']
    """
    check_plan(plan)
    model = unwrap(smaller)
    check_unit_counts(model, plan)
    state = model.state_dict(keep_vars=True)
    odd = [name for name, values in state.items() if not isinstance(values, Tensor)]
    if odd:
        raise InvalidInputError(f"{odd[0]}: the model keeps state that is no tensor, which safetensors cannot hold.")
    content = {
        MODEL: safetensors.save({name: values.detach().cpu().contiguous().clone() for name, values in state.items()}),
        PLAN: encode_document(plan.to_dict()),
    }
    card = write_card(model, plan, comparison=comparison, base_model=base_model, weight_bytes=len(content[MODEL]))
    for name, given in ((SCORES, scores), (COMPARISON, comparison)):
        if given is not None:
            content[name] = encode_document(given.to_dict())
    provenance = Provenance(
        versions=describe_versions("torch", "safetensors"),
        source={"architecture": plan.architecture, "weights": plan.structure.fingerprint.weights},
        rule=plan.rule,
        scores=plan.provenance,
        shared=find_shared(state),
        calibrated_on=tuple(sorted(getattr(model, CALIBRATED_ON, plan.seen))),
        sha256={name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
        call=call,
    )
    content |= {PROVENANCE: encode_document(provenance.to_dict()), CARD: card.encode()}
    write_folder(folder, content, overwrite=overwrite, known=WRITTEN)

"""Checkpoints: the folder of a smaller network, with its plan and its provenance."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.documents import Document, from_plain, read_file
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import SIZE, Slice
from critical_neurons.errors import (
    InvalidFileError,
    InvalidInputError,
    InvalidSettingError,
    PlanMismatchError,
    first_line,
)
from critical_neurons.removal.remove import remove_units
from critical_neurons.structure import unwrap

MODEL, PLAN, PROVENANCE = "model.safetensors", "plan.json", "provenance.json"
SCORES, COMPARISON = "scores.json", "comparison.json"

CARD = "README.md"
"""For people and for the Hugging Face hub; `load` ignores it."""

FILES = (MODEL, PLAN, PROVENANCE)
"""The files that `load` reads."""

WRITTEN = (*FILES, CARD, SCORES, COMPARISON)
"""The files that `save` writes, the last two if given."""

LARGEST_MODEL = 2**36
"""Largest file of weights that is read, in bytes."""

LISTED = 4
"""Most problems listed in a message."""


def check_unit_counts(model: nn.Module, plan: Plan) -> None:
    """Raise unless the model has the sizes that the plan leaves."""
    for each in plan.structure.slices:
        found = _measure(model, each)
        kept = plan.stays[np.atleast_2d(each.units)[0]].sum()  # all blocks keep equally many
        if found != kept:
            raise PlanMismatchError(
                f"{each.tensor}: the plan keeps {kept} of its {each.units.shape[-1]} channels, the model has "
                f"{'no such' if found is None else found}. Give the plan that the model was pruned by."
            )


def make_smaller(path: Path, model: nn.Module, plan: Plan) -> nn.Module:
    """The model in the sizes that the plan leaves, with any values. Raise unless the plan fits the model."""
    for each in plan.structure.slices:
        found = _measure(model, each)
        blocks = len(each.units) if each.units.ndim == 2 else 1
        if found != each.units.shape[-1] or (blocks > 1 and len(_find(model, each.tensor)) % blocks):
            raise InvalidFileError(f"{path}: it slices {each.tensor} in another way than this network allows.")
    try:
        return remove_units(model, plan.structure, plan.stays)
    except (RuntimeError, ValueError, IndexError, AttributeError, TypeError) as error:
        raise InvalidFileError(f"{path}: does not fit this network ({first_line(error)}).") from error


def _measure(model: nn.Module, each: Slice) -> int | None:
    """The size of what is sliced; None if there is nothing of that name."""
    values = _find(model, each.tensor)
    if each.axis == SIZE:
        return values if type(values) is int else None
    return values.shape[each.axis] if isinstance(values, Tensor) and 0 <= each.axis < values.ndim else None


def _find(model: nn.Module, name: str) -> Any:
    """A parameter, a buffer or a plain attribute of a module."""
    owner, _, key = name.rpartition(".")
    module = dict(model.named_modules(remove_duplicate=False)).get(owner)
    if module is None:
        return None
    return next((held[key] for held in (module._parameters, module._buffers, vars(module)) if key in held), None)


def give_biases(model: nn.Module, names: Collection[str]) -> None:
    """Add the biases that refitting gave to layers without one."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or module.bias is not None:
            continue
        if (f"{name}.bias" if name else "bias") in names:
            size = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            weight = module.weight
            module.bias = nn.Parameter(weight.detach().new_empty(size), requires_grad=weight.requires_grad)


def fill_tensors(path: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Names and shapes must agree exactly; floating-point types are those of the file."""
    types = {values.dtype for values in tensors.values() if values.is_floating_point()}
    if len(types) == 1:
        model.to(types.pop())  # including buffers that are not in the file
    expected = {name: values for name, values in model.state_dict().items() if isinstance(values, Tensor)}
    complaints = [f"{name} is missing" for name in expected if name not in tensors]
    complaints += [f"{name} is unexpected" for name in tensors if name not in expected]
    complaints += [
        f"{name} is {found.dtype} {tuple(found.shape)} in place of {values.dtype} {tuple(values.shape)}"
        for name, values in expected.items()
        if (found := tensors.get(name)) is not None and not _fits(found, values)
    ]
    complaints += [
        f"{name} is not finite"
        for name, _ in model.named_parameters()
        if name in tensors and not bool(tensors[name].isfinite().all())
    ]
    if complaints:
        more = f" and {len(complaints) - LISTED} more" if len(complaints) > LISTED else ""
        raise InvalidFileError(f"{path}: does not fit the network: {'; '.join(complaints[:LISTED])}{more}.")
    model.load_state_dict({name: values.clone() for name, values in tensors.items()}, assign=True)


def _fits(found: Tensor, values: Tensor) -> bool:
    same_kind = found.dtype == values.dtype or (found.is_floating_point() and values.is_floating_point())
    return found.shape == values.shape and same_kind


def find_shared(state: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """The names of every tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, values in state.items():
        names.setdefault(id(values), []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def share_tensors(path: Path, model: nn.Module, names: tuple[str, ...]) -> None:
    state = model.state_dict(keep_vars=True)
    if any(name not in state or state[name].shape != state[names[0]].shape for name in names):
        raise InvalidFileError(f"{path}: {', '.join(names)} cannot be one tensor of this network.")
    for name in names[1:]:
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, state[names[0]])


def make_model(factory: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    if isinstance(factory, nn.Module):
        made: object = copy.deepcopy(unwrap(factory))
    else:
        try:
            made = factory() if callable(factory) else factory
        except Exception as error:
            raise InvalidSettingError(f"factory: raised {type(error).__name__}: {error}.") from error
    if not isinstance(made, nn.Module):
        raise InvalidSettingError(
            f"factory: found {type(made).__name__}. Accepted: a torch.nn.Module of the original architecture, or a "
            "function without arguments that returns one."
        )
    model = unwrap(made).to("cpu")
    lazy = [name for name, values in model.state_dict(keep_vars=True).items() if nn.parameter.is_lazy(values)]
    if lazy:
        raise InvalidInputError(f"{lazy[0]}: not initialised yet. Run the model once on an input first.")
    return model


@dataclass(frozen=True)
class Provenance(Document):
    """The provenance of a smaller network: its source model and rule, versions, and digests of all files. `shared`:
    the names of every tensor that has several."""

    FORMAT: ClassVar = "critical_neurons model"
    FORMAT_VERSION: ClassVar = 2

    versions: Mapping[str, str]
    source: Mapping[str, str | None]
    rule: str
    scores: Mapping[str, Any]
    shared: tuple[tuple[str, ...], ...]
    calibrated_on: tuple[str, ...]
    sha256: Mapping[str, str]
    call: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """The inverse of `to_dict`; raises ValueError if it lists files with unknown names."""
        found = from_plain(cls, data)
        if not found.sha256.keys() <= set(WRITTEN):
            raise ValueError("a file of no known name")
        return found

    @classmethod
    def load_from(cls, folder: Path) -> Provenance:
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise InvalidFileError(
                f"{folder}: no {' and no '.join(missing)} there. Accepted: a folder that cn.save wrote, with "
                f"{', '.join(FILES)}."
            )
        return cls.load(folder / PROVENANCE)


def read_part(path: Path, provenance: Provenance) -> bytes:
    content = read_file(path, LARGEST_MODEL)
    if hashlib.sha256(content).hexdigest() != provenance.sha256.get(path.name):
        raise InvalidFileError(
            f"{path}: damaged, or changed after it was saved (its SHA-256 is not the one in {PROVENANCE}). Copy the "
            "folder again, or save the network anew."
        )
    return content


@dataclass(frozen=True)
class Results:
    """What a folder holds besides the network. `files` are digests of all its files."""

    plan: Plan
    scores: Scores | None
    comparison: Comparison | None
    call: str
    files: Mapping[str, str]


def read_results(folder: Path) -> Results:
    """Read a folder; raises if a file was changed after it was saved."""
    provenance = Provenance.load_from(folder)
    saved = provenance.sha256
    for name in saved:
        read_part(folder / name, provenance)
    return Results(
        Plan.load(folder / PLAN),
        Scores.load(folder / SCORES) if SCORES in saved else None,
        Comparison.load(folder / COMPARISON) if COMPARISON in saved else None,
        provenance.call,
        saved,
    )

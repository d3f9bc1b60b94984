"""Checkpoints: the folder of a smaller network, with its plan and its provenance."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from critical_neurons.core.plan import Plan
from critical_neurons.errors import InvalidFileError, InvalidInputError, InvalidSettingError, PlanMismatchError
from critical_neurons.readers import unwrap

FORMAT = "critical_neurons model"


FORMAT_VERSION = 1


MODEL, PLAN, PROVENANCE = "model.safetensors", "plan.json", "provenance.json"


FILES = (MODEL, PLAN, PROVENANCE)


LISTED = 4
"""Complaints shown in a message before the rest is counted."""


def check_unit_counts(model: nn.Module, plan: Plan) -> None:
    modules = dict(model.named_modules())
    for layer in plan.layers:
        weight = getattr(modules.get(layer.name), "weight", None)
        found = len(weight) if isinstance(weight, Tensor) else "no"
        if found != len(layer.kept):
            raise PlanMismatchError(
                f"{layer.name}: the plan keeps {len(layer.kept)} units of it, the model has {found}. Give the plan "
                "that the model was pruned by."
            )


def list_sizes(module: nn.Module) -> dict[str, int]:
    """What removal changes of a module besides its tensors."""
    match module:
        case nn.Linear():
            names = ["in_features", "out_features"]
        case nn.Conv1d() | nn.Conv2d():
            names = ["in_channels", "out_channels", "groups"]
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            names = ["num_features"]
        case _:
            names = []
    return {name: getattr(module, name) for name in names}


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    match module:
        case nn.Linear():
            return {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
        case nn.Conv1d() | nn.Conv2d():
            per_group = module.in_channels // module.groups
            return {"weight": (module.out_channels, per_group, *module.kernel_size), "bias": (module.out_channels,)}
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (module.num_features,))
        case _:
            return {}


def resize_module(name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
    """Give the module the sizes that were saved, and tensors to be filled. A size can only fall."""
    old = list_sizes(module)
    groups = sizes.get("groups", 1)
    if (
        sizes.keys() != old.keys()
        or any(not 1 <= sizes[key] <= old[key] for key in old)
        or any(sizes[key] % groups for key in sizes if key != "groups")
    ):
        raise InvalidFileError(
            f"{PROVENANCE}: {name} cannot have the sizes {dict(sizes)}; in the original it has {old}."
        )
    for key, size in sizes.items():
        setattr(module, key, size)
    for key, shape in _shapes(module).items():
        values = module._parameters.get(key, module._buffers.get(key))
        if values is not None and values.shape != shape:
            empty = values.detach().new_empty(shape)
            is_parameter = isinstance(values, nn.Parameter)
            setattr(module, key, nn.Parameter(empty, requires_grad=values.requires_grad) if is_parameter else empty)


def give_bias(module: nn.Module) -> None:
    """Removal gives a layer a bias where the removed units leave a constant behind."""
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and module.bias is None:
        weight = module.weight
        module.bias = nn.Parameter(weight.detach().new_empty(len(weight)), requires_grad=weight.requires_grad)


def fill_tensors(path: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Names and shapes must agree exactly; the floating-point type is that of the file."""
    types = {values.dtype for values in tensors.values() if values.is_floating_point()}
    if len(types) == 1:
        model.to(types.pop())
    expected = {name: values for name, values in model.state_dict().items() if isinstance(values, Tensor)}
    complaints = [f"{name} is missing" for name in expected if name not in tensors]
    complaints += [f"{name} is unexpected" for name in tensors if name not in expected]
    complaints += [
        f"{name} is {found.dtype} {tuple(found.shape)} in place of {values.dtype} {tuple(values.shape)}"
        for name, values in expected.items()
        if (found := tensors.get(name)) is not None and (found.shape, found.dtype) != (values.shape, values.dtype)
    ]
    if complaints:
        more = f" and {len(complaints) - LISTED} more" if len(complaints) > LISTED else ""
        raise InvalidFileError(f"{path}: does not fit the network: {'; '.join(complaints[:LISTED])}{more}.")
    model.load_state_dict({name: values.clone() for name, values in tensors.items()}, assign=True)


def find_shared(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of every tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, values in state.items():
        names.setdefault(id(values), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def share_tensors(path: Path, model: nn.Module, names: list[str]) -> None:
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


def read_part(path: Path, provenance: Mapping[str, Any]) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if hashlib.sha256(content).hexdigest() != provenance["sha256"][path.name]:
        raise InvalidFileError(
            f"{path}: damaged, or changed after it was saved (its SHA-256 is not the one in {PROVENANCE}). Copy the "
            "folder again, or save the network anew."
        )
    return content


def check_provenance(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if data["digest"] != digest_content({name: value for name, value in data.items() if name != "digest"}):
        raise ValueError("the digest of its content is another")
    numbers = [size for sizes in data["sizes"].values() for size in sizes.values()]
    if not all(type(number) is int for number in numbers):
        raise ValueError("a size that is no whole number")
    if not all(isinstance(name, str) for names in data["shared"] for name in (*names, data["sha256"][MODEL])):
        raise ValueError("a name that is no text")
    return data


def digest_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

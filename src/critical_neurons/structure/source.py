"""Source: the given model, unwrapped, checked, copied and fingerprinted."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Fingerprint
from critical_neurons.errors import InvalidInputError, UnreadableModelError, first_line
from critical_neurons.removal.copies import copy_whole


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_model(model: nn.Module) -> None:
    """Raise if the model cannot be copied, sliced or run."""
    if not isinstance(model, nn.Module):
        raise UnreadableModelError(f"model: found {type(model).__name__}, expected a torch.nn.Module.")
    for name, module in model.named_modules():
        where = name or "model"
        if isinstance(module, torch.jit.ScriptModule):
            raise UnreadableModelError(
                f"{where}: a TorchScript module cannot be read. Give the nn.Module it was made from."
            )
        if isinstance(module, torch.fx.GraphModule) and "eval" in vars(module):  # torch.export puts one there
            raise UnreadableModelError(
                f"{where}: a program of torch.export has its sizes written into it. Give the nn.Module it was made "
                "from."
            )
        if ".quantized." in type(module).__module__:
            raise UnreadableModelError(
                f"{where}: a quantised module cannot be read. Give the model as it was before, and quantise the "
                "smaller one."
            )
        forward = None if hasattr(module, "_orig_mod") else vars(module).get("forward")
        if hasattr(forward, "_torchdynamo_orig_callable"):  # a copy would run with the weights of the original
            raise UnreadableModelError(
                f"{where}: its forward was replaced by a compiled one. Compile the module instead, as in "
                "torch.compile(model), or give it as it was before."
            )
    buffers = dict(model.named_buffers())
    for name, values in [*model.named_parameters(), *buffers.items()]:
        if isinstance(values, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise UnreadableModelError(f"{name}: not initialised yet. Run the model once on an input first.")
        if values.is_meta:
            raise UnreadableModelError(f"{name}: on the meta device, without values. Load the weights first.")
        if values.is_complex() or values.is_quantized:
            raise UnreadableModelError(f"{name}: {values.dtype} weights are not read; floating-point ones are.")
        if values.is_floating_point() and not _is_finite(values, name in buffers):
            raise InvalidInputError(f"{name}: the model has NaN or infinite weights.")


def _is_finite(values: Tensor, buffer: bool) -> bool:
    """Whether there is no NaN, and in parameters no infinity; a buffer may be infinite, as attention masks."""
    if buffer:
        return not bool(values.isnan().any())
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())  # the first is many times faster


def copy_model(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode."""
    try:
        return copy_whole(model).eval()
    except (RuntimeError, TypeError) as error:
        raise UnreadableModelError(
            f"{type(model).__name__}: it cannot be copied ({first_line(error)}). Does it keep open files, locks or "
            "generators as attributes? Take them off first."
        ) from error


def fingerprint(model: nn.Module) -> Fingerprint:
    architecture, weights = hashlib.sha256(), hashlib.sha256()
    for name, values in model.state_dict().items():
        if isinstance(values, Tensor):
            architecture.update(f"{name} {tuple(values.shape)};".encode())
            weights.update(f"{name} {values.dtype};".encode())
            weights.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Fingerprint(architecture.hexdigest()[:16], weights.hexdigest()[:16])

"""Masked reference: does a network pruned by Torch-Pruning compute what it did with those channels masked?"""

from __future__ import annotations

import copy

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map_only

from architectures import Inputs, call

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Between outputs of the pruned and the masked network, relative to the largest output."""

MIXING = (nn.LayerNorm, nn.GroupNorm, nn.MultiheadAttention, nn.LSTM)
"""Layers whose other units change when one goes: there the masked network is no reference."""


def prune_beside_masked(pruner: tp.pruner.BasePruner, model: nn.Module) -> tuple[nn.Module, bool]:
    """One step of the pruner, and the model as it was with zeros where layers read what the pruner removed.

    False where a removed channel passes a layer that mixes it with others.
    """
    masked = copy.deepcopy(model)
    originals = dict(zip(model.modules(), masked.modules(), strict=True))
    present: dict[nn.Module, list[int]] = {}
    decided = True
    for group in pruner.step(interactive=True):
        for dependency, indices in group:
            module = dependency.target.module
            decided &= not isinstance(module, MIXING)
            if reads_all(module) and pruner.DG.is_in_channel_pruning_fn(dependency.handler):
                original = originals[module]
                count = original.in_features if isinstance(original, nn.Linear) else original.in_channels
                left = present.setdefault(module, list(range(count)))
                if max(indices) >= len(left):  # the pruner's own error follows, and is to be seen
                    decided = False
                    continue
                silence(original, [left[index] for index in indices])
                present[module] = [left[index] for index in range(len(left)) if index not in set(indices)]
        group.prune()
    return masked, decided


def reads_all(module: object) -> bool:
    """Whether it has weights for its input channels; a depthwise convolution passes channels on."""
    if isinstance(module, _ConvNd):
        return module.groups == 1 or module.groups != module.out_channels
    return isinstance(module, nn.Linear)


@torch.no_grad()
def silence(layer: nn.Module, inputs: list[int]) -> None:
    """Zeros for the weights that read these input channels."""
    if getattr(layer, "transposed", False):
        layer.weight[inputs] = 0
        return
    readers = layer.weight.shape[0] // getattr(layer, "groups", 1)
    for channel in inputs:
        group, at = divmod(channel, layer.weight.shape[1])
        layer.weight[group * readers : (group + 1) * readers, at] = 0


@torch.no_grad()
def compute_the_same(first: nn.Module, second: nn.Module, inputs: Inputs) -> bool | None:
    """In double precision, as outputs of untrained networks hardly depend on early layers; None where one does not
    run, in single precision neither."""
    for dtype, tolerance in TOLERANCES.items():
        cast = tree_map_only(Tensor, lambda x, to=dtype: x.to(to) if x.is_floating_point() else x, inputs)
        try:
            found = [tree_leaves(call(model.to(dtype), cast)) for model in (first, second)]
        except Exception:
            continue
        finally:
            first.float()
        return all(
            one.shape == other.shape and bool((one - other).abs().max() <= tolerance * other.abs().max())
            for one, other in zip(*found, strict=True)
        )
    return None

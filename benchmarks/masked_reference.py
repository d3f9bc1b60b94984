"""Masked reference: does a network pruned by Torch-Pruning equal the original with these channels masked?"""

from __future__ import annotations

import copy

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map_only

from architectures import Inputs, call

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of outputs between pruned and masked network, relative to the largest output."""

MIXING = (nn.LayerNorm, nn.GroupNorm, nn.MultiheadAttention, nn.LSTM)
"""Layers where removing a unit changes the others: for these, masking is no valid reference."""


def prune_beside_masked(pruner: tp.pruner.BasePruner, model: nn.Module) -> tuple[nn.Module, bool]:
    """Run one step of the pruner. Returns the original model with the removed channels masked at their consumers, and
    whether that is a valid reference: not if a removed channel passes through a layer of `MIXING`.
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
                if max(indices) >= len(left):  # let the pruner raise its own error
                    decided = False
                    continue
                silence(original, [left[index] for index in indices])
                present[module] = [left[index] for index in range(len(left)) if index not in set(indices)]
        group.prune()
    return masked, decided


def reads_all(module: object) -> bool:
    """Whether the module mixes its input channels; a depthwise convolution does not."""
    if isinstance(module, _ConvNd):
        return module.groups == 1 or module.groups != module.out_channels
    return isinstance(module, nn.Linear)


@torch.no_grad()
def silence(layer: nn.Module, inputs: list[int]) -> None:
    """Set the weights of these input channels to zero."""
    if getattr(layer, "transposed", False):
        layer.weight[inputs] = 0
        return
    readers = layer.weight.shape[0] // getattr(layer, "groups", 1)
    for channel in inputs:
        group, at = divmod(channel, layer.weight.shape[1])
        layer.weight[group * readers : (group + 1) * readers, at] = 0


@torch.no_grad()
def compute_the_same(first: nn.Module, second: nn.Module, inputs: Inputs) -> bool | None:
    """Compared in double precision, as outputs of untrained networks hardly depend on early layers; if that fails, in
    single precision; None if neither runs."""
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

"""Interop: masks for torch.nn.utils.prune from plans, and an importance for Torch-Pruning from scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import NO_UNIT, Bools, Floats, Group, Layer
from critical_neurons.errors import InvalidSettingError, MissingExtraError, PlanMismatchError, PruningError
from critical_neurons.readers import check_architecture, isolated
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.remove import zero_units
from critical_neurons.structure import unwrap

STEP = 2.0**-40
"""Difference between the importances of units with equal scores: above rounding in float64, below any relevant
difference of scores."""

STAYS = 2.0
"""Added to the importance of units that a group must keep: larger than any score."""

ROUNDING = 1e-9
"""Subtracted before a share of a count is rounded up, so that 0.1 of 10 units is 1."""

INSTEAD = "Use cn.mask or cn.prune instead."


@isolated
def as_masks(plan: Plan, model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Masks for `torch.nn.utils.prune`, by the names of module and parameter: 0 for removed units, 1 for the others.

    The masked model has the outputs of `cn.mask`: everything that belongs to a removed unit is masked, in the layers
    that compute it, in norms, and in the layers that read it. If a removed unit leaves a constant, which `cn.mask`
    adds to a bias, masks cannot express that, and an error is raised.

    >>> from torch.nn.utils import prune
    >>> masked = make_model()
    >>> for (module, parameter), mask in plan.as_masks(masked).items():
    ...     _ = prune.custom_from_mask(masked.get_submodule(module), parameter, mask)
    >>> masked[0].weight.abs().sum(dim=(1, 2, 3)).count_nonzero()
    tensor(2)
    """
    source = unwrap(model)
    check_architecture(source, plan.architecture, "the plan was")
    for wiring in plan.structure.wirings:
        if (wiring.constants[~plan.stays[wiring.inputs]] != 0).any():
            raise PruningError(
                f"{wiring.module}: it reads removed units that leave a constant, which no mask of parameters adds to "
                f"its bias. {INSTEAD}"
            )
    masked = dict(zero_units(ones_like(source), plan.structure, plan.stays).named_parameters())
    whole = dict(source.named_parameters())
    return {
        (name.rpartition(".")[0], name.rpartition(".")[2]): mask.detach().to(whole[name].device)
        for name, mask in masked.items()
        if not mask.all()
    }


def ones_like(model: nn.Module) -> nn.Module:
    """A copy with ones in place of all parameters."""
    ones = copy_whole(model)
    with torch.no_grad():
        for values in ones.parameters():
            values.fill_(1)
    return ones


@isolated
def as_torch_pruning(
    scores: Scores, model: nn.Module | None = None, *, max_pruning_ratio: float = 1.0
) -> TorchPruningImportance | LateImportance:
    """An importance for the pruners of Torch-Pruning, and the layers they must ignore.

    `model` is the one that the pruner changes. Without it the importance uses the pruner's model when it is first
    called, and has no `ignored_layers` and `ratios`. Torch-Pruning knows shares, not thresholds: for a threshold or
    any other plan, give it `pruning_ratio=0.0` and `pruning_ratio_dict=importance.ratios(plan)`.

    Every group keeps at least one unit, and at least what `max_pruning_ratio` leaves, which Torch-Pruning does not
    ensure when ranking over all layers in one step; a share that leaves fewer makes it skip whole groups. Some things
    differ from `cn.prune`: constants that removed units leave behind a batch norm or an addition are dropped rather
    than added to a bias; grouped convolutions lose the same channels of every block, those with the lowest mean
    score; several steps over all layers stop early once a layer has one channel.

    >>> import torch_pruning
    >>> scores = cn.score(model, inputs[:3], labels[:3], formulation="linearised")
    >>> pruned = make_model()
    >>> importance = scores.as_torch_pruning(pruned)
    >>> pruner = torch_pruning.pruner.BasePruner(
    ...     pruned, inputs, importance, ignored_layers=importance.ignored_layers, pruning_ratio=0.5
    ... )
    >>> pruner.step()
    >>> pruned[0].out_channels
    2
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise MissingExtraError("torch-pruning", "torch-pruning") from error
    if (
        isinstance(max_pruning_ratio, bool)
        or not isinstance(max_pruning_ratio, Real)
        or not 0 < max_pruning_ratio <= 1
    ):
        raise InvalidSettingError(
            f"as_torch_pruning: max_pruning_ratio={max_pruning_ratio!r}. Accepted: a share above 0 and up to 1."
        )
    if model is None:
        return LateImportance(scores, max_pruning_ratio)
    source = unwrap(model)
    check_architecture(source, scores.fingerprint.architecture, "the scores were")
    modules = dict(source.named_modules())
    return TorchPruningImportance(
        source,
        {source.get_submodule(layer.name): layer for layer in scores.layers if layer.name in modules},
        _reasons(scores),
        _rank(scores, max_pruning_ratio),
        (
            torch_pruning.prune_conv_out_channels,
            torch_pruning.prune_depthwise_conv_out_channels,
            torch_pruning.prune_linear_out_channels,
        ),
        scores.fingerprint.architecture,
    )


class LateImportance:
    """An importance that gets its model from the first group it is called with."""

    def __init__(self, scores: Scores, max_pruning_ratio: float) -> None:
        self._scores, self._max_pruning_ratio = scores, max_pruning_ratio
        self._importance: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("ignored", "ignored_layers", "ratios"):
            raise InvalidSettingError(f"{name}: only known of a model. Use scores.as_torch_pruning(model).")
        raise AttributeError(name)

    def __call__(self, group: Any) -> Tensor | None:
        if self._importance is None:
            model = group._DG.model  # a group has no public way to its graph
            self._importance = as_torch_pruning(self._scores, model, max_pruning_ratio=self._max_pruning_ratio)
        found: Tensor | None = self._importance(group)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class TorchPruningImportance:
    """Called with a group of Torch-Pruning: one number per channel of its root, or None if it must stay whole.

    No two units have the same number, so that ranking removes exactly as many as requested; of equal scores the unit
    with the smaller index stays. `ignored` has the reasons for the `ignored_layers`. Further steps of the same pruner
    are tracked through its history.
    """

    model: nn.Module
    layers: Mapping[nn.Module, Layer]
    ignored: Mapping[str, str]
    values: Floats
    outputs: tuple[Any, ...]
    architecture: str

    @property
    def blocks(self) -> dict[str, int]:
        return {layer.name: layer.blocks for layer in self.layers.values()}

    @property
    def ignored_layers(self) -> list[nn.Module]:
        modules = dict(self.model.named_modules())
        return [modules[name] for name in self.ignored if name in modules]

    def ratios(self, plan: Plan) -> dict[nn.Module, float]:
        """For `pruning_ratio_dict`: the share that every layer must lose to keep as many channels as in the plan.

        The channels with the highest scores are kept, whichever the plan keeps.
        """
        if plan.architecture != self.architecture:
            raise PlanMismatchError("the plan was made for another network than the scores of this importance.")
        ratios = {}
        for layer in plan.layers:
            if len(layer.removed) == 0:
                continue
            if layer.name in self.ignored:
                raise PlanMismatchError(
                    f"{layer.name}: the plan removes units of it, but {self.ignored[layer.name]}. Plan with keep=."
                )
            # Torch-Pruning rounds the number of remaining channels down: half a channel more makes that harmless
            ratios[self.model.get_submodule(layer.name)] = (
                len(layer.removed) - self.blocks[layer.name] / 2
            ) / layer.total
        return ratios

    def __call__(self, group: Any) -> Tensor | None:
        alive = self._replay(group._DG)  # a group has no public way to its graph
        position = {index: at for at, index in enumerate(group[0].idxs)}
        values = np.full(len(position), -np.inf)
        for item in group:
            if item.dep.handler not in self.outputs:
                continue
            layer = self._find(item.dep.target.module)
            if layer is None or layer.name in self.ignored:
                return None
            units = layer.units[alive[layer.units]]
            module = item.dep.target.module
            found = getattr(module, "out_channels", module.weight.shape[0])
            if found != len(units):
                raise PlanMismatchError(
                    f"{layer.name}: has {found} channels where {len(units)} of the {layer.size} scored ones should "
                    "be left. Go on with the pruner that made it smaller, or score the smaller model."
                )
            at = [position[root] for root in item.root_idxs]
            np.maximum.at(values, at, self.values[units[item.idxs]])
        return torch.from_numpy(values) if np.isfinite(values).all() else None

    def _find(self, module: nn.Module) -> Layer | None:
        if module in self.layers:
            return self.layers[module]
        if any(module is other for other in self.model.modules()):
            return None
        raise PlanMismatchError(
            f"Torch-Pruning asks for a {type(module).__name__} of another model. Give as_torch_pruning the model "
            "that the pruner was made for, not a copy."
        )

    def _replay(self, graph: Any) -> Bools:
        """The remaining units: one entry per unit, and a last one, True, for NO_UNIT.

        The history has channel numbers as they were at each removal.
        """
        alive = np.ones(len(self.values) + 1, dtype=bool)
        for name, outputs, channels in graph.pruning_history():
            layer = self.layers.get(graph.model.get_submodule(name))
            if layer is not None and outputs:
                alive[layer.units[alive[layer.units]][channels]] = False
                alive[NO_UNIT] = True
        return alive


def _reasons(scores: Scores) -> dict[str, str]:
    """The layers that Torch-Pruning must ignore, and why."""
    reasons = {layer.name: layer.reason for layer in scores.layers if not layer.removable}
    for group in scores.structure.groups:
        members = [layer for layer in scores.layers if layer.name in group.layers]
        if any((layer.units == NO_UNIT).any() for layer in members):
            reasons |= dict.fromkeys(group.layers, "some of its channels must stay")
        if any(len(np.unique(layer.units)) < layer.size for layer in members):
            reason = "Torch-Pruning would tear apart channels that share a unit"
            reasons |= {layer.name: reason for layer in members}
    return reasons


def _rank(scores: Scores, max_pruning_ratio: float) -> Floats:
    """Distinct numbers in the order of the scores; the same channel of all blocks has the same number."""
    per_unit = scores.per_unit
    groups = scores.structure.groups
    wanted = []
    for group in groups:
        means = per_unit[group.units].reshape(group.blocks, -1).mean(axis=0)
        size = len(means)
        alike = Group(group.layers, group.units[:size], 1)
        least = max(alike.least, math.ceil((1 - max_pruning_ratio) * size - ROUNDING))
        wanted.append(means + STAYS * alike.choose(means, least))
    everything = np.concatenate(wanted)
    number = np.arange(len(everything))
    order = np.lexsort((-number, everything))
    ranked = np.empty(len(everything))
    ranked[order] = np.maximum.accumulate(everything[order] - STEP * number) + STEP * number
    values = np.empty(len(per_unit))
    for group, part in zip(groups, np.split(ranked, np.cumsum([len(w) for w in wanted])[:-1]), strict=True):
        values[group.units] = np.tile(part, group.blocks)
    return values

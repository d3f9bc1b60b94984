"""Parametrised weights: weights that torch computes from other tensors before every run, sliced through those.

Weight norm, spectral norm and the masks of `torch.nn.utils.prune`, as parametrizations or as hooks. Slicing the
underlying tensors is not enough where a norm runs over removed elements: then the factor is adjusted, so that the
weight in evaluation mode is the slice of what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from critical_neurons.removal.attention import convert_attention

Kind: TypeAlias = Literal["weight norm", "spectral norm", "mask"]

WEIGHT = "weight"


@dataclass(frozen=True, eq=False)
class Parametrised:
    """The weight of a module, computed from `original`, a tensor of the same shape, and `others`: the norms along
    axis `dim`, the two vectors of a spectral norm, or a mask. Names are relative to the module."""

    module: nn.Module
    kind: Kind
    original: str
    others: tuple[str, ...]
    dim: int = 0
    hook: Any = None
    held: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str) -> Tensor:
        owner, _, key = name.rpartition(".")
        found: Tensor = getattr(self.module.get_submodule(owner), key)
        return found

    def set(self, name: str, values: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        place, old = self.module.get_submodule(owner), self.get(name)
        if isinstance(old, nn.Parameter):
            values = nn.Parameter(values, requires_grad=old.requires_grad)
        setattr(place, key, values)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """The weight, as in evaluation mode."""
        values = self.get(self.original).detach()
        match self.kind:
            case "weight norm":
                return values * (self.get(self.others[0]).detach() / self._norm(values))
            case "spectral norm":
                return values / self._spread()
            case "mask":
                return values * self.get(self.others[0])

    @torch.no_grad()
    def hold(self) -> None:
        """Called before tensors are sliced or zeroed: remember the factors."""
        if self.kind == "weight norm":
            norm = self._norm(self.get(self.original).detach())
            self.set(self.others[0], self.get(self.others[0]).detach() / norm)
        elif self.kind == "spectral norm":
            self.held["spread"] = self._spread()

    @torch.no_grad()
    def settle(self) -> None:
        """Called after that: restore the factors."""
        if self.kind == "weight norm":
            values = self.get(self.original).detach()
            norm, scale = self._norm(values), self.get(self.others[0]).detach()
            self.set(self.original, torch.where(norm == 0, 1.0, values))  # avoids 0 / 0; the factor is zero
            self.set(self.others[0], torch.where(norm == 0, 0.0, scale * norm))
        elif self.kind == "spectral norm":
            self._set_spread(self.held.pop("spread"))

    @torch.no_grad()
    def assign(self, weight: Tensor) -> None:
        """Set the underlying tensors so that they yield this weight."""
        self.set(self.original, weight.clone())
        if self.kind == "weight norm":
            self.set(self.others[0], torch.ones_like(self.get(self.others[0])))
            self.settle()
        elif self.kind == "spectral norm":
            self._set_spread(weight.new_ones(()))

    def expose(self) -> Callable[[], None]:
        """Replace the computed weight by a parameter. Returns what undoes this, keeping the parameter's values."""
        module, weight, requires = self.module, self.compute(), self.get(self.original).requires_grad
        kind, hooks = type(module), dict(module._forward_pre_hooks)
        computed = module._modules.pop("parametrizations", None)
        own: list[tuple[dict[str, Any], str, Any]] = []
        if computed is not None:
            module.__class__ = kind.__bases__[0]
        else:
            del module.weight
            for place in (module._parameters, module._buffers):
                names = [name for name in place if name in (self.original, *self.others)]  # in their order
                own += [(place, name, place.pop(name)) for name in names]
            for key, hook in hooks.items():
                if hook is self.hook:
                    del module._forward_pre_hooks[key]
        module.weight = nn.Parameter(weight, requires_grad=requires)

        def restore() -> None:
            new = module._parameters.pop(WEIGHT)
            assert new is not None
            if computed is not None:
                module._modules["parametrizations"], module.__class__ = computed, kind
            else:
                module._forward_pre_hooks.update(hooks)
                module.weight = new.detach()
                for place, name, values in own:
                    place[name] = values
            if new.shape != weight.shape or not torch.equal(new, weight):
                self.assign(new.detach())

        return restore

    def _norm(self, values: Tensor) -> Tensor:
        axes = [axis for axis in range(values.ndim) if axis != self.dim]
        squared = values.square().sum(axes, keepdim=True) if self.dim >= 0 else values.square().sum()
        return squared.sqrt()

    def _matrix(self) -> Tensor:
        return self.get(self.original).detach().movedim(self.dim, 0).flatten(1)

    def _spread(self) -> Tensor:
        left, right = (self.get(name) for name in self.others)
        return left @ (self._matrix() @ right)

    def _set_spread(self, wanted: Tensor) -> None:
        """Point the left vector where the next power iteration would, scaled so that the norm comes out as wanted."""
        product = self._matrix() @ self.get(self.others[1])
        if not bool(product.any()):  # nothing is left of the weight along the right vector
            matrix = self._matrix()
            right = matrix.T @ (matrix @ matrix.sum(0))
            self.set(self.others[1], right / right.norm().clamp(min=torch.finfo(right.dtype).tiny))
            product = matrix @ self.get(self.others[1])
        squared = (product @ product).clamp(min=torch.finfo(product.dtype).tiny)
        self.set(self.others[0], product * (wanted / squared))


def find_parametrised(module: nn.Module) -> Parametrised | None:
    """How the weight of a module is computed; None if it is a parameter or computed in another way."""
    if parametrize.is_parametrized(module):
        lists = module.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        if list(lists) != [WEIGHT] or len(lists[WEIGHT]) != 1:  # type: ignore[arg-type]
            return None
        only, prefix = lists[WEIGHT][0], f"parametrizations.{WEIGHT}"  # type: ignore[index]
        if type(only) is parametrizations._WeightNorm:
            return Parametrised(module, "weight norm", f"{prefix}.original1", (f"{prefix}.original0",), only.dim)
        if type(only) is parametrizations._SpectralNorm and hasattr(only, "_u"):
            vectors = (f"{prefix}.0._u", f"{prefix}.0._v")
            return Parametrised(module, "spectral norm", f"{prefix}.original", vectors, only.dim)
        return None
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "name", getattr(hook, "_tensor_name", None)) != WEIGHT:
            continue
        if isinstance(hook, WeightNorm):
            return Parametrised(module, "weight norm", "weight_v", ("weight_g",), hook.dim, hook)
        if isinstance(hook, SpectralNorm):
            return Parametrised(module, "spectral norm", "weight_orig", ("weight_u", "weight_v"), hook.dim, hook)
        if isinstance(hook, BasePruningMethod):
            return Parametrised(module, "mask", "weight_orig", ("weight_mask",), 0, hook)
    return None


def list_parametrised(model: nn.Module) -> dict[str, Parametrised]:
    """All parametrised weights, by the name of the module."""
    found = ((name, find_parametrised(module)) for name, module in model.named_modules())
    return {name: each for name, each in found if each is not None}


def make_plain(model: nn.Module) -> nn.Module:
    """Change the model in place: computed weights become parameters, attention calls its projections as modules."""
    for each in list_parametrised(model).values():
        each.expose()
    return open_attention(model)


def open_attention(model: nn.Module) -> nn.Module:
    for module in _list_attention(model):
        convert_attention(module)
    return model


def _list_attention(model: nn.Module) -> list[nn.MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


@contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """While the context lasts, weights under a norm are plain parameters, whose new values are kept afterwards, and
    attention calls its projections as modules."""
    restored = [each.expose() for each in list_parametrised(model).values() if each.kind != "mask"]
    restored += [convert_attention(module) for module in _list_attention(model)]
    try:
        yield
    finally:
        for restore in restored:
            restore()

"""Attention: `nn.MultiheadAttention` with heads removed, whose heads together are narrower than its input."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class FewerHeads(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` that lost some of its heads; made from one, with its parameters sliced.

    `embed_dim` is the width of its input and output, `num_heads * head_dim` that of its heads together.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal: only a hint about attn_mask. Give attn_mask, too.")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (each.unsqueeze(1) for each in (query, key, value))
        elif self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        q, k, v = (self._split(each) for each in self._project(query, key, value))
        mask = self._join_masks(key_padding_mask, attn_mask, q)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            found = weights @ v
        else:
            found, weights = functional.scaled_dot_product_attention(q, k, v, mask, dropout), None
        joined: Tensor = self.out_proj(found.permute(2, 0, 1, 3).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        if not batched:
            return joined.squeeze(1), weights
        return joined.transpose(0, 1) if self.batch_first else joined, weights

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        named: list[Any] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        weights = named if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [functional.linear(*each) for each in zip(inputs, weights, biases, strict=True)]

    def _split(self, values: Tensor) -> Tensor:
        """(time, batch, channels) to (batch, heads, time, channels of a head)."""
        return torch.unflatten(values, -1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def _join_masks(self, padding: Tensor | None, given: Tensor | None, query: Tensor) -> Tensor | None:
        """Both masks as one additive mask that broadcasts to (batch, heads, queries, keys)."""
        found: Tensor | None = None
        if padding is not None:
            shaped = padding.reshape(query.shape[0], 1, 1, -1)
            found = _as_numbers(shaped, query)
        if given is not None:
            numbers = _as_numbers(given, query)
            if given.dim() == 3:
                numbers = torch.unflatten(numbers, 0, (query.shape[0], -1))
            found = numbers if found is None else found + numbers
        return found


def convert_attention(module: nn.MultiheadAttention) -> Callable[[], None]:
    """Let it have any number of heads, and call its output projection as a module. Returns what undoes that."""
    kind, same = type(module), module._qkv_same_embed_dim
    if not isinstance(module, FewerHeads) and module.bias_k is None and not module.add_zero_attn:
        module.__class__ = _derive(kind)  # type: ignore[arg-type]
        module._qkv_same_embed_dim = False  # torch's fused kernels do not support such heads

    def restore() -> None:
        module.__class__, module._qkv_same_embed_dim = kind, same

    return restore


@cache
def _derive(kind: type[nn.MultiheadAttention]) -> type[nn.MultiheadAttention]:
    """A subclass whose `super().forward` is ours, for the user's own subclasses of `nn.MultiheadAttention`."""
    if kind is nn.MultiheadAttention:
        return FewerHeads
    return type(kind.__name__, (kind, FewerHeads), {"__reduce__": lambda made: (_make, (kind,), vars(made))})


def _make(kind: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
    """For pickle, which cannot refer to classes created at run time."""
    derived = _derive(kind)  # type: ignore[arg-type]
    return derived.__new__(derived)


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))

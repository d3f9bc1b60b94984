"""Attention with fewer heads than `nn.MultiheadAttention` allows: each as wide as it was, together narrower than what
they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class FewerHeads(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` that lost some of its heads; made from one, with its parameters sliced.

    `embed_dim` is what it reads and gives, `num_heads * head_dim` what its heads have together.
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
        """As that of `nn.MultiheadAttention`."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal: only says what attn_mask is. Give attn_mask, too.")
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
        """As numbers to add, for every batch, head, query and key."""
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
    """Make it one that calls its output layer as a module and has any number of heads. What is given back undoes
    that."""
    kind, same = type(module), module._qkv_same_embed_dim
    if not isinstance(module, FewerHeads) and module.bias_k is None and not module.add_zero_attn:
        module.__class__ = _derive(kind)  # type: ignore[arg-type]
        module._qkv_same_embed_dim = False  # no fused call knows of such heads

    def restore() -> None:
        module.__class__, module._qkv_same_embed_dim = kind, same

    return restore


@cache
def _derive(kind: type[nn.MultiheadAttention]) -> type[nn.MultiheadAttention]:
    """The class of a user's own that hands its work to torch's: it then hands it to ours."""
    if kind is nn.MultiheadAttention:
        return FewerHeads
    return type(kind.__name__, (kind, FewerHeads), {"__reduce__": lambda made: (_make, (kind,), vars(made))})


def _make(kind: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
    """For pickles, which name functions of modules, not classes that were made."""
    derived = _derive(kind)  # type: ignore[arg-type]
    return derived.__new__(derived)


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))

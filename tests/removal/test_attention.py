"""Attention that may have fewer heads gives what torch's own does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from critical_neurons.removal.attention import FewerHeads, convert_attention

EMBED, HEADS, BATCH, LENGTH = 6, 3, 2, 4


def draw(*shape):
    return torch.linspace(-2, 2, torch.Size(shape).numel(), dtype=torch.float64).sin().reshape(shape)


WAYS = {
    "time first": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "without biases": ({"bias": False}, {"need_weights": False}),
    "keys of another width": ({"kdim": 5, "vdim": 5}, {}),
    "weights of every head": ({}, {"average_attn_weights": False}),
    "masked": ({"batch_first": True}, {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)}),
    "masked by numbers, without weights": ({}, {"attn_mask": draw(LENGTH, LENGTH), "need_weights": False}),
    "a mask for every head": ({}, {"attn_mask": draw(BATCH * HEADS, LENGTH, LENGTH)}),
    "padded": (
        {"batch_first": True},
        {"key_padding_mask": torch.tensor([[False] * LENGTH, [False, False, True, True]])},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_gives_what_torch_gives(way):
    torch.manual_seed(0)
    made, called = WAYS[way]
    module = nn.MultiheadAttention(EMBED, HEADS, **made).double().eval()
    query = draw(BATCH, LENGTH, EMBED) if module.batch_first else draw(LENGTH, BATCH, EMBED)
    key = query if module.kdim == EMBED else draw(LENGTH, BATCH, module.kdim)
    wanted = module(query, key, key, **called)
    restore = convert_attention(module)
    assert type(module) is FewerHeads
    found = module(query, key, key, **called)
    restore()
    assert type(module) is nn.MultiheadAttention
    for one, other in zip(wanted, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@torch.no_grad()
def test_without_a_batch():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(EMBED, HEADS).double().eval()
    wanted = module(*[draw(LENGTH, EMBED)] * 3)
    convert_attention(module)
    for one, other in zip(wanted, module(*[draw(LENGTH, EMBED)] * 3), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_added_keys_are_left_to_torch():
    module = nn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True)
    convert_attention(module)
    assert type(module) is nn.MultiheadAttention


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_in_training_alone(need_weights):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(EMBED, HEADS, dropout=0.5).double()
    convert_attention(module)
    query = draw(LENGTH, BATCH, EMBED)
    in_training = [module(query, query, query, need_weights=need_weights)[0] for _ in range(2)]
    assert not torch.equal(*in_training)
    module.eval()
    assert torch.equal(*[module(query, query, query, need_weights=need_weights)[0] for _ in range(2)])


class Derived(nn.MultiheadAttention):
    pass


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_class_of_ones_own_can_be_copied(copied):
    module = Derived(EMBED, HEADS).double().eval()
    convert_attention(module)
    query = draw(LENGTH, BATCH, EMBED)
    again = copied(module)
    assert isinstance(again, Derived)
    assert isinstance(again, FewerHeads)
    assert torch.equal(again(query, query, query)[0], module(query, query, query)[0])


@pytest.mark.parametrize("convert", [convert_attention, lambda module: None])
def test_causal_without_a_mask_is_refused_as_by_torch(convert):
    module = nn.MultiheadAttention(EMBED, HEADS).double()
    convert(module)
    query = draw(LENGTH, BATCH, EMBED)
    with pytest.raises(RuntimeError, match="attn_mask"):
        module(query, query, query, is_causal=True)

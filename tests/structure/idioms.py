"""Ways in which people write networks, each with what can be removed from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

OUTPUT = "network's output"


class Written(nn.Module):
    """A network of named parts and a forward written as a function of it and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter | Tensor | int) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.run(self, *inputs, **named)


@dataclass(frozen=True)
class Idiom:
    """`units`: how many can be removed. `channels`: of some layers, how many belong to these units. `reasons`: parts
    of why other layers stay."""

    build: Callable[[], nn.Module]
    inputs: Any
    units: int
    channels: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


IMAGE = torch.linspace(-1, 1, 2 * 2 * 4 * 4, dtype=torch.float64).sin().reshape(2, 2, 4, 4)
ROWS = torch.linspace(-1, 2, 2 * 4, dtype=torch.float64).cos().reshape(2, 4)
SERIES = torch.linspace(-2, 1, 2 * 3 * 4, dtype=torch.float64).sin().reshape(2, 3, 4)
"""(batch, time or channels, features or time)"""
WORDS = torch.tensor([[1, 4, 2], [3, 0, 2]])


def weight(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))


def mlp(between: Callable[[nn.Module, Tensor], Tensor], width: int = 6, read: int = 6, **parts: Any) -> nn.Module:
    """Two linear layers and what happens between them."""
    return Written(lambda m, x: m.b(between(m, m.a(x))), a=nn.Linear(4, width), b=nn.Linear(read, 3), **parts)


def cnn(between: Callable[[nn.Module, Tensor], Tensor], width: int = 6, read: int = 6, **parts: Any) -> nn.Module:
    """Two convolutions and what happens between them."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(between(m, m.a(x))).mean((2, 3))

    return Written(run, a=nn.Conv2d(2, width, 3, padding=1), b=nn.Conv2d(read, 3, 1), **parts)


def write_every_second(m: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 2 * x.shape[1], *x.shape[2:], dtype=x.dtype)
    out[:, ::2] = x
    out[:, 1::2] = x.relu()
    return out


def write_halves(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], 2 * x.shape[1], *x.shape[2:])
    out[:, : x.shape[1]].copy_(x)
    out.narrow(1, x.shape[1], x.shape[1]).copy_(x).sigmoid_()
    return out


def write_through_a_view(m: nn.Module, x: Tensor) -> Tensor:
    out = torch.cat([x, x], 1)
    half, other = out[:, : x.shape[1]], m.c(x)
    out[:, : x.shape[1]] = other
    return half  # the same memory: what was written is what is read


def spread_messages(m: nn.Module, x: Tensor) -> Tensor:
    nodes = m.a(x).flatten(0, 1)
    messages = nodes[torch.tensor([0, 2, 1, 5])]
    out = nodes.new_zeros(nodes.shape[0], nodes.shape[1]).index_add_(0, torch.tensor([1, 0, 3, 4]), messages)
    return m.b(out.relu())


def shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, *sizes = x.shape
    return x.view(batch, groups, channels // groups, *sizes).transpose(1, 2).reshape(x.shape)


def squeeze_and_excite(m: nn.Module, x: Tensor) -> Tensor:
    gate = m.up(F.relu(m.down(x.mean((2, 3)))))
    return x * torch.sigmoid(gate)[:, :, None, None]


def attend_to_positions(m: nn.Module, x: Tensor) -> Tensor:
    return x * torch.sigmoid(m.gate(x))


def step_lstm(m: nn.Module, x: Tensor) -> Tensor:
    hidden = cell = torch.zeros(x.shape[0], m.again.weight.shape[1], dtype=x.dtype)
    for step in x.unbind(1):
        i, f, g, o = (m.read(step) + m.again(hidden)).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
    return m.head(hidden)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def attend_in_groups(m: Any, x: Tensor) -> Tensor:
    """Two heads for every key."""
    q = m.q(x).view(*x.shape[:2], m.heads, 3).transpose(1, 2)
    k, v = (each(x).view(*x.shape[:2], -1, 3).transpose(1, 2) for each in (m.k, m.v))
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def attend_by_distance(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, m.heads, 2).permute(2, 0, 3, 1, 4)
    q, k = (each * (each.square().mean(-1, keepdim=True) + 0.1).rsqrt() for each in (q, k))
    found = (q @ k.transpose(-2, -1) + m.far).softmax(-1) @ F.layer_norm(v, [2])
    return m.out(found.transpose(1, 2).flatten(2))


def attend_as_wide(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, m.heads, x.shape[2] // m.heads).permute(2, 0, 3, 1, 4)
    return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def attend_by_hand(m: nn.Module, x: Tensor) -> Tensor:
    batch, time, _ = x.shape
    q, k, v = (part(x).view(batch, time, m.heads, -1).transpose(1, 2) for part in (m.q, m.k, m.v))
    seen = (q @ k.transpose(2, 3)).softmax(3)
    return m.out((seen @ v).transpose(1, 2).reshape(batch, time, -1))


def take_first_word(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.cat([m.cls.expand(len(x), -1, -1), m.a(x)], 1) + m.places[:, : x.shape[1] + 1]
    return m.b((x + m.scale * m.c(x).relu())[:, 0])


def cast_inside(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(F.linear(x, m.a.weight.to(x.dtype), m.a.bias.to(x.dtype)).relu())


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


IDIOMS: dict[str, Idiom] = {
    "every second channel written": Idiom(lambda: cnn(write_every_second, 3), IMAGE, 3),
    "halves written": Idiom(lambda: cnn(write_halves, 3), IMAGE, 3),
    "written through the whole, read through a view": Idiom(
        lambda: cnn(write_through_a_view, 6, c=nn.Conv2d(6, 6, 1)), IMAGE, 6, {"a": 6, "c": 6}
    ),
    "written where negative": Idiom(
        lambda: mlp(lambda m, x: x.index_put_((x < 0,), torch.zeros((), dtype=x.dtype))), ROWS, 6
    ),
    "shape changed in place": Idiom(lambda: cnn(lambda m, x: x.unsqueeze_(1).squeeze_(1).transpose_(2, 3)), IMAGE, 6),
    "added into an output": Idiom(
        lambda: mlp(lambda m, x: torch.add(x, 1.0, out=torch.empty_like(x))), ROWS, 0, reasons={"a": "writes it into"}
    ),
    "messages along edges": Idiom(lambda: Written(spread_messages, a=nn.Linear(4, 5), b=nn.Linear(5, 2)), SERIES, 5),
    "channels picked by number": Idiom(
        lambda: mlp(lambda m, x: x[:, m.order], order=torch.tensor([5, 0, 1, 2, 4, 3])),
        *(ROWS, 0),
        reasons={"a": "index picks some of its channels"},
    ),
    "channels rolled": Idiom(lambda: mlp(lambda m, x: x.roll(1, 1)), ROWS, 0, reasons={"a": "roll picks some"}),
    "channels flipped": Idiom(lambda: mlp(lambda m, x: x.flip(1)), ROWS, 6),
    "triangle of channels": Idiom(
        lambda: Written(lambda m, x: m.b(m.a(x).tril()), a=nn.Linear(4, 6), b=nn.Linear(6, 2)),
        *(SERIES, 0),
        reasons={"a": "read by tril"},
    ),
    "einsum with a parameter": Idiom(
        lambda: Written(
            lambda m, x: m.b(torch.einsum("ntc,cd->ntd", x, m.w).relu()), w=weight(4, 6), b=nn.Linear(6, 2)
        ),
        *(SERIES, 6),
        {"w": 6},
    ),
    "experts in one parameter": Idiom(
        lambda: Written(
            lambda m, x: m.b(torch.einsum("nc,ecd->ned", m.a(x), m.w).relu().sum(1)),
            a=nn.Linear(4, 6),
            w=weight(3, 6, 5),
            b=nn.Linear(5, 2),
        ),
        ROWS,
        0,
        reasons={"a": "several matrices in one parameter"},
    ),
    "einsum of two values": Idiom(
        lambda: Written(lambda m, x: torch.einsum("nc,nc->n", m.a(x), m.b(x)), a=nn.Linear(4, 6), b=nn.Linear(4, 6)),
        *(ROWS, 6),
        {"a": 6, "b": 6},
    ),
    "parameter in front": Idiom(
        lambda: Written(lambda m, x: m.b((m.w @ x).relu().transpose(1, 2)), w=weight(6, 3), b=nn.Linear(6, 2)),
        *(SERIES, 6),
        {"w": 6},
    ),
    "vector of parameters behind": Idiom(
        lambda: Written(lambda m, x: m.a(x).tanh() @ m.v, a=nn.Linear(4, 6), v=weight(6)), SERIES, 6
    ),
    "functional weights": Idiom(
        lambda: Written(
            lambda m, x: F.linear(F.linear(x, m.w, m.c).relu(), m.u), w=weight(6, 4), c=weight(6), u=weight(2, 6)
        ),
        *(ROWS, 6),
        {"w": 6},
        {"u": OUTPUT},
    ),
    "weights cut in two": Idiom(
        lambda: Written(
            lambda m, x: m.b(torch.cat([F.linear(x, w).relu() for w in m.w.chunk(2)], 1)),
            w=weight(6, 4),
            b=nn.Linear(6, 2),
        ),
        *(ROWS, 3),
    ),
    "weights cast inside": Idiom(lambda: Written(cast_inside, a=nn.Linear(4, 6), b=nn.Linear(6, 2)), ROWS, 6),
    "no batch axis": Idiom(
        lambda: Written(
            lambda m, x: torch.stack([m.b(m.a(each).relu()).mean((1, 2)) for each in x]),
            *(),
            a=nn.Conv2d(2, 6, 3),
            b=nn.Conv2d(6, 3, 1),
        ),
        *(IMAGE, 6),
    ),
    "grouped": Idiom(lambda: cnn(lambda m, x: m.g(x.relu()).relu(), 8, g=nn.Conv2d(8, 6, 3, groups=2)), IMAGE, 14),
    "depthwise": Idiom(
        lambda: cnn(lambda m, x: m.g(x.relu()).relu(), 6, g=nn.Conv2d(6, 6, 3, groups=6)), IMAGE, 6, {"g": 6}
    ),
    "depthwise with a multiplier": Idiom(
        lambda: cnn(lambda m, x: m.g(x.relu()), 3, g=nn.Conv2d(3, 6, 3, groups=3)), IMAGE, 3, {"g": 6}
    ),
    "transposed and grouped": Idiom(
        lambda: cnn(lambda m, x: m.g(x.relu()).relu(), 4, g=nn.ConvTranspose2d(4, 6, 2, groups=2)), IMAGE, 10
    ),
    "transposed and depthwise with a multiplier": Idiom(
        lambda: cnn(lambda m, x: m.g(x.relu()), 3, g=nn.ConvTranspose2d(3, 6, 2, groups=3)), IMAGE, 3, {"g": 6}
    ),
    "linear on four axes": Idiom(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2)), IMAGE, 11
    ),
    "convolution in three dimensions": Idiom(
        lambda: Written(
            lambda m, x: m.b(F.max_pool3d(m.n(m.a(x[:, None])), (1, 2, 2))).sum((2, 3, 4)),
            *(),
            a=nn.Conv3d(1, 5, (1, 2, 2)),
            n=nn.BatchNorm3d(5),
            b=nn.Conv3d(5, 2, 1),
        ),
        *(IMAGE, 5),
    ),
    "embedding": Idiom(
        lambda: Written(lambda m, x: m.b(m.e(x).mean(1)), e=nn.Embedding(5, 6, padding_idx=0), b=nn.Linear(6, 2)),
        *(WORDS, 6),
    ),
    "bag of embeddings": Idiom(
        lambda: Written(lambda m, x: m.b(m.e(x)), e=nn.EmbeddingBag(5, 6), b=nn.Linear(6, 2)), WORDS, 6
    ),
    "tied weights": Idiom(
        lambda: Written(
            lambda m, x: F.linear(m.b(m.e(x)).tanh(), m.e.weight), e=nn.Embedding(5, 6), b=nn.Linear(6, 6)
        ),
        *(WORDS, 6),
        {"e": 6, "b": 6},
    ),
    "shared module": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.s(m.s(m.a(x)).relu()).relu()), a=nn.Linear(4, 6), s=nn.Linear(6, 6), b=nn.Linear(6, 2)
        ),
        *(ROWS, 6),
        {"a": 6, "s": 6},
    ),
    "one slope": Idiom(lambda: cnn(lambda m, x: m.p(x), p=nn.PReLU()), IMAGE, 6),
    "a slope for every channel": Idiom(lambda: cnn(lambda m, x: m.p(x), p=nn.PReLU(6)), IMAGE, 6),
    "batch norm of series": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.n(m.a(x)).relu()).mean(2),
            a=nn.Conv1d(3, 6, 2),
            n=nn.BatchNorm1d(6),
            b=nn.Conv1d(6, 2, 1),
        ),
        *(SERIES, 6),
    ),
    "instance norm": Idiom(lambda: cnn(lambda m, x: m.n(x).relu(), n=nn.InstanceNorm2d(6)), IMAGE, 6),
    "instance norm with parameters": Idiom(
        lambda: cnn(lambda m, x: m.n(x).relu(), n=nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        IMAGE,
        6,
    ),
    "group norm": Idiom(lambda: cnn(lambda m, x: m.n(x).relu(), n=nn.GroupNorm(3, 6)), IMAGE, 3, {"a": 6}),
    "group norm without parameters": Idiom(
        lambda: cnn(lambda m, x: m.n(x).relu(), n=nn.GroupNorm(2, 6, affine=False)), IMAGE, 2, {"a": 6}
    ),
    "group norm of one group": Idiom(
        lambda: cnn(lambda m, x: m.n(x).relu(), n=nn.GroupNorm(1, 6)), IMAGE, 0, reasons={"a": "one group for all"}
    ),
    "layer norm": Idiom(
        lambda: mlp(lambda m, x: m.n(x).relu(), n=nn.LayerNorm(6)), ROWS, 0, reasons={"a": "a layer norm runs over"}
    ),
    "number of groups written down": Idiom(
        lambda: cnn(lambda m, x: F.group_norm(x, 3).relu()), IMAGE, 0, reasons={"a": "removal fails"}
    ),
    "channel shuffle": Idiom(lambda: cnn(lambda m, x: shuffle(x, 2).relu()), IMAGE, 3, {"a": 6}),
    "channel shuffle by module": Idiom(
        lambda: cnn(lambda m, x: m.s(x).relu(), s=nn.ChannelShuffle(3)), IMAGE, 2, {"a": 6}
    ),
    "pixel shuffle": Idiom(lambda: cnn(lambda m, x: F.pixel_shuffle(x, 2).relu(), 12, 3), IMAGE, 3, {"a": 12}),
    "pixel unshuffle": Idiom(lambda: cnn(lambda m, x: F.pixel_unshuffle(x, 2).relu(), 3, 12), IMAGE, 3),
    "unfolded and folded": Idiom(
        lambda: cnn(lambda m, x: F.fold(F.unfold(x, 3, padding=1).relu(), (4, 4), 3, padding=1)), IMAGE, 6
    ),
    "halves": Idiom(
        lambda: cnn(lambda m, x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), 6, 3), IMAGE, 3, {"a": 6}
    ),
    "every second channel": Idiom(
        lambda: cnn(lambda m, x: torch.cat([x[:, ::2].relu(), x[:, 1::2]], 1)), IMAGE, 3, {"a": 6}
    ),
    "uneven pieces": Idiom(
        lambda: cnn(lambda m, x: torch.cat([x.split([2, 4], 1)[0].relu(), x[:, 2:]], 1)),
        *(IMAGE, 0),
        reasons={"a": "takes a part of its channels"},
    ),
    "gated linear unit": Idiom(lambda: cnn(lambda m, x: F.glu(x, 1), 6, 3), IMAGE, 3, {"a": 6}),
    "maxout": Idiom(lambda: cnn(lambda m, x: x.unflatten(1, (-1, 3)).amax(2), 6, 2), IMAGE, 2, {"a": 6}),
    "maxout of pieces": Idiom(lambda: cnn(lambda m, x: torch.maximum(*x.chunk(2, 1)), 6, 3), IMAGE, 3, {"a": 6}),
    "squeeze and excitation": Idiom(
        lambda: cnn(squeeze_and_excite, down=nn.Linear(6, 3), up=nn.Linear(3, 6)),
        IMAGE,
        9,
        {"a": 6, "up": 6, "down": 3},
    ),
    "squeeze and excitation of what was joined": Idiom(
        lambda: cnn(
            lambda m, x: squeeze_and_excite(m, torch.cat([x, m.c(x)], 1)),
            *(3, 6),
            c=nn.Conv2d(3, 3, 1),
            down=nn.Linear(6, 3),
            up=nn.Linear(3, 6),
        ),
        *(IMAGE, 7),
        {"a": 2, "c": 2, "up": 4},
    ),
    "attention to positions": Idiom(
        lambda: cnn(attend_to_positions, gate=nn.Conv2d(6, 1, 1)), IMAGE, 6, {"a": 6}, {"gate": "spreads it"}
    ),
    "mean over channels": Idiom(
        lambda: cnn(lambda m, x: x * x.mean(1, keepdim=True)), IMAGE, 0, reasons={"a": "mean runs over its channels"}
    ),
    "length of channels": Idiom(lambda: mlp(lambda m, x: F.normalize(x, dim=1)), ROWS, 6),
    "long short-term memory by hand": Idiom(
        lambda: Written(step_lstm, read=nn.Linear(4, 20), again=nn.Linear(5, 20), head=nn.Linear(5, 2)),
        *(SERIES, 5),
        {"read": 20, "again": 20},
    ),
    "attention by hand": Idiom(
        lambda: Written(
            attend_by_hand, q=nn.Linear(4, 6), k=nn.Linear(4, 6), v=nn.Linear(4, 6), out=nn.Linear(6, 2), heads=2
        ),
        *(SERIES, 2),
        {"q": 6, "k": 6, "v": 6},
    ),
    "heads that share keys": Idiom(
        lambda: Written(
            attend_in_groups, q=nn.Linear(4, 12), k=nn.Linear(4, 6), v=nn.Linear(4, 6), out=nn.Linear(12, 2), heads=4
        ),
        *(SERIES, 2),
        {"q": 12, "k": 6, "v": 6},
    ),
    "heads with a bias, each normalised": Idiom(
        lambda: Written(attend_by_distance, qkv=nn.Linear(4, 18), out=nn.Linear(6, 2), heads=3, far=weight(3, 3, 3)),
        *(SERIES, 3),
        {"qkv": 18},
    ),
    "width of heads from the input": Idiom(
        lambda: Written(attend_as_wide, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2), heads=2),
        *(SERIES, 0),
        reasons={"qkv": "Is a size written into its forward? (idioms.py"},
    ),
    "attention by module": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.t(x, x, x, need_weights=False)[0]),
            t=nn.MultiheadAttention(4, 2, batch_first=True),
            b=nn.Linear(4, 2),
        ),
        *(SERIES, 6),
        {"t.out_proj": 4, "t.in_proj_weight": 4},
    ),
    "attention by a class of its own": Idiom(
        lambda: Written(lambda m, x: m.b(m.t(x)), t=SelfAttention(4, 2, batch_first=True), b=nn.Linear(4, 2)),
        *(SERIES, 6),
        {"t.out_proj": 4, "t.in_proj_weight": 4},
    ),
    "attention with weights in use": Idiom(
        lambda: Written(
            lambda m, x: m.b(torch.cat(m.t(x, x, x), -1)),
            t=nn.MultiheadAttention(4, 2, batch_first=True),
            b=nn.Linear(7, 2),
        ),
        *(SERIES, 4),
        reasons={"t.in_proj_weight": "mean runs over its channels"},
    ),
    "encoder layer": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.t(x)), t=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), b=nn.Linear(4, 2)
        ),
        *(SERIES, 10),
        {"t.linear1": 8, "t.self_attn.in_proj_weight": 4},
    ),
    "weight norm": Idiom(
        lambda: mlp(lambda m, x: m.w(x), w=parametrizations.weight_norm(nn.Linear(6, 6))),
        *(ROWS, 12),
    ),
    "spectral norm": Idiom(
        lambda: mlp(lambda m, x: m.w(x), w=parametrizations.spectral_norm(nn.Linear(6, 6))),
        *(ROWS, 12),
    ),
    "orthogonal weight": Idiom(
        lambda: mlp(lambda m, x: m.w(x), w=parametrizations.orthogonal(nn.Linear(6, 6))),
        *(ROWS, 0),
        reasons={"w": "computed from others", "a": "computed from others"},
    ),
    "recurrent module": Idiom(
        lambda: Written(lambda m, x: m.b(m.r(m.a(x))[0]), a=nn.Linear(4, 6), r=nn.GRU(6, 5), b=nn.Linear(5, 2)),
        *(SERIES, 0),
        reasons={"a": "feeds GRU", "r": "left as it is"},
    ),
    "class token, places, scale": Idiom(
        lambda: Written(
            take_first_word,
            *(),
            a=nn.Linear(4, 6),
            c=nn.Linear(6, 6),
            b=nn.Linear(6, 2),
            cls=weight(1, 1, 6),
            places=weight(1, 9, 6),
            scale=weight(6),
        ),
        *(SERIES, 6),
        {"a": 6, "c": 6},
    ),
    "shortcut with zeros of a size written down": Idiom(
        lambda: Written(
            lambda m, x: m.b((torch.cat([m.a(x), torch.zeros(len(x), 2, dtype=x.dtype)], 1) + m.c(x)).relu()),
            *(),
            a=nn.Linear(4, 4),
            c=nn.Linear(4, 6),
            b=nn.Linear(6, 2),
        ),
        *(ROWS, 4),
        {"a": 4, "c": 4},
    ),
    "joined with a constant": Idiom(
        lambda: mlp(lambda m, x: torch.cat([x, torch.ones(len(x), 2, dtype=x.dtype)], 1), 6, 8), ROWS, 6
    ),
    "added to numbers": Idiom(
        lambda: mlp(lambda m, x: x + torch.arange(6)), ROWS, 0, reasons={"a": "add joins it with what cannot shrink"}
    ),
    "size written down": Idiom(
        lambda: cnn(lambda m, x: x.view(-1, 6, 4, 4)), IMAGE, 0, reasons={"a": "removal fails"}
    ),
    "outputs in a dict": Idiom(
        lambda: Written(
            lambda m, x: {"y": m.b(m.a(x)), "h": [m.c(x)]}, a=nn.Linear(4, 6), b=nn.Linear(6, 2), c=nn.Linear(4, 3)
        ),
        *(ROWS, 6),
        {"a": 6},
        {"b": OUTPUT, "c": OUTPUT},
    ),
    "outputs in a dataclass": Idiom(
        lambda: Written(
            lambda m, x: Answer(m.b(m.a(x)), m.c(x)), a=nn.Linear(4, 6), b=nn.Linear(6, 2), c=nn.Linear(4, 3)
        ),
        *(ROWS, 6),
        {"a": 6},
        {"b": OUTPUT, "c": OUTPUT},
    ),
    "outputs in a distribution": Idiom(
        lambda: Written(
            lambda m, x: (m.c(m.a(x)), torch.distributions.Normal(m.b(m.a(x)), 1.0)),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 2),
            c=nn.Linear(6, 1),
        ),
        *(ROWS, 6),
        {"a": 6},
        {"b": OUTPUT},
    ),
    "infinite outputs": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.a(x).relu()).masked_fill(m.mask, -torch.inf),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 3),
            mask=torch.tensor([True, False, False]),
        ),
        *(ROWS, 6),
    ),
    "mask of infinities": Idiom(
        lambda: Written(
            lambda m, x: m.b((m.a(x) @ x.transpose(1, 2) + m.mask).softmax(2)),
            a=nn.Linear(4, 4),
            b=nn.Linear(3, 2),
            mask=torch.full((3, 3), -torch.inf).triu(1),
        ),
        *(SERIES, 0),
        reasons={"a": "read along with what cannot shrink"},
    ),
    "control flow": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.a(x).relu() if x.sum() > 1e9 else m.c(x).relu()),
            a=nn.Linear(4, 6),
            c=nn.Linear(4, 6),
            b=nn.Linear(6, 2),
        ),
        *(ROWS, 6),
        {"c": 6},
    ),
    "random sampling": Idiom(
        lambda: Written(
            lambda m, x: m.b(m.a(x) + torch.randn_like(m.a(x)) * (0.5 * m.c(x)).exp()),
            a=nn.Linear(4, 6),
            c=nn.Linear(4, 6),
            b=nn.Linear(6, 2),
        ),
        *(ROWS, 6),
        {"a": 6, "c": 6},
    ),
    "several inputs": Idiom(
        lambda: Written(
            lambda m, x, y: m.b(m.a(x) * m.e(y).mean(1)), a=nn.Linear(4, 6), e=nn.Embedding(5, 6), b=nn.Linear(6, 2)
        ),
        *((ROWS, WORDS), 6),
        {"a": 6, "e": 6},
    ),
    "inputs by name": Idiom(
        lambda: Written(lambda m, *, left, right: m.b(m.a(left) - m.a(right)), a=nn.Linear(4, 6), b=nn.Linear(6, 2)),
        *({"left": ROWS, "right": ROWS.flip(0)}, 6),
    ),
    "more than one row needed": Idiom(
        lambda: mlp(lambda m, x: m.n(x).relu(), n=nn.BatchNorm1d(6, track_running_stats=False)), ROWS, 6
    ),
    "exactly one row": Idiom(lambda: mlp(lambda m, x: x.reshape(1, -1).relu()), ROWS[:1], 6),
}

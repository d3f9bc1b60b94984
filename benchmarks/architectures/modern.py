"""Later convolutional networks, mixers and image transformers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import BasicBlock, Make, Pooled, Residual, conv
from architectures.registry import Architecture, image

FAMILY = "modern image classifiers"


class RepVGGBlock(nn.Module):
    """Ding et al. 2021, the training-time form: the sum of 3x3, 1x1 and identity, each with batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.dense = conv(inputs, outputs, 3, stride, act=None)
        self.point = conv(inputs, outputs, 1, stride, act=None)
        self.identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = 0 if self.identity is None else self.identity(x)
        return F.relu(self.dense(x) + self.point(x) + identity)


def repvgg_a0() -> nn.Module:
    layers, inputs = [RepVGGBlock(3, 48, 2)], 48
    for outputs, depth in ((48, 2), (96, 4), (192, 14), (1280, 1)):
        for step in range(depth):
            layers.append(RepVGGBlock(inputs, outputs, 1 if step else 2))
            inputs = outputs
    return Pooled(nn.Sequential(*layers), 1280)


class Tree(nn.Module):
    """Yu et al. 2018, deep layer aggregation: a 1x1 convolution joins both subtrees, recursively."""

    def __init__(self, inputs: int, outputs: int, level: int, stride: int) -> None:
        super().__init__()
        self.root = conv(2 * outputs, outputs, 1)
        if level == 1:
            self.left, self.right = BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs)
        else:
            self.left, self.right = Tree(inputs, outputs, level - 1, stride), Tree(outputs, outputs, level - 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out1 = self.left(x)
        out2 = self.right(out1)
        return self.root(torch.cat([out1, out2], 1))


def dla_cifar() -> nn.Module:
    stem = nn.Sequential(conv(3, 16), conv(16, 16), conv(16, 32))
    trees = (Tree(32, 64, 1, 1), Tree(64, 128, 2, 2), Tree(128, 256, 2, 2), Tree(256, 512, 1, 2))
    return Pooled(nn.Sequential(stem, *trees), 512, 10)


class ChannelsFirstNorm(nn.LayerNorm):
    """Layer norm over the channels of (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Liu et al. 2022: depthwise 7x7, then a channels-last MLP with layer norm, scaled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.gamma * self.pwconv2(F.gelu(self.pwconv1(out)))
        return x + out.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelsFirstNorm(widths[0])]
        for at, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if at > 0:
                layers += [ChannelsFirstNorm(widths[at - 1]), nn.Conv2d(widths[at - 1], width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean([-2, -1])))


def convmixer_256_8() -> nn.Module:
    """Trockman and Kolter 2022, for CIFAR: patches of 2, kernels of 5."""

    def act() -> tuple[nn.Module, nn.Module]:
        return nn.GELU(), nn.BatchNorm2d(256)

    layers: list[nn.Module] = [nn.Conv2d(3, 256, 2, 2), *act()]
    for _ in range(8):
        layers.append(Residual(nn.Conv2d(256, 256, 5, groups=256, padding="same"), *act()))
        layers += [nn.Conv2d(256, 256, 1), *act()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(256, 10))


class MixerBlock(nn.Module):
    """Tolstikhin et al. 2021: one MLP over patches, one over channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(patches, channels // 2), nn.GELU(), nn.Linear(channels // 2, patches))
        self.channels = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, side: int, patch: int, channels: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock((side // patch) ** 2, channels) for _ in range(depth)))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Attention(nn.Module):
    """Self-attention with one layer for queries, keys and values, split by reshape and permute."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        x = (weights.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.proj(x)


class ModuleAttention(nn.MultiheadAttention):
    """Self-attention by torch's module."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021; the sizes of DeiT-Ti, for images of 64x64."""

    def __init__(self, block: Make, side: int = 64, patch: int = 16, width: int = 192, depth: int = 12):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(block(width, 3) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.blocks(x + self.pos_embed)
        return self.head(self.norm(x)[:, 0])


class ConvStemTransformer(nn.Module):
    """Compact convolutional transformer of Hassani et al. 2021 (CCT-2/3x2): attention pools the sequence."""

    def __init__(self) -> None:
        super().__init__()
        pooled = (nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *pooled, nn.Conv2d(64, 128, 3, 1, 1), *pooled)
        self.position = nn.Parameter(torch.randn(1, 64, 128) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 2, 128, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.pool = nn.Linear(128, 1)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(-2, -1) + self.position
        for layer in self.layers:
            x = layer(x)
        weights = F.softmax(self.pool(x), dim=1)
        return self.fc(torch.matmul(weights.transpose(-1, -2), x).squeeze(-2))


def encoder_layer(width: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True)


def each_block(layer: str) -> dict[str, int]:
    """Three heads in every block of the vision transformer."""
    return {f"blocks.{at}.{layer}": 3 for at in range(12)}


_own = partial(VisionTransformer, partial(TransformerBlock, attention=Attention))
_module = partial(VisionTransformer, partial(TransformerBlock, attention=ModuleAttention))
_layer = partial(VisionTransformer, encoder_layer)

ARCHITECTURES = [
    Architecture(name, FAMILY, make, image(side), (output,), heads)
    for name, make, side, output, heads in (
        ("repvgg_a0", repvgg_a0, 64, "fc", {}),
        ("dla_cifar", dla_cifar, 32, "fc", {}),
        ("convnext_tiny", partial(ConvNeXt, (3, 3, 9, 3), (96, 192, 384, 768)), 64, "head", {}),
        ("convmixer_256_8", convmixer_256_8, 32, "37", {}),
        ("mlp_mixer_s16", partial(Mixer, 96, 16, 512, 8), 96, "head", {}),
        ("vit_tiny", _own, 64, "head", each_block("attn.qkv")),
        ("vit_tiny_multihead_module", _module, 64, "head", each_block("attn")),
        ("vit_tiny_encoder_layer", _layer, 64, "head", each_block("self_attn")),
        ("cct_2_cifar", ConvStemTransformer, 32, "fc", {f"layers.{at}.self_attn": 2 for at in range(2)}),
    )
]

"""Text: transformers, recurrent and convolutional classifiers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.registry import BATCH, Architecture, Inputs, tokens

FAMILY = "text"
WORDS = 2000


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
        q = q.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
        v = v.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        out = F.softmax(weights, dim=-1) @ v
        return self.c_proj(out.transpose(1, 2).contiguous().view(batch, length, width))


class GPT(nn.Module):
    """Radford et al. 2019, reduced: learned positions, pre-norm, last layer tied to the embedding."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 6, length: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.attn = nn.ModuleList(CausalAttention(width, heads, length) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for at, (attn, up, down) in enumerate(zip(self.attn, self.up, self.down, strict=True)):
            x = x + attn(self.norms[2 * at](x))
            x = x + down(F.gelu(up(self.norms[2 * at + 1](x))))
        return self.lm_head(self.ln_f(x))


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    """Touvron et al. 2023: root mean square norm, rotary positions, SwiGLU, grouped-query attention."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.wq = nn.Linear(width, heads * self.size, bias=False)
        self.wk = nn.Linear(width, shared * self.size, bias=False)
        self.wv = nn.Linear(width, shared * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, width, bias=False)
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = RootMeanSquareNorm(width), RootMeanSquareNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        out = self.norm1(x)
        q = self.rotate(self.wq(out).view(batch, length, self.heads, self.size), cos, sin)
        k = self.rotate(self.wk(out).view(batch, length, self.shared, self.size), cos, sin)
        v = self.wv(out).view(batch, length, self.shared, self.size)
        repeats = self.heads // self.shared
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        out = self.norm2(x)
        return x + self.w2(F.silu(self.w1(out)) * self.w3(out))

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Llama(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, heads: int = 8, shared: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, shared, 688) for _ in range(depth))
        self.norm = RootMeanSquareNorm(width)
        self.output = nn.Linear(width, WORDS, bias=False)
        self.half = width // heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1], device=ids.device).float()
        angles = torch.outer(steps, 10000.0 ** (-torch.arange(self.half, device=ids.device) / self.half))
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class TextTransformer(nn.Module):
    """nn.TransformerEncoder with sinusoidal positions and a padding mask; the mean of the tokens is classified."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.fc = nn.Linear(width, 4)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        angles = torch.arange(length).unsqueeze(1) * rate
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], 2).view(1, length, width))
        self.scale = math.sqrt(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids) * self.scale + self.pe[:, : input_ids.size(1)]
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1).to(x.dtype)
        return {"logits": self.fc((x * mask).sum(1) / mask.sum(1).clamp(min=1))}


class BertAttention(nn.Module):
    """Devlin et al. 2019, with one layer each for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.heads, self.head_size = heads, width // heads

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], self.heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = map(self.transpose_for_scores, (self.query(x), self.key(x), self.value(x)))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_size) + mask
        context = torch.matmul(nn.functional.softmax(scores, dim=-1), value).permute(0, 2, 1, 3).contiguous()
        context = context.view(*context.size()[:-2], self.heads * self.head_size)
        return self.norm(self.dense(context) + x)


class Bert(nn.Module):
    """BERT-mini: 4 layers of 256; tokens, segments and positions are embedded and summed."""

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.ModuleList(BertAttention(width, heads) for _ in range(depth))
        self.intermediate = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.output = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(input_ids.size(1), device=input_ids.device).unsqueeze(0)
        x = self.norm(self.words(input_ids) + self.segments(token_type_ids) + self.positions(positions))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -10000.0
        for attention, up, down, norm in zip(self.attention, self.intermediate, self.output, self.norms, strict=True):
            x = attention(x, mask)
            x = norm(down(F.gelu(up(x))) + x)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return self.classifier(pooled), pooled


class LSTMClassifier(nn.Module):
    """Bidirectional; the last states of both directions are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 100)
        self.lstm = nn.LSTM(100, 128, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5)
        self.fc = nn.Linear(256, 2)

    def forward(self, ids: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(ids))
        return self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1))


class GRUClassifier(nn.Module):
    """The mean of all outputs is classified, through a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 5)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.gru(self.embedding(ids))
        return self.fc2(F.relu(self.fc1(out.mean(dim=1))))


class LanguageModel(nn.Module):
    """PyTorch's word language model; takes and returns the recurrent state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, 128)
        self.rnn = nn.LSTM(128, 128, 2)
        self.decoder = nn.Linear(128, WORDS)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.rnn(self.encoder(ids), state)
        return F.log_softmax(self.decoder(out).view(-1, WORDS), dim=1), state


class TextCNN(nn.Module):
    """Kim 2014: kernels as wide as the embedding, max pooling over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128)
        self.convs = nn.ModuleList(nn.Conv2d(1, 100, (size, 128)) for size in (3, 4, 5))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(300, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        maps = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        maps = [F.max_pool1d(each, each.size(2)).squeeze(2) for each in maps]
        return self.fc(self.dropout(torch.cat(maps, 1)))


class CharCNN(nn.Module):
    """Zhang et al. 2015, the small one: one-hot characters, 1-D convolutions, two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        pooled, plain = nn.MaxPool1d(3), nn.ReLU()
        self.conv = nn.Sequential(nn.Conv1d(70, 256, 7), plain, pooled, nn.Conv1d(256, 256, 7), plain, pooled)
        self.more = nn.ModuleList(nn.Conv1d(256, 256, 3) for _ in range(4))
        self.fc1, self.fc2, self.fc3 = nn.Linear(8704, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(F.one_hot(ids, 70).float().transpose(1, 2))
        for layer in self.more:
            x = torch.relu(layer(x))
        x = F.max_pool1d(x, 3)
        x = x.view(x.size(0), 256 * 34)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class FastText(nn.Module):
    """Joulin et al. 2017: an embedding bag; texts of any length concatenated, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, 64)
        self.fc = nn.Linear(64, 4)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.fc(self.embedding(text, offsets))


def padded() -> Inputs:
    mask = torch.ones(BATCH, 32, dtype=torch.long)
    mask[1, 20:] = 0
    return {"input_ids": torch.randint(1, WORDS, (BATCH, 32)) * mask, "attention_mask": mask}


def segmented() -> Inputs:
    return {**padded(), "token_type_ids": (torch.arange(32) > 15).long().expand(BATCH, 32)}


def stateful() -> Inputs:
    return torch.randint(WORDS, (35, BATCH)), (torch.zeros(2, BATCH, 128), torch.zeros(2, BATCH, 128))


def bags() -> Inputs:
    return torch.randint(WORDS, (30,)), torch.tensor([0, 12])


_words = tokens(WORDS, 32)
_encoder = {f"encoder.layers.{at}.self_attn": 4 for at in range(2)}
_separate = {f"attention.{at}.{which}": 4 for at in range(4) for which in ("query", "key", "value")}
_grouped = {f"layers.{at}.{which}": heads for at in range(4) for which, heads in (("wq", 8), ("wk", 4), ("wv", 4))}

ARCHITECTURES = [
    Architecture("gpt", FAMILY, GPT, _words, ("lm_head",), {f"attn.{at}.c_attn": 6 for at in range(6)}),
    Architecture("llama", FAMILY, Llama, _words, ("output",), _grouped),
    Architecture("bert_mini", FAMILY, Bert, segmented, ("classifier", "pooler"), _separate),
    Architecture("text_transformer", FAMILY, TextTransformer, padded, ("fc",), _encoder),
    Architecture("lstm_classifier", FAMILY, LSTMClassifier, _words, ("fc",)),
    Architecture("gru_classifier", FAMILY, GRUClassifier, _words, ("fc2",)),
    Architecture("lstm_language_model", FAMILY, LanguageModel, stateful, ("decoder", "rnn")),
    Architecture("text_cnn", FAMILY, TextCNN, _words, ("fc",)),
    Architecture("char_cnn", FAMILY, CharCNN, tokens(70, 1014), ("fc3",)),
    Architecture("fasttext", FAMILY, FastText, bags, ("fc",)),
]

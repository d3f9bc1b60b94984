"""Where channels that must stay are written and read: skip connections of any kind."""

import torch
from torch import nn

from critical_neurons.core.structure import KeptStream
from critical_neurons.reports.diagram import find_rails
from critical_neurons.structure import find_structure


class Added(nn.Module):
    """What each block computes is added to the stream."""

    def __init__(self, stem: nn.Module, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def make_block(*norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(*norm, nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))


def list_streams(model, *, ignore=(), width=6):
    structure = find_structure(model, torch.randn(2, width), ignore=ignore)
    return [(each.writers, each.readers) for each in structure.kept_streams if each.readers]


def test_a_stream_that_is_normalised():
    """Labels end at the layer norms; the flow does not."""
    model = nn.Sequential(Added(nn.Linear(6, 6), *(make_block(nn.LayerNorm(6)) for _ in range(2))), nn.Linear(6, 3))
    written = ("0.stem", "0.blocks.0.3", "0.blocks.1.3")
    assert list_streams(model) == [(written, ("0.blocks.0.1", "0.blocks.1.1", "1"))]


def test_inputs_that_are_added():
    model = Added(nn.Identity(), make_block(), make_block())
    assert list_streams(model) == [(("blocks.0.2", "blocks.1.2"), ("blocks.1.0",))]
    (rail,) = find_rails(find_structure(model, torch.randn(2, 6)))
    assert (rail.writers, rail.readers, rail.kept) == ((1, 3), (2,), True)


def test_ignored_layers_and_those_that_can_shrink():
    model = nn.Sequential(Added(nn.Linear(6, 6), make_block()), nn.Linear(6, 3))
    assert list_streams(model) == []
    assert list_streams(model, ignore=["0.stem"]) == [(("0.stem", "0.blocks.0.2"), ("0.blocks.0.0", "1"))]
    assert [rail.kept for rail in find_rails(find_structure(model, torch.randn(2, 6)))] == [False]


def test_restricted_groups_become_kept():
    model = nn.Sequential(Added(nn.Linear(6, 6), make_block()), nn.Linear(6, 3))
    structure, _ = find_structure(model, torch.randn(2, 6)).restrict({"0.stem": "asked for"})
    assert KeptStream(("0.stem", "0.blocks.0.2"), ("0.blocks.0.0", "1")) in structure.kept_streams


class Written(nn.Module):
    """Two layers fill the halves of one tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x):
        joined = x.new_zeros(len(x), 8)
        joined[:, :4] = self.left(x)
        joined[:, 4:] = self.right(x)
        return self.out(joined)


def test_written_in_place():
    assert list_streams(Written(), ignore=["left", "right"]) == [(("left", "right"), ("out",))]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Linear(6, 5), nn.LSTM(5, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        x = self.embed(x[:, None])
        return self.out(x + self.lstm(x)[0])


def test_modules_left_as_they_are():
    assert list_streams(Recurrent()) == [(("embed", "lstm"), ("lstm", "out"))]
    structure = find_structure(Recurrent(), torch.randn(2, 6))
    assert [layer.name for layer in structure.layers] == ["embed", "lstm", "out"]  # in the order of calls

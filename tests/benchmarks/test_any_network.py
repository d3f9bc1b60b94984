"""What the benchmark of architectures says of a smaller network: its size, or what is wrong with it."""

import pytest
import torch
from torch import nn

import any_network
from any_network import count_macs, measure, measure_compress, measure_ours, measure_torch_pruning
from any_network_page import TABLE, write_page
from architectures import ARCHITECTURES, Architecture
from critical_neurons.errors import InvalidInputError
from critical_neurons_reproduction.store import Cell, Store
from masked_reference import compute_the_same, silence


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


SMALL = Architecture("small", "fully connected", small, lambda: torch.randn(2, 4), ("2",))


def narrow(model, inputs):
    model[0], model[2] = nn.Linear(4, 5), nn.Linear(5, 3)
    return model, {}


def break_it(model, inputs):
    model[0] = nn.Linear(4, 5)
    return model, {}


def lose_an_output(model, inputs):
    model[2] = nn.Linear(8, 2)
    return model, {}


def leave(model, inputs):
    return model, {}


def never_end(model, inputs):
    while True:
        model(inputs)


def refuse(model, inputs):
    raise InvalidInputError("inputs: too few.")


def test_sizes_before_and_after():
    result = measure(SMALL, narrow)
    assert "failed" not in result
    assert result["before"] == {"parameters": 67, "macs": 2 * (4 * 8 + 8 * 3)}
    assert result["after"] == {"parameters": 43, "macs": 2 * (4 * 5 + 5 * 3)}


@pytest.mark.parametrize(
    ("shrink", "said"),
    [
        (break_it, "does not run: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 8x3)"),
        (lose_an_output, "outputs are 1 of [[2, 2]] where they were 1 of [[2, 3]]"),
        (leave, "nothing was removed"),
        (refuse, "refused: inputs: too few."),
    ],
)
def test_says_what_is_wrong(shrink, said):
    assert measure(SMALL, shrink)["failed"] == said


def test_prunes_and_compares_with_the_masked_network():
    result = measure_torch_pruning(SMALL)
    assert result["after"] == {"parameters": 4 * 5 + 5 + 5 * 3 + 3, "macs": 2 * (4 * 5 + 5 * 3)}
    assert result["as_masked"]


def test_removes_the_smallest_units_to_half_of_the_multiply_adds():
    result = measure_ours(SMALL)
    assert result["after"] == {"parameters": 4 * 4 + 4 + 4 * 3 + 3, "macs": 2 * (4 * 4 + 4 * 3)}
    assert (result["removable"], result["channels"]) == (8, 11)
    assert result["reasons"] == ["2: it gives the network's output"]
    assert result["onnx"]["difference"] < 1e-6


def test_searches_and_refits():
    result = measure_compress(SMALL)
    assert result["after"] == {"parameters": 4 * 4 + 4 + 4 * 3 + 3, "macs": 2 * (4 * 4 + 4 * 3)}


def test_nothing_to_remove():
    stiff = Architecture("stiff", "fully connected", lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4), ("",))
    assert measure_ours(stiff)["failed"] == "nothing was removed"


def test_masked_network_differs_where_a_wrong_input_is_silenced():
    model = SMALL.builder()
    masked = SMALL.builder()
    inputs = SMALL.example()
    assert compute_the_same(model, masked, inputs)
    silence(masked[2], [int(model[0](inputs).relu().sum(0).argmax())])
    assert not compute_the_same(model, masked, inputs)


def test_silences_a_grouped_convolution():
    """The channel and those that read it: of four inputs in two groups the third is the first of the second group."""
    layer = nn.Conv2d(4, 6, 1, groups=2)
    silence(layer, [2])
    inputs = torch.randn(1, 4, 5, 5)
    changed = inputs.clone()
    changed[:, 2] += 1
    assert torch.equal(layer(inputs), layer(changed))
    assert (layer.weight == 0).sum() == 3


def test_stops_what_takes_too_long(monkeypatch):
    monkeypatch.setattr(any_network, "TIME_LIMIT", 0.2)
    assert measure(SMALL, never_end)["failed"].startswith("TimeoutError: stopped after")


def test_counts_fused_layers():
    """Gates of the LSTM; projections, products and the two layers behind them in the encoder."""
    assert count_macs(nn.LSTM(5, 7), torch.randn(3, 1, 5)) == 3 * 4 * 7 * (5 + 7)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert count_macs(layer, torch.randn(1, 3, 8)) == 3 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 3 * 3 * 8


def test_page_shows_both_methods(tmp_path):
    store = Store(tmp_path)
    before = {"parameters": 100, "macs": 200}
    measured = {"before": before, "after": {"parameters": 50, "macs": 80}, "commit": "abc", "seconds": 60.0}
    found = {"removable": 6, "channels": 9, "units": 5, "as_masked": True, "onnx": {"difference": 2e-7}}
    failed = {"before": before, "failed": "does not run", "commit": "abc"}
    for name, pruned in (("lenet5", failed), ("vgg11", {**measured, "as_masked": False})):
        store.add(Cell(TABLE, f"{name}/ours", {}), {**measured, **found})
        store.add(Cell(TABLE, f"{name}/torch_pruning", {"version": "1"}), pruned)
        store.add(Cell(TABLE, f"{name}/compress", {}), {**measured, "as_masked": True})
    earlier = {key: value for key, value in {**measured, **found}.items() if key not in ("commit", "onnx")}
    store.add(Cell(TABLE, "resnet18/ours", {}), earlier)
    store.add(Cell(TABLE, "resnet18/compress", {}), earlier)
    page = tmp_path / "page.md"
    write_page(store.find_all(TABLE), ARCHITECTURES, page)
    text = page.read_text()
    assert "1; one run of commit abc, 5 minutes of one core; 1 networks, marked °, in earlier runs." in text
    assert "Handled: critical_neurons 3 of 3; Torch-Pruning 1 of 2." in text
    assert "| lenet5 | 100 | 200 | 5 | 6 of 9 | 50% / 40% | no | 50% / 40% | 2e-07 |" in text
    assert "| vgg11 | 100 | 200 | 5 | 6 of 9 | 50% / 40% | 50% / 40% ≠ | 50% / 40% | 2e-07 |" in text
    assert "| resnet18 ° | 100 | 200 | 5 | 6 of 9 | 50% / 40% |  |  |  |" in text
    assert "compared with the smaller network: 2 of 2" in text
    assert "Of 1 pruned by Torch-Pruning, 0 equal the masked network; not vgg11." in text
    assert "* lenet5: `does not run`" in text

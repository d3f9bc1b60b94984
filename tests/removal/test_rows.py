from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError
from critical_neurons.removal import joined
from critical_neurons.removal.rows import (
    as_whole,
    count_rows,
    digest_inputs,
    find_tensors,
    gather_inputs,
    gather_labelled,
    is_whole,
    name_tensors,
    split_arguments,
    split_rows,
    take_rows,
)

ROWS = torch.arange(12.0).reshape(6, 2)
OTHERS = torch.arange(6)


@dataclass
class Outputs:
    logits: object
    loss: object = None


def test_tensors_of_any_nesting_have_names():
    value = {"a": [ROWS, (OTHERS, "text", None)], "b": Outputs(OrderedDict(c=ROWS)), "kind": Outputs}
    assert [name for name, _ in name_tensors(value)] == ["a.0", "a.1.0", "b.logits.c"]
    assert [len(each) for each in find_tensors(value)] == [6, 6, 6]
    assert list(name_tensors(ROWS)) == [("", ROWS)]


def test_rows_are_split_without_copies():
    parts = list(split_rows({"x": ROWS, "y": OTHERS}, 4))
    assert [(len(part["x"]), part["y"].tolist()) for part in parts] == [(4, [0, 1, 2, 3]), (2, [4, 5])]
    assert parts[0]["x"].data_ptr() == ROWS.data_ptr()


class TestGather:
    @pytest.mark.parametrize(
        "inputs", [ROWS, ROWS.numpy(), [ROWS[:4], ROWS[4:]], DataLoader(ROWS, 4), DataLoader(TensorDataset(ROWS), 4)]
    )
    def test_inputs_alone(self, inputs):
        found, labels = gather_labelled(inputs)
        assert torch.equal(found, ROWS)
        assert labels is None

    def test_labels_beside_the_batches(self):
        found, labels = gather_labelled(DataLoader(TensorDataset(ROWS, OTHERS), 4))
        assert torch.equal(found, ROWS)
        assert torch.equal(labels, OTHERS)
        assert torch.equal(gather_inputs([(ROWS, OTHERS)]), ROWS)

    def test_several_inputs_keep_their_types(self):
        inputs = (ROWS.half(), OTHERS.numpy().astype(np.int32))
        assert [each.dtype for each in gather_inputs(inputs)] == [torch.float16, torch.int32]
        found, labels = gather_labelled([({"x": ROWS, "y": OTHERS}, OTHERS)] * 2)
        assert {name: len(each) for name, each in found.items()} == {"x": 12, "y": 12}
        assert len(labels) == 12

    def test_labels_that_are_no_array_are_left_out(self):
        targets = [{"boxes": ROWS}, {"boxes": ROWS}]
        assert gather_labelled([(ROWS, targets[0]), (ROWS, targets[1])])[1] is None

    def test_batches_of_several_kinds(self):
        with pytest.raises(InvalidInputError, match=r"one kind and shape; found \(batch, 2\) and \(batch\)\."):
            gather_inputs([ROWS, OTHERS])

    def test_values_that_are_not_finite(self):
        with pytest.raises(InvalidInputError, match="NaN or infinite values in data points 1"):
            gather_inputs(torch.tensor([0.0, torch.nan]))


class TestWhole:
    """Tensors that differ in how many rows they have, or that are said to belong together."""

    UNEVEN = (ROWS, {"offsets": [OTHERS[:2]], "mode": "sum", "none": None})

    @pytest.mark.parametrize("inputs", [UNEVEN, as_whole(ROWS), as_whole((ROWS, OTHERS)), torch.tensor(1.0)])
    def test_one_row(self, inputs):
        assert is_whole(inputs)
        assert count_rows(inputs) == 1
        taken = take_rows(inputs, torch.tensor([0, 0, 0]))
        assert type(taken) is type(inputs)
        for one, other in zip(find_tensors(taken), find_tensors(inputs), strict=True):
            assert torch.equal(one, other)
        assert list(split_rows(inputs, 1)) == [inputs]
        assert len(digest_inputs(inputs)) == 1

    def test_what_is_no_tensor_stays(self):
        gathered = gather_inputs((ROWS.numpy(), {"offsets": [OTHERS[:2]], "mode": "sum", "none": None}))
        assert gathered[1]["mode"] == "sum"
        assert gathered[1]["none"] is None
        assert torch.equal(gathered[0], ROWS)

    def test_arguments(self):
        assert split_arguments(as_whole({"x": ROWS})) == ((), {"x": ROWS})
        assert split_arguments(({"x": ROWS},)) == (({"x": ROWS},), {})

    def test_batches_that_cannot_be_joined(self):
        with pytest.raises(InvalidInputError, match=r"cannot be joined, .* Give one batch"):
            gather_inputs([{"x": ROWS, "y": OTHERS[:2]}] * 2)

    def test_nothing_but_settings(self):
        with pytest.raises(InvalidInputError, match="no tensor or array among them"):
            gather_inputs({"mode": "sum"})


def test_rows_without_further_axes_are_known_again():
    assert digest_inputs(OTHERS) == digest_inputs(OTHERS.float()[:, None])
    assert len(set(digest_inputs((ROWS, OTHERS)))) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_batches_beyond_what_is_held_lie_in_a_file_and_are_the_same(monkeypatch, dtype):
    whole = (torch.rand(10, 3, 2) * 4).to(dtype)
    monkeypatch.setattr(joined, "MOST_BYTES", whole[:5].numel() * whole.element_size())
    read = []

    def give():
        for part in whole.split(3):
            read.append(len(part))
            yield part, torch.arange(len(part))

    found, labels = gather_labelled(give())
    assert read == [3, 3, 3, 1]  # once each: a generator does
    assert found.dtype == dtype
    assert torch.equal(found, whole)
    assert torch.equal(take_rows(found, torch.tensor([9, 0])), whole[[9, 0]])
    assert len(labels) == 10
    found[0] = 0  # what works in place on it does no harm
    assert not found[0].any()


def test_batches_in_a_file_are_searched_as_those_in_memory(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    inputs = torch.randn(40, 4)
    held = cn.search(model, inputs, units=0.5, effort="quick")
    monkeypatch.setattr(joined, "MOST_BYTES", 0)
    found = cn.search(model, DataLoader(TensorDataset(inputs), 8), units=0.5, effort="quick")
    for name, values in held.values_by_layer.items():
        np.testing.assert_array_equal(found.values_by_layer[name], values)

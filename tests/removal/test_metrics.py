import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import critical_neurons as cn
from critical_neurons.core.costs import count_cost
from critical_neurons.errors import InvalidInputError
from critical_neurons.parallel.threads import on_threads
from critical_neurons.removal.metrics import (
    LEAST_SAMPLES,
    count_bytes,
    count_classes,
    count_macs,
    count_parameters,
    measure_accuracy,
    measure_activations,
    predict,
    predict_by,
    time_in_turns,
)
from tests.any_models import build_any, make_inputs, run
from tests.zoo import ZOO, share_case

FLOAT = 4
"""Bytes."""


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


class Functional(nn.Module):
    """A residual branch and a convolution, all by functions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2, 3, 3))

    def forward(self, x):
        return (x + F.relu(F.conv2d(x, self.weight, padding=1))).sum((2, 3))


@pytest.mark.parametrize("name", ZOO)
def test_multiply_adds_are_those_the_plan_counts(name):
    """Two counts that know nothing of each other: torch's, and that of the structure."""
    case = share_case(name)
    structure = cn.inspect(case.model, case.inputs)
    counted = count_macs(case.model, torch.from_numpy(case.inputs))
    assert counted == count_cost(structure, np.ones(structure.unit_count + 1), "macs") > 0
    assert count_parameters(case.model) == sum(values.numel() for values in case.model.parameters())


def test_multiply_adds_by_hand():
    assert count_macs(mlp(), torch.rand(7, 4)) == 4 * 5 + 5 * 4 + 4 * 3
    convolution = nn.Conv2d(4, 6, 3, groups=2)
    assert count_macs(convolution, torch.rand(7, 4, 5, 5)) == 6 * 3 * 3 * (2 * 3 * 3)
    assert count_macs(Functional(), torch.rand(2, 2, 5, 5)) == 2 * 2 * 9 * 25


def test_multiply_adds_of_several_inputs():
    assert count_macs(build_any("two inputs"), make_inputs("two inputs")) == 5 * 8 + 16 * 3
    assert count_macs(build_any("dicts"), make_inputs("dicts")) == 5 * 8 + 8 * 5 + 8 * 4


def test_multiply_adds_inside_fused_calls():
    """Attention and recurrent layers are one call each where they are run; they are counted all the same."""
    length, width = 7, 8
    attention = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True).eval()
    weights = length * (4 * width * width + 2 * width * 16)
    assert count_macs(attention, torch.rand(2, length, width)) == weights + 2 * length * length * width
    assert count_macs(nn.LSTM(5, 6, batch_first=True), torch.rand(2, length, 5)) == length * 4 * 6 * (5 + 6)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mkldnn.enabled


def test_activations_of_several_inputs():
    """Eight-byte integers stay what they are."""
    outputs = 8 + 8 + 16  # the tanh, what is looked up, both side by side
    assert measure_activations(build_any("two inputs"), make_inputs("two inputs")) == FLOAT * (5 + outputs) + 8


def test_activations_of_a_transformer_layer_are_counted_inside_it():
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True).eval()
    assert measure_activations(layer, torch.rand(3, 5, 8)) >= FLOAT * 5 * (8 + 2 * 32)  # the wide layer and its ReLU
    assert torch.backends.mha.get_fastpath_enabled()


def test_activations_by_hand():
    """The input is alive throughout; at most two layers' outputs beside it."""
    assert measure_activations(mlp(), torch.rand(7, 4)) == FLOAT * (4 + 5 + 5)
    in_place = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    assert measure_activations(in_place, torch.rand(7, 4)) == FLOAT * (4 + 5 + 4)
    flattened = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    assert measure_activations(flattened, torch.rand(1, 2, 2, 2)) == FLOAT * (8 + 3)
    assert measure_activations(flattened.double(), torch.rand(1, 2, 2, 2)) == 2 * FLOAT * (8 + 3)
    # the image, and behind the convolution: its output, its ReLU, their sum with the image
    assert measure_activations(Functional(), torch.rand(2, 2, 5, 5)) == FLOAT * (50 + 50 + 50)


def test_bytes_are_those_of_a_file(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert count_bytes(model) == (tmp_path / "model.safetensors").stat().st_size


def test_accuracy_and_predictions():
    model = nn.Sequential(nn.Identity())
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert predict(model, outputs, batch_size=2).tolist() == [0, 1, 0]
    assert measure_accuracy(model, outputs, torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)
    assert count_classes(model, outputs) == 2


def test_predictions_of_any_inputs():
    for name in ("two inputs", "grouped"):
        model, inputs = build_any(name), make_inputs(name)
        expected = run(model, inputs).argmax(1)
        assert torch.equal(predict(model, inputs, batch_size=4), expected)
        assert measure_accuracy(model, inputs, expected) == 1
    wrapped = predict_by(lambda rows: {"logits": rows}, torch.eye(3), batch_size=2)
    assert wrapped.tolist() == [0, 1, 2]


def test_the_model_stays_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    model[2].eval()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    rows = torch.rand(3, 4)
    for measure in (count_macs, measure_activations, predict):
        measure(model, rows)
    assert [module.training for module in model] == [True, True, False, True]
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_inputs_and_outputs_that_do_not_fit():
    with pytest.raises(InvalidInputError, match=r"the model does not run on shape \(2, 3\)"):
        predict(mlp(), torch.rand(2, 3))
    with pytest.raises(InvalidInputError, match=r"it returns shape \(2, 4, 4\)\. Accepted: a tensor of outputs"):
        predict(nn.Identity(), torch.rand(2, 4, 4))
    with pytest.raises(
        InvalidInputError, match=r"it returns shape \(10, 5\), \(10, 4\)\. Accepted: a tensor of outputs"
    ):
        predict(build_any("dicts"), make_inputs("dicts"))
    with pytest.raises(InvalidInputError, match=r"does not run on shape \(10, 5\), \(10,\): .*unexpected keyword"):
        predict(build_any("two inputs"), dict(zip("xy", make_inputs("two inputs"), strict=True)))


class TestTime:
    def test_calls_take_turns(self):
        order = []

        def call(name):
            order.append(name)
            time.sleep(2e-3)

        samples = time_in_turns([lambda: call("a"), lambda: call("b")], repeats=4)
        assert order == [*"aabb", *"abbaabba"]  # two of each to warm up
        assert [len(each) for each in samples] == [4, 4]
        assert all(seconds >= 2e-3 for each in samples for seconds in each)

    def test_short_calls_are_repeated_within_a_sample(self):
        calls = []
        samples = time_in_turns([lambda: calls.append(1)], repeats=2)
        assert len(calls) > 100
        assert max(samples[0]) < 1e-4

    def test_long_calls_are_sampled_less(self, monkeypatch):
        monkeypatch.setattr("critical_neurons.removal.metrics.TIME_LIMIT", 0.01)
        assert len(time_in_turns([lambda: time.sleep(5e-3)], repeats=100)[0]) == LEAST_SAMPLES

    def test_threads_are_put_back(self):
        before = torch.get_num_threads()
        with on_threads(before + 1):
            assert torch.get_num_threads() == before + 1
        assert torch.get_num_threads() == before

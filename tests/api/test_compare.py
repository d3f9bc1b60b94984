import copy
import sys

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.removal.differences import compare_outputs
from critical_neurons.removal.metrics import count_macs, count_parameters, measure_accuracy
from critical_neurons.removal.rows import find_tensors
from tests.any_models import ANY, ROWS, build_any, halve, make_inputs

INPUTS = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))
OTHERS = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(2))
SCORED = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def build(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(9 * width, 3)
    ).eval()


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.fixture(scope="module")
def smaller():
    plan = cn.plan(cn.score(build(), SCORED[:5], formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)
    return cn.prune(build(), plan, INPUTS)


@pytest.fixture(scope="module")
def labels():
    """The model's own predictions, but for a few."""
    with torch.no_grad():
        found = build()(INPUTS).argmax(1)
    found[:4] = (found[:4] + 1) % 3
    return found


def compare(smaller, labels, model=None, **settings):
    settings = {"onnx": False, "repeats": 2, "batch_sizes": (1,), **settings}
    return cn.compare(model or build(), smaller, INPUTS, labels, **settings)


@pytest.fixture(scope="module")
def steps():
    return []


@pytest.fixture(scope="module")
def comparison(smaller, labels, steps):
    return cn.compare(
        build(), smaller, INPUTS, labels, calibration=OTHERS, batch_sizes=(1, 3), repeats=2, progress=steps.append
    )


class TestWhole:
    def test_accuracy_and_agreement(self, comparison, smaller, labels):
        assert comparison.inputs == 40
        assert comparison.before.accuracy == 0.9
        assert comparison.after.accuracy == measure_accuracy(smaller, INPUTS, labels)
        with torch.no_grad():
            same = build()(INPUTS).argmax(1) == smaller(INPUTS).argmax(1)
        assert comparison.agreement == pytest.approx(float(same.float().mean()))
        assert comparison.difference == compare_outputs(build(), smaller, INPUTS).difference > 0
        assert (comparison.data, comparison.int8_data) == ("test", "test")

    def test_sizes(self, comparison):
        before, after = comparison.before, comparison.after
        assert before.parameters == 8 * 9 + 8 + 72 * 3 + 3
        assert after.parameters == 4 * 9 + 4 + 36 * 3 + 3
        assert before.macs == 8 * 9 * 36 + 72 * 3 == 2 * after.macs
        assert before.peak_activation_bytes == 4 * (64 + 2 * 8 * 36)
        assert before.bytes_on_disk > after.bytes_on_disk > 4 * after.parameters
        assert before.onnx_bytes > after.onnx_bytes > 4 * after.parameters
        assert after.int8_bytes

    def test_int8_is_close(self, comparison):
        for each in (comparison.before, comparison.after):
            assert each.int8_accuracy == pytest.approx(each.accuracy, abs=0.15)

    def test_latencies(self, comparison):
        for each in (comparison.before, comparison.after):
            assert [(found.runtime, found.batch_size, found.samples) for found in each.latencies] == [
                *(("torch", 1, 2), ("torch", 3, 2), ("onnxruntime", 1, 2), ("onnxruntime", 3, 2)),
            ]
            assert all(0 < found.lower <= found.median <= found.upper < 1 for found in each.latencies)

    def test_what_it_says(self, comparison, steps):
        text = str(comparison)
        assert "accuracy, test data" in text
        assert "torch.utils.flop_counter" in text
        assert "threads: 1" in text
        assert "ranges of activations from the first 20 calibration inputs" in text
        assert {"torch", "onnxruntime", "python", "critical_neurons"} <= comparison.versions.keys()
        assert comparison.machine["processor"]
        assert steps[0] == "accuracy and sizes"
        assert steps[-1] == "latency in onnxruntime, batch of 3"

    def test_it_survives_save_and_load(self, comparison, tmp_path):
        comparison.save(tmp_path / "comparison.json")
        assert cn.Comparison.load(tmp_path / "comparison.json") == comparison


class TestData:
    def test_calibration_data_is_called_so(self, smaller, labels):
        comparison = compare(smaller, labels, data="calibration")
        assert (comparison.data, comparison.int8_data) == ("calibration", "calibration")
        assert "test" not in str(comparison)

    def test_calibration_images_are_found_among_the_inputs(self, smaller, labels):
        seen = torch.cat([OTHERS, INPUTS[7:9]]).double()
        comparison = compare(smaller, labels, calibration=seen)
        assert comparison.data == "calibration"
        assert "2 of the inputs are calibration inputs" in str(comparison)
        assert compare(smaller, labels, calibration=OTHERS).data == "test"

    def test_a_smaller_network_remembers_what_it_was_scored_and_refitted_on(self, labels, tmp_path):
        plan = cn.plan(cn.score(build(), INPUTS[:5], labels[:5], formulation="linearised"), units=0.5)
        scored = cn.prune(build(), plan, OTHERS)
        assert compare(scored, labels).data == "calibration"
        assert "5 of the inputs are calibration inputs" in str(compare(scored, labels))
        plan = cn.plan(cn.score(build(), SCORED[:5], formulation="linearised"), units=0.5)
        refitted = cn.prune(build(), plan, SCORED, compensate="least_squares", calibration=INPUTS[:30])
        assert compare(refitted, labels).data == "calibration"
        cn.save(refitted, tmp_path / "smaller", plan=plan)
        assert "30 of the inputs" in str(compare(cn.load(tmp_path / "smaller", build), labels))
        assert compare(cn.prune(build(), plan, INPUTS), labels).data == "test"

    def test_int8_ranges_from_the_inputs_make_their_accuracy_calibration(self, smaller, labels):
        comparison = compare(smaller, labels)
        assert (comparison.data, comparison.int8_data) == ("test", "calibration")

    def test_data_that_could_not_be_looked_up_is_reported(self, smaller, labels):
        forgetful = copy.deepcopy(smaller)
        del forgetful.calibrated_on
        assert "Assumed to be test data" in str(compare(forgetful, labels))
        assert "Assumed to be test data" not in str(compare(smaller, labels))
        assert "Assumed to be test data" not in str(compare(forgetful, labels, calibration=OTHERS))
        assert "Assumed to be test data" not in str(compare(forgetful, labels, data="calibration"))

    def test_arrays_and_batches(self, smaller, labels):
        pairs = [(INPUTS[:30], labels[:30]), (INPUTS[30:], labels[30:])]
        first = cn.compare(build(), smaller, pairs, onnx=False, repeats=1)
        second = cn.compare(build(), smaller, INPUTS.numpy(), labels.numpy(), onnx=False, repeats=1)
        assert first.after.accuracy == second.after.accuracy == compare(smaller, labels).after.accuracy


class TestModels:
    def test_they_stay_as_they_are(self, smaller, labels):
        model = build().train()
        threads = torch.get_num_threads()
        compare(smaller, labels, model=nn.DataParallel(model), threads=threads + 1)
        assert model.training
        assert torch.get_num_threads() == threads

    def test_an_export_that_fails_is_said(self, labels):
        model = nn.Sequential(Branching(), build())
        comparison = compare(model, labels, model=model, onnx=True)
        assert comparison.before.onnx_bytes is None
        assert comparison.before.latency("onnxruntime", 1) is None
        assert comparison.before.latency("torch", 1).median > 0
        assert str(comparison).count("Not measured in onnxruntime: ONNX export failed: ") == 1

    def test_a_missing_extra_is_said(self, smaller, labels, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        comparison = compare(smaller, labels, onnx=True)
        assert comparison.before.int8_bytes is None
        assert "pip install 'critical_neurons[onnx]'" in str(comparison)
        assert "int8" not in " ".join(row[0] for row in comparison.rows)


class TestAnything:
    @pytest.mark.parametrize("name", ANY)
    def test_any_model(self, name):
        model, inputs = build_any(name), make_inputs(name)
        smaller = cn.prune(model, halve(model, inputs), inputs)
        found = cn.compare(model, smaller, inputs, onnx=False, repeats=1, batch_sizes=(1, 2 * ROWS))
        assert found.inputs == ROWS
        assert found.difference == compare_outputs(model, smaller, inputs).difference > 0
        for each, measured in ((model, found.before), (smaller, found.after)):
            assert measured.accuracy is None
            assert measured.parameters == count_parameters(each)
            assert measured.macs == count_macs(each, inputs)
            assert [latency.batch_size for latency in measured.latencies] == [1, 2 * ROWS]
        assert found.after.macs < found.before.macs
        assert (found.agreement is not None) == (name in ("two inputs", "grouped"))
        assert "No accuracy" in str(found)
        assert "accuracy" not in " ".join(row[0] for row in found.rows)

    def test_labels_for_several_inputs(self):
        model, inputs = build_any("two inputs"), make_inputs("two inputs")
        labels = model(*inputs).argmax(1)
        settings = {"onnx": False, "repeats": 1, "batch_sizes": (1,)}
        for given in ((inputs, labels), ([(inputs, labels)],)):
            assert cn.compare(model, model, *given, **settings).before.accuracy == 1

    def test_labels_that_are_no_classes(self, smaller):
        pairs = [(INPUTS, torch.rand(40, 3))]
        found = cn.compare(build(), smaller, pairs, onnx=False, repeats=1)
        assert found.before.accuracy is None
        assert found.agreement is not None
        assert "the labels beside the inputs are torch.float32 of shape (40, 3)" in str(found)

    def test_labels_of_something_else_than_classes_are_not_looked_at(self):
        images = make_inputs("u-net")
        found = cn.compare(build_any("u-net"), build_any("u-net"), images, images, onnx=False, repeats=1)
        assert (found.before.accuracy, found.agreement, found.difference) == (None, None, 0.0)
        assert "those are for one output (batch, classes)" in str(found)

    def test_several_inputs_and_outputs_in_onnxruntime(self):
        inputs = make_inputs("dicts")
        found = cn.compare(build_any("dicts"), build_any("dicts"), inputs, repeats=1, batch_sizes=(2,))
        assert found.before.onnx_bytes > 4 * found.before.parameters
        assert found.before.latency("onnxruntime", 2).median > 0
        assert found.before.int8_bytes is None
        assert "Not measured in int8: that is for a single input of floating-point numbers." in str(found)

    def test_int8_without_labels(self):
        model, inputs = build_any("regression"), make_inputs("regression")
        found = cn.compare(model, model, inputs, repeats=1, batch_sizes=(1,))
        assert found.before.int8_bytes > 0
        assert found.before.int8_accuracy is None

    def test_calibration_of_several_inputs(self):
        model, inputs, others = build_any("two inputs"), make_inputs("two inputs"), make_inputs("two inputs", seed=2)
        settings = {"onnx": False, "repeats": 1, "batch_sizes": (1,)}
        assert cn.compare(model, model, inputs, calibration=others, **settings).data == "test"
        seen = tuple(torch.cat([one, other[:2]]) for one, other in zip(others, inputs, strict=True))
        found = cn.compare(model, model, inputs, calibration=seen, **settings)
        assert "2 of the inputs are calibration inputs" in str(found)

    def test_large_inputs_are_run_in_small_batches(self, monkeypatch):
        sizes = []
        model, inputs = build_any("u-net"), make_inputs("u-net")
        watched = copy.deepcopy(model)
        watched.register_forward_pre_hook(lambda _, args: sizes.append(max(len(each) for each in find_tensors(args))))
        monkeypatch.setattr("critical_neurons.api.compare.MOST_BYTES", 2 * 10**4)
        found = cn.compare(watched, model, inputs, onnx=False, repeats=1, batch_sizes=(1,))
        assert 2 <= 2 * 10**4 // found.before.peak_activation_bytes < ROWS
        assert max(sizes) == 2 * 10**4 // found.before.peak_activation_bytes


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"data": "training"}, "data: found 'training'. Accepted: 'test', 'calibration'"),
            ({"repeats": 0}, "repeats: found 0"),
            ({"threads": True}, "threads: found True"),
            ({"batch_sizes": (1, 0.5)}, "batch_sizes: found 0.5"),
        ],
    )
    def test_settings(self, smaller, labels, settings, message):
        with pytest.raises(InvalidSettingError, match=message):
            compare(smaller, labels, **settings)

    def test_labels(self, smaller, labels):
        for wrong in (torch.rand(40), np.zeros((40, 1), dtype=int), np.zeros(39, dtype=int), [True] * 40):
            with pytest.raises(
                InvalidInputError, match=r"labels: found torch\.\w+ of shape .* Accepted: integers of"
            ):
                compare(smaller, wrong)
        with pytest.raises(InvalidInputError, match=r"labels: found str\. Accepted: a tensor or array"):
            compare(smaller, "none")
        with pytest.raises(InvalidInputError, match=r"labels: found 3\. Accepted: 0 to 2"):
            compare(smaller, np.full(40, 3))

    def test_calibration_of_another_shape(self, smaller, labels):
        with pytest.raises(InvalidInputError, match=r"calibration: found inputs \('batch', 1, 9, 9\) beside"):
            compare(smaller, labels, calibration=torch.rand(2, 1, 9, 9))

    def test_a_smaller_network_of_another_task(self, labels):
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        with pytest.raises(InvalidInputError, match=r"smaller: it gives outputs \(40, 2\), the model \(40, 3\)"):
            compare(other, labels)

import logging
import os
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import ExportError, InvalidInputError, MissingExtraError, OutputError
from critical_neurons.io.exporters import check_export, convert_to_onnx, export_onnx, export_pt2
from critical_neurons.io.onnx_runtime import open_onnx, quantise_onnx
from critical_neurons.removal.rows import find_tensors
from tests.any_models import build_any, make_inputs, run

INT8_TOLERANCE = 0.1
"""Largest difference of outputs around one between a small network and its int8 version."""

INPUTS = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 3)
    ).eval()


@pytest.fixture(scope="module")
def content():
    return convert_to_onnx(build(), INPUTS)


def assert_silence(capfd, caplog, recwarn):
    """Nothing printed, logged or warned; the traces torch keeps for itself are below all that."""
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not recwarn.list


class FixedBatch(nn.Module):
    """Its forward knows how many inputs it was written for."""

    def forward(self, x):
        return x.reshape(3, -1)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class TestOnnx:
    def test_one_file_with_a_dynamic_batch_and_not_a_word(self, tmp_path, capfd, caplog, recwarn):
        done = export_onnx(build(), tmp_path / "model.onnx", INPUTS)
        assert_silence(capfd, caplog, recwarn)
        assert os.listdir(tmp_path) == ["model.onnx"]
        assert 0 <= done.difference < 1e-5
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        assert [(each.name, each.shape) for each in session.get_inputs()] == [("input", ["batch", 1, 8, 8])]
        assert [each.name for each in session.get_outputs()] == ["output"]
        for count in (1, 2, 40):
            assert session.run(None, {"input": INPUTS[:count].numpy()})[0].shape == (count, 3)

    def test_a_double_precision_convolution_is_refused_with_a_way_out(self, tmp_path):
        with pytest.raises(ExportError, match=r"no convolutions in float64: convert with model\.float\(\)\."):
            export_onnx(build().double(), tmp_path / "model.onnx", INPUTS)
        assert os.listdir(tmp_path) == []

    def test_missing_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(MissingExtraError, match=r"onnxruntime is not installed.*critical_neurons\[onnx\]"):
            export_onnx(build(), tmp_path / "model.onnx", INPUTS)


class TestPt2:
    def test_a_dynamic_batch_and_not_a_word(self, tmp_path, capfd, caplog, recwarn):
        done = export_pt2(build(), tmp_path / "model.pt2", INPUTS)
        assert_silence(capfd, caplog, recwarn)
        assert 0 <= done.difference < 1e-5
        module = torch.export.load(tmp_path / "model.pt2").module()
        for count in (1, 2, 40):
            assert torch.allclose(module(INPUTS[:count]), build()(INPUTS[:count]), atol=1e-6)
        assert os.listdir(tmp_path) == ["model.pt2"]

    def test_the_model_stays_as_it_is(self, tmp_path):
        model = build().train()
        before = {name: values.clone() for name, values in model.state_dict().items()}
        export_pt2(model, tmp_path / "model.pt2", INPUTS)
        assert all(module.training for module in model.modules())
        assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())

    def test_an_old_file_is_kept_when_the_new_one_is_wrong(self, tmp_path, monkeypatch):
        """The comparison is what stands between a wrong export and its name."""
        path = tmp_path / "model.pt2"
        path.write_bytes(b"old")
        monkeypatch.setattr("critical_neurons.io.exporters.EXPORT_TOLERANCE", {torch.float32: -1.0})
        with pytest.raises(ExportError, match="other outputs than the model"):
            export_pt2(build(), path, INPUTS)
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["model.pt2"]

    def test_a_full_disk(self, tmp_path, monkeypatch):
        def fail(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="No space left"):
            export_pt2(build(), tmp_path / "model.pt2", INPUTS)
        assert os.listdir(tmp_path) == []


class Classify(nn.Module):
    def forward(self, x):
        return x.argmax(1)


class TestAnything:
    def test_names_in_onnx(self, tmp_path):
        """Inputs as in the forward, outputs as in the dict unless an input is called so."""
        cn.export(build_any("dicts"), tmp_path / "dicts.onnx", make_inputs("dicts"))
        session = onnxruntime.InferenceSession(tmp_path / "dicts.onnx", providers=["CPUExecutionProvider"])
        assert [(each.name, each.shape) for each in session.get_inputs()] == [
            ("x", ["batch", 5]),
            ("mask", ["batch", 5]),
        ]
        assert [each.name for each in session.get_outputs()] == ["output_x", "found.0"]
        cn.export(build_any("recurrent"), tmp_path / "tuple.onnx", make_inputs("recurrent"))
        session = onnxruntime.InferenceSession(tmp_path / "tuple.onnx", providers=["CPUExecutionProvider"])
        assert [each.name for each in session.get_inputs()] == ["input"]
        assert [each.name for each in session.get_outputs()] == ["output_0", "output_1"]

    def test_several_inputs_in_order_or_by_name(self, tmp_path):
        model, inputs = build_any("two inputs"), make_inputs("two inputs")
        named = {"category": inputs[1], "numbers": inputs[0]}
        for place, given in enumerate((inputs, named)):
            cn.export(model, tmp_path / f"{place}.onnx", given)
            found = open_onnx(tmp_path / f"{place}.onnx")(given)
            assert torch.allclose(found, run(model, inputs), atol=1e-5)

    @pytest.mark.parametrize("name", ["dicts", "raw parameters", "tied", "u-net"])
    def test_with_torch_export(self, name, tmp_path):
        model, inputs = build_any(name), make_inputs(name)
        cn.export(model, tmp_path / "model.pt2", inputs)
        module = torch.export.load(tmp_path / "model.pt2").module()
        found, expected = (list(find_tensors(run(each, inputs))) for each in (module, model))
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, expected, strict=True))
        if name == "dicts":
            assert run(module, inputs).keys() == {"x", "found", "count"}


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
class TestBoth:
    def test_models_that_cannot_be_exported(self, ending, tmp_path, capfd, caplog, recwarn):
        with pytest.raises(
            ExportError, match=r"failed: \S.*\. Neither the number of inputs nor their values may decide"
        ):
            cn.export(Branching(), tmp_path / f"model.{ending}", INPUTS)
        assert_silence(capfd, caplog, recwarn)
        assert os.listdir(tmp_path) == []

    def test_models_that_do_not_run_on_the_inputs(self, ending, tmp_path):
        with pytest.raises(InvalidInputError, match=r"the model does not run on \(40, 1, 8, 8\)"):
            cn.export(FixedBatch(), tmp_path / f"model.{ending}", INPUTS)
        assert os.listdir(tmp_path) == []

    def test_a_path_that_cannot_be_written(self, ending, tmp_path):
        with pytest.raises(OutputError, match="does not exist"):
            cn.export(build(), tmp_path / "missing" / f"model.{ending}", INPUTS)


class TestCheck:
    def test_differences_are_seen(self):
        model = build()
        assert check_export(model, model, INPUTS) == 0.0
        with pytest.raises(ExportError, match=r"other outputs than the model \(difference 1\.00e-02\)"):
            check_export(model, lambda rows: model(rows) + 0.01, INPUTS)
        with pytest.raises(ExportError, match="other outputs than the model"):
            check_export(model, lambda rows: model(rows) * torch.nan, INPUTS)

    def test_other_shapes_are_seen(self):
        with pytest.raises(ExportError, match=r"shape \(3, 3\) for 1 inputs, the model \(1, 3\)"):
            check_export(build(), lambda rows: torch.zeros(3, 3), INPUTS)

    def test_every_output_is_compared(self):
        model, inputs = build_any("dicts"), make_inputs("dicts")

        def worse(rows):
            found = run(model, rows)
            return {**found, "found": [found["found"][0] + 0.01]}

        assert check_export(model, lambda rows: run(model, rows), inputs) == 0.0
        with pytest.raises(ExportError, match=r"found\.0: the export gives other outputs than the model"):
            check_export(model, worse, inputs)
        with pytest.raises(ExportError, match=r"the export gives 1 tensors, the model 2\."):
            check_export(model, lambda rows: run(model, rows)["x"], inputs)

    def test_whole_numbers_are_compared(self):
        model = nn.Sequential(nn.Flatten(), Classify())
        assert check_export(model, model, INPUTS) == 0.0
        with pytest.raises(ExportError, match=r"difference 1\.00e\+00"):
            check_export(model, lambda rows: model(rows) + 1, INPUTS)

    def test_inputs_a_file_does_not_take(self, content):
        with pytest.raises(ExportError, match=r"running in onnxruntime failed: .*INVALID_ARGUMENT"):
            open_onnx(content)(torch.rand(2, 1, 9, 9))

    def test_an_example_that_is_none(self):
        with pytest.raises(InvalidInputError, match="example: give a batch of inputs"):
            check_export(build(), build(), torch.zeros(0, 1, 8, 8))


class TestInt8:
    def test_it_is_smaller_and_close(self, content):
        small = quantise_onnx(content, INPUTS)
        nodes = [node.op_type for node in onnx.load_from_string(small).graph.node]
        assert "QuantizeLinear" in nodes
        found = open_onnx(small)(INPUTS)
        with torch.no_grad():
            difference = (found - build()(INPUTS)).abs().max()
        assert 0 < difference < INT8_TOLERANCE

    def test_ranges_come_from_the_calibration_inputs(self, content):
        """Inputs a hundred times smaller leave no room for the real ones."""
        narrow = open_onnx(quantise_onnx(content, INPUTS / 100))(INPUTS)
        assert (narrow - build()(INPUTS)).abs().max() > 2 * INT8_TOLERANCE

    def test_weights_per_channel(self, content):
        scales = [np.size(onnx.numpy_helper.to_array(each)) for each in parse(quantise_onnx(content, INPUTS))]
        assert 8 in scales

    def test_not_a_word(self, content, capfd, caplog, recwarn):
        quantise_onnx(content, INPUTS)
        assert_silence(capfd, caplog, recwarn)


def parse(content):
    """The scales of an int8 network."""
    return [each for each in onnx.load_from_string(content).graph.initializer if each.name.endswith("_scale")]

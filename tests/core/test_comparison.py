import json
from dataclasses import replace

import pytest

from critical_neurons.core.comparison import Comparison, Latency, Measurement
from critical_neurons.errors import InvalidFileError
from tests.forging import seal

BEFORE = Measurement(
    accuracy=0.9,
    parameters=1000,
    macs=20000,
    peak_activation_bytes=800,
    bytes_on_disk=4_200_000_000_000,
    latencies=(Latency("torch", 1, 0.004, 0.003, 0.005, 30), Latency("onnxruntime", 64, 0.02, 0.02, 0.02, 5)),
    onnx_bytes=12_345,
)
AFTER = Measurement(
    accuracy=0.885,
    parameters=500,
    macs=5000,
    peak_activation_bytes=400,
    bytes_on_disk=42_000_000,
    latencies=(Latency("torch", 1, 0.002, 0.002, 0.002, 30),),
)


def make(**changes):
    fields = {
        "before": BEFORE,
        "after": AFTER,
        "agreement": 0.95,
        "difference": 0.123456,
        "inputs": 200,
        "data": "test",
        "int8_data": "calibration",
        "threads": 1,
        "notes": ("200 inputs.", "Not measured in int8: no time."),
        "machine": {"processor": "abacus"},
        "versions": {"torch": "2"},
    }
    return Comparison(**{**fields, **changes})


def test_table():
    assert str(make()).splitlines() == [
        "                              before     after",
        "accuracy, test data           90.00%    88.50%   -1.50 points",
        "same predictions                        95.00%",
        "difference, test data                   12.35%",
        "parameters                     1,000       500          50.0%",
        "multiply-adds                 20,000     5,000          25.0%",
        "peak activations               800 B     400 B          50.0%",
        "size on disk              4,200.0 GB   42.0 MB           0.0%",
        "size as ONNX                 12.3 kB      none",
        "torch, batch of 1           4.000 ms  2.000 ms  2.00x as fast",
        "onnxruntime, batch of 64   20.000 ms      none",
        "",
        "200 inputs.",
        "Not measured in int8: no time.",
    ]


def test_calibration_data_is_called_so():
    rows = [row[0] for row in make(data="calibration").rows]
    assert "accuracy, calibration data" in rows
    assert not any("test" in row for row in rows)


def test_what_is_not_measured_is_left_out():
    """A model without classes."""
    before, after = replace(BEFORE, accuracy=None), replace(AFTER, accuracy=None)
    names = [row[0] for row in make(before=before, after=after, agreement=None).rows]
    assert names[:2] == ["difference, test data", "parameters"]
    assert [row[0] for row in make(difference=None).rows][1:3] == ["same predictions", "parameters"]


def test_data_is_test_or_calibration():
    with pytest.raises(ValueError, match="data: found 'training'"):
        make(data="training")


def test_latency_by_name():
    assert BEFORE.latency("torch", 1).median == 0.004
    assert BEFORE.latency("torch", 2) is None


@pytest.mark.parametrize("changes", [{}, {"agreement": None, "difference": None}])
def test_it_survives_save_and_load(changes, tmp_path):
    comparison = make(**changes)
    comparison.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == comparison
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["before"]["latencies"][0]["median"] == 0.004
    assert content["data"] == "test"


def test_files_of_another_version(tmp_path):
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps({**make().to_dict(), "version": 1}))
    with pytest.raises(InvalidFileError, match="format version 1, of another release; this one reads version 2"):
        Comparison.load(path)


@pytest.mark.parametrize("change", [{"data": "unknown"}, {"before": {}}, {"extra": 1}, {"notes": 3}])
def test_damaged_files(change, tmp_path):
    path = tmp_path / "comparison.json"
    path.write_text(seal({**make().to_dict(), **change}))
    with pytest.raises(InvalidFileError, match=r"comparison\.json: (its content is inconsistent|has entries that)"):
        Comparison.load(path)

"""Pages by command: of a compression, of a folder; and what is installed."""

import json
from importlib import metadata

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import critical_neurons as cn
from critical_neurons.cli.commands import app
from critical_neurons.cli.doctor import PURPOSES, Requirement, read_requirements
from tests.api.test_report import read

MODEL = "critical_neurons.cli.digits:small_network"


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A compressed network, with all that the command can write."""
    folder = tmp_path_factory.mktemp("compressed")
    torch.manual_seed(0)
    np.savez(
        folder / "data.npz", inputs=np.random.default_rng(0).random((60, 1, 8, 8), "f4"), labels=np.arange(60) % 10
    )
    done = run(
        *("compress", MODEL, folder / "data.npz", "--units", "0.2", "--effort", "quick", "--compensate", "none"),
        *("--no-onnx", "--save", folder / "smaller", "--report", folder / "report.html", "--json"),
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["written"]["report"] == str(folder / "report.html")
    return folder


def test_a_folder_makes_the_page_that_compress_made(place):
    done = run("report", place / "smaller", "--output", place / "again.html", "--data", place / "data.npz")
    assert done.exit_code == 0, done.output
    made, again = read(place / "report.html"), read(place / "again.html")
    assert again.pop("title") == "smaller"
    del made["title"]
    digests = again["facts"]["Digests"]
    assert {name for name in digests if name.startswith("SHA-256 of ")} == {
        f"SHA-256 of {name}" for name in ("model.safetensors", "plan.json", "scores.json", "comparison.json")
    }
    again["facts"]["Digests"] = made["facts"]["Digests"]
    assert again == made
    pictures = (place / "again.html").read_text(encoding="utf-8").count("data:image/png")
    assert pictures == (place / "report.html").read_text(encoding="utf-8").count("data:image/png") > 0


def test_the_network_still_loads(place):
    model = cn.load(place / "smaller", __import__("critical_neurons.cli.digits", fromlist=["_"]).small_network)
    assert model[0].out_channels == 3


def test_a_folder_of_the_plan_alone(place, tmp_path):
    from critical_neurons.cli.digits import small_network

    plan = cn.Plan.load(place / "smaller" / "plan.json")
    cn.save(cn.load(place / "smaller", small_network), tmp_path / "bare", plan=plan)
    done = run("report", tmp_path / "bare", "--output", tmp_path / "bare.html", "--title", "Bare")
    assert done.exit_code == 0, done.output
    data = read(tmp_path / "bare.html")
    assert data["title"] == "Bare"
    assert [gain["name"] for gain in data["gains"]] == ["Multiply-adds", "Parameters", "Units"]
    assert data["strips"][0]["scores"] is None
    added = run(
        *("report", tmp_path / "bare", "--output", tmp_path / "bare.html"),
        *("--scores", place / "smaller" / "scores.json", "--comparison", place / "smaller" / "comparison.json"),
    )
    assert added.exit_code == 0, added.output
    assert read(tmp_path / "bare.html")["gains"] == read(place / "report.html")["gains"]


def test_a_folder_that_was_changed(place, tmp_path):
    import shutil

    copied = shutil.copytree(place / "smaller", tmp_path / "changed")
    (copied / "scores.json").write_bytes(b"{}")
    done = run("report", copied, "--output", tmp_path / "report.html")
    assert done.exit_code == 2
    assert "scores.json: damaged, or changed after it was saved" in done.output
    assert not (tmp_path / "report.html").exists()
    done = run("report", tmp_path / "nowhere", "--output", tmp_path / "report.html")
    assert "no model.safetensors and no plan.json and no provenance.json there" in done.output


def test_a_report_does_not_stand_in_the_way(place):
    done = run("report", place / "smaller", "--output", place / "smaller" / "report.html")
    assert "lies in the folder of --save" in done.output
    arguments = ("compress", MODEL, place / "data.npz", "--units", "0.2", "--output", place / "a.pt2")
    done = run(*arguments, "--report", place / "data.npz")
    assert "this command reads it, for DATA" in done.output


def test_doctor():
    done = run("doctor", "--json")
    assert done.exit_code == 0, done.output
    reported = json.loads(done.stdout)
    assert {"package": "torch", "met": True}.items() <= next(
        each for each in reported["required"] if each["package"] == "torch"
    ).items()
    assert {"onnx", "dask", "scip"} <= set(reported["extras"])
    assert set(reported["extras"]) == set(PURPOSES)
    table = run("doctor").stdout
    assert "torch-pruning" in table
    assert all(f"pip install 'critical_neurons[{extra}]'" in table for extra in reported["missing"])


def test_doctor_of_a_package_that_is_not_installed(monkeypatch):
    def fail(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", fail)
    done = run("doctor")
    assert done.exit_code == 2
    assert "pip install --editable ." in done.output


def test_requirements_of_extras_that_consist_of_others():
    found = read_requirements(
        [
            "numpy>=1.26",
            'critical_neurons[b]; extra == "a"',
            'critical_neurons[c]; extra == "b"',
            'absent-package>=2.0; extra == "c"',
            "torch>=99; extra == 'old'",
        ]
    )
    assert found["a"] == found["b"] == found["c"] == [Requirement("absent-package", ">=2.0", None)]
    assert [each.met for each in (*found[""], *found["a"], *found["old"])] == [True, False, False]
    assert "(needs >=99)" in str(found["old"][0])


@pytest.mark.usefixtures("short_descent")
def test_sweep(place, tmp_path):
    sweep = (
        "sweep",
        MODEL,
        place / "data.npz",
        "--effort",
        "quick",
        "--compensate",
        "none",
        "--folder",
        tmp_path / "all",
    )
    weights = tmp_path / "weights.safetensors"
    from safetensors.torch import save_file

    from critical_neurons.cli.digits import small_network

    save_file(small_network().state_dict(), weights)
    sweep += ("--weights", weights)
    pytest.importorskip("matplotlib").use("agg")
    done = run(
        *(*sweep, "--units", "0.5,0.2", "--methods", "search,random"),
        *("--picture", tmp_path / "curve.svg", "--report", tmp_path / "curve.html"),
    )
    assert done.exit_code == 0, done.output
    assert len([line for line in done.stdout.splitlines() if line.startswith(("search", "random"))]) == 4
    assert (tmp_path / "curve.svg").read_bytes().startswith(b"<?xml")
    assert len(read(tmp_path / "curve.html")["trade_off"]["dots"]) == 4
    assert read(tmp_path / "curve.html")["call"].startswith("critical-neurons")
    picked = run(
        *(*sweep, "--units", "0.2", "--pick", "0.2", "--save", tmp_path / "smaller", "--json"),
        *("--report", tmp_path / "picked.html"),
    )
    assert picked.exit_code == 0, picked.output
    assert "0 networks to find, 1 found before" in picked.stderr
    assert cn.load(tmp_path / "smaller", small_network)[0].out_channels == 3
    assert read(tmp_path / "picked.html")["gains"][0]["name"] == "Accuracy, calibration data"
    for wrong, said in (
        (("--units", "0.5", "--macs", "0.5"), "Give the shares of one of"),
        (("--units", "0.5", "--pick", "0.5"), "--pick and --save go together"),
        (("--units", "0.5", "--pick", "0.4", "--save", tmp_path / "other"), "--pick: 0.4 is not among the shares"),
        (("--units", "0.5", "--picture", tmp_path / "curve.doc"), "--picture: "),
    ):
        bad = run(*sweep, *wrong)
        assert bad.exit_code == 2
        assert said in bad.output

import json
import os
import re
import shlex
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import critical_neurons as cn
from critical_neurons.api.compress_task import PAPER
from critical_neurons.cli.commands import app
from critical_neurons.cli.digits import Removal
from critical_neurons.cli.tables import describe_batch, judge
from critical_neurons.cli.terminal import show_progress
from critical_neurons.io.onnx_runtime import open_onnx
from critical_neurons.removal.metrics import measure_accuracy

COMMANDS = [
    *("demo", "inspect", "score", "prune", "compress", "sweep", "lossless", "evaluate", "report", "export", "doctor")
]
TINY_MODELS = """
import torch
from torch import nn

def seeded(build):
    def factory():
        torch.manual_seed(0)
        return build().eval()
    return factory

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
    def forward(self, x):
        return self.layer(x), x

class Branching(Pair):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)

class Pieces(nn.Module):
    def forward(self, x):
        return x.tanh() if x.sum() > 0 else x.sigmoid()

def chain(*widths):
    layers = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])

net = seeded(lambda: chain(6, 8, 5, 3))
wide = seeded(lambda: chain(6, 40, 20, 3))
other = seeded(lambda: chain(6, 7, 5, 3))
parallel = seeded(lambda: nn.DataParallel(chain(6, 8, 5, 3)))
compiled = seeded(lambda: torch.compile(chain(6, 8, 5, 3)))
nothing = seeded(lambda: chain(6, 3))
one_logit = seeded(lambda: chain(6, 5, 1))
half = seeded(lambda: chain(6, 8, 5, 3).half())
gelu = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)))
softmax = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Softmax(1)))
pair = seeded(Pair)
branching = seeded(Branching)
flat = seeded(lambda: nn.Sequential(nn.Flatten(), chain(6, 8, 5, 2)))
fixed = seeded(lambda: nn.Sequential(chain(6, 8, 5, 4), Pieces(), nn.Linear(4, 3)))
hybrid = seeded(lambda: nn.Sequential(nn.GELU(), chain(6, 8, 5, 4), Pieces(), nn.Linear(4, 3)))
"""

INPUTS = np.random.default_rng(0).random((9, 6)).astype(np.float32)
LABELS = np.repeat([0, 1, 2], 3)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """A current directory with models and data."""
    (tmp_path / "tiny_models.py").write_text(TINY_MODELS)
    np.savez(tmp_path / "data.npz", inputs=INPUTS, labels=LABELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def files():
    return sorted({*os.listdir()} - {"__pycache__"})


def refuse(*arguments):
    """The message of a command that must fail as a user's mistake does, and write nothing."""
    before = files()
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert files() == before
    return " ".join(result.stderr.split())


@cache
def find_scores(*arguments):
    """The file that a scoring writes, which is the same for every test."""
    succeed("score", *arguments, "--output", "scores.json")
    return Path("scores.json").read_bytes()


@pytest.fixture
def scores(workspace):
    (workspace / "scores.json").write_bytes(find_scores("tiny_models:net", "data.npz"))
    return workspace / "scores.json"


class TestHelp:
    @pytest.mark.parametrize("command", [[], *[[command] for command in COMMANDS]])
    def test_every_command_explains_itself_by_example(self, command):
        text = succeed(*command, "--help").stdout
        assert f"critical-neurons {' '.join(command)}".strip() in text.partition("Example")[2]

    def test_versions(self):
        """By the module too: where several are installed, it is clear which one runs."""
        output = succeed("--version").stdout
        assert re.fullmatch(r"python [\d.]+, critical_neurons [\d.]+, torch \S+, highspy [\d.]+\n", output)
        command = [sys.executable, "-m", "critical_neurons", "--version"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == output

    def test_every_command_is_listed(self):
        listed = re.findall(r"^  (\w+)  ", succeed("--help").stdout.partition("Commands:")[2], re.MULTILINE)
        assert listed == COMMANDS

    def test_help_imports_nothing_heavy(self):
        code = (
            "import sys\nfrom critical_neurons.cli.commands import app\n"
            f"for command in [[], *{[[command] for command in COMMANDS]}]:\n"
            "    app([*command, '--help'], standalone_mode=False)\n"
            "    print('HEAVY', *{'torch', 'numpy', 'scipy', 'highspy', 'datasets'} & set(sys.modules))"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        output = [line for line in result.stdout.splitlines() if line.startswith("HEAVY")]
        assert output == ["HEAVY"] * (1 + len(COMMANDS))


def installed_command():
    return str(Path(sys.executable).with_name("critical-neurons"))


class TestInspect:
    def test_table(self):
        text = succeed("inspect", "lenet5").stdout
        assert re.search(r"^0 +Conv2d +6 +yes", text, re.MULTILINE)
        assert re.search(r"^11 +Linear +10 +no: \w+", text, re.MULTILINE)
        assert "226 units in 4 of 5 layers can be removed" in text

    def test_own_model_with_a_shape_or_data(self):
        by_shape = succeed("inspect", "tiny_models:net", "--input-shape", "6").stdout
        assert by_shape == succeed("inspect", "tiny_models:net", "--data", "data.npz").stdout
        assert "13 units in 2 of 3 layers" in by_shape

    def test_json(self):
        result = json.loads(succeed("inspect", "tiny_models:net", "--input-shape", "6", "--json").stdout)
        assert [(layer["name"], layer["channels"], layer["removable"]) for layer in result["layers"]] == [
            ("0", 8, 8),
            ("2", 5, 5),
            ("4", 3, 0),
        ]
        assert result["layers"][2]["reason"] == "it gives the network's output"
        assert [group["layers"] for group in result["groups"]] == [["0"], ["2"]]

    def test_own_model_without_a_shape(self):
        assert "with --input-shape 3,32,32 or --data" in refuse("inspect", "tiny_models:net")

    @pytest.mark.parametrize("shape", ["a,b", "3,0", "2.5", "3,,3"])
    def test_shapes_that_are_none(self, shape):
        assert "--input-shape" in refuse("inspect", "fc3", "--input-shape", shape)

    @pytest.mark.parametrize("shape", ["100000,100000,100000", "1e12,1e12", "1e30"])
    def test_shapes_that_are_too_large(self, shape):
        message = refuse("inspect", "fc3", "--input-shape", shape)
        assert f"--input-shape: {shape} is more than the memory holds" in message

    def test_a_layer_that_no_program_reads(self):
        assert "can be removed" in succeed("inspect", "tiny_models:gelu", "--input-shape", "6").stdout
        message = refuse("score", "tiny_models:gelu", "data.npz")
        assert "1: cannot read GELU" in message
        assert "reads(GELU)" in message


class TestScore:
    def test_scores_are_saved_and_reported(self, workspace):
        result = succeed("score", "tiny_models:net", "data.npz", "--output", "scores.json")
        scores = cn.Scores.load("scores.json")
        assert {name: len(values) for name, values in scores.items()} == {"0": 8, "2": 5}
        assert scores.status.sentence in result.stdout
        assert re.search(r"^0 +8 +[01]\.\d{3} ", result.stdout, re.MULTILINE)
        assert f"objective {scores.objective:.6g}" in result.stdout
        assert "9 inputs of shape 6, labels 0 0 0 1 1 1 2 2 2" in result.stderr
        assert files() == ["data.npz", "scores.json", "tiny_models.py"]

    def test_json_is_all_there_is_on_standard_output(self):
        result = json.loads(succeed("score", "tiny_models:net", "data.npz", "--json").stdout)
        assert result["labels"] == LABELS.tolist()
        assert result["scores"]["status"] == "optimal"
        assert result["output"] is None

    def test_a_table_of_all_units(self):
        result = succeed("score", "tiny_models:net", "data.npz", "--output", "scores.json", "--csv", "scores.csv")
        assert "Table written to scores.csv" in result.stderr
        cn.Scores.load("scores.json").to_csv("expected.csv")
        assert Path("scores.csv").read_text() == Path("expected.csv").read_text()
        assert len(Path("scores.csv").read_text().splitlines()) == 1 + 8 + 5 + 3
        alone = json.loads(succeed("score", "tiny_models:net", "data.npz", "--csv", "alone.csv", "--json").stdout)
        assert (alone["output"], alone["csv"]) == (None, "alone.csv")

    def test_every_setting_arrives(self):
        result = succeed(
            *("score", "tiny_models:net", "data.npz", "--json", "--loss-weight", 2, "--input-radius", 1e-3),
            *("--objective", "paper", "--rescale", 1, "--no-integer", "--by-class", "--solver", "highs"),
            *("--time-limit", 20, "--gap", 1e-3, "--threads", 1, "--seed", 7, "--ignore", "0"),
            *("--bounds", "backward"),
        )
        scores = json.loads(result.stdout)["scores"]
        expected = {
            "formulation": {
                "name": "paper",
                "loss_weight": 2.0,
                "input_radius": 1e-3,
                "objective": "paper",
                "rescale": 1.0,
                "loss": "auto",
                "integer": False,
                "bounds": "backward",
            },
            "by_class": True,
            "solver": {
                "name": "highs",
                "options": {},
                "time_limit": 20.0,
                "gap": 1e-3,
                "threads": 1,
                "seed": 7,
            },
            "ignore": ["0"],
        }
        assert {name: scores["settings"][name] for name in expected} == expected
        assert list(scores["scores"]) == ["2"]
        assert len(scores["parts"]) == 3

    def test_the_best_loss_weight(self):
        best = ("score", "tiny_models:net", "data.npz", "--loss-increase", 0.01)
        scores = json.loads(succeed(*best, "--json").stdout)["scores"]
        assert scores["settings"]["formulation"]["loss_weight"] == {"loss_increase": 0.01}
        assert scores["dual"]["softmax"] <= scores["dual"]["level"]
        assert f"Lagrangian dual: loss weight {scores['dual']['loss_weight']:.4g} after" in succeed(*best).stdout

    def test_notes_of_the_network_are_shown(self):
        assert "Note: " in succeed("score", "tiny_models:softmax", "data.npz").stdout

    def test_scores_that_say_nothing_are_reported(self):
        assert "Every unit scores 1" in succeed("score", "tiny_models:net", "data.npz", "--time-limit", 1e-9).stderr
        assert "Every unit scores 1" not in succeed("score", "tiny_models:net", "data.npz").stderr

    def test_averaged_scores_have_a_table_too(self):
        assert "objective none" in succeed("score", "tiny_models:net", "data.npz", "--by-class").stdout

    def test_classes_on_processes_and_those_of_before(self, tmp_path):
        by_class = ("score", "tiny_models:net", "data.npz", "--by-class")
        succeed(*by_class, "--output", tmp_path / "alone.json")
        succeed(*by_class, "--jobs", 2, "--output", tmp_path / "spread.json")
        alone, spread = (cn.Scores.load(tmp_path / name) for name in ("alone.json", "spread.json"))
        assert all((alone[name] == spread[name]).all() for name in alone)
        again = json.loads(succeed(*by_class, "--earlier", tmp_path / "spread.json", "--json").stdout)["scores"]
        assert again["parts"] == [part.to_dict() for part in spread.parts]  # down to the seconds

    def test_a_plan_or_scores_are_judged(self, scores):
        exact = (
            "score",
            "tiny_models:net",
            "data.npz",
            "--formulation",
            "exact",
            "--binary",
            "--units",
            "0.5",
            "--per-class",
            "1",
        )
        cut = ("prune", "tiny_models:net", "--scores", scores, "--units", 0.5, "--input-shape", 6)
        succeed(*cut, "--plan", "plan.json")
        by_plan = json.loads(succeed(*exact, "--incumbent", "plan.json", "--json").stdout)["scores"]
        assert by_plan["incumbent"]["rule"] == cn.Plan.load("plan.json").rule
        assert by_plan["objective"] <= by_plan["incumbent"]["objective"]
        succeed(*exact, "--output", "exact.json")
        by_scores = succeed(*exact, "--incumbent", "exact.json")
        assert "Note: incumbent: the plan given (scores of 0 or 1) has objective" in by_scores.stdout
        for path, message in {
            "data.npz": "data.npz: not a JSON file",
            "missing.json": "missing.json: cannot be read",
            "other.json": "other.json: neither a plan nor scores. Accepted: what score --output or prune --plan",
            "scores.json": "do not say which units stay",
        }.items():
            Path("other.json").write_text('{"format": ["plan"]}')
            assert message in refuse(*exact, "--incumbent", path)
        judged = ("score", "tiny_models:net", "data.npz", "--incumbent", "plan.json")
        assert "It goes with --formulation exact" in refuse(*judged)
        assert "binary=True" in refuse(*judged, "--formulation", "exact")

    def test_jobs_go_with_classes(self):
        message = refuse("score", "tiny_models:net", "data.npz", "--jobs", 2)
        assert "--jobs, --backend and --earlier: go with --by-class" in message

    def test_choice_of_the_data_arrives(self):
        chosen = succeed("score", "tiny_models:net", "data.npz", "--per-class", 1)
        assert "3 inputs of shape 6, labels 0 1 2" in chosen.stderr

    def test_look_of_the_data_arrives(self):
        np.savez("shifted.npz", inputs=INPUTS * 2 + 0.5, labels=LABELS)
        plain = succeed("score", "tiny_models:net", "data.npz", "--json").stdout
        shifted = succeed("score", "tiny_models:net", "shifted.npz", "--mean", "0.5", "--std", "2", "--json").stdout
        objectives = [json.loads(text)["scores"]["objective"] for text in (plain, shifted)]
        assert objectives[0] == pytest.approx(objectives[1], rel=1e-4)

    def test_size_and_channels_arrive(self):
        np.savez("images.npz", inputs=np.full((2, 28, 28), 99, np.uint8), labels=[0, 1])
        options = ("--resize", 32, "--channels", 3, "--time-limit", 1)
        assert "2 inputs of shape 3x32x32" in succeed("score", "fc3", "images.npz", *options).stderr

    @pytest.mark.parametrize("model", ["parallel", "compiled"])
    def test_wrapped_models_are_unwrapped(self, model, scores):
        result = succeed("score", f"tiny_models:{model}", "data.npz", "--json")
        assert json.loads(result.stdout)["scores"]["scores"] == json.loads(scores.read_text())["scores"]

    def test_untrained_built_in_is_reported(self, workspace):
        np.savez(workspace / "images.npz", inputs=np.zeros((2, 3, 32, 32), np.float32), labels=[0, 1])
        assert "without --weights is untrained" in succeed("score", "fc3", "images.npz", "--time-limit", 1).stderr

    def test_weights_arrive(self, workspace):
        state = load_tiny("other").state_dict()
        save_file({name: torch.zeros_like(values) for name, values in state.items()}, workspace / "zeros.safetensors")
        arguments = ("score", "tiny_models:other", "data.npz", "--json")
        plain = json.loads(succeed(*arguments).stdout)["scores"]["structure"]["fingerprint"]
        zeros = json.loads(succeed(*arguments, "--weights", "zeros.safetensors").stdout)["scores"]["structure"][
            "fingerprint"
        ]
        assert plain["architecture"] == zeros["architecture"]
        assert plain["weights"] != zeros["weights"]

    def test_interrupt_outside_the_solver(self, monkeypatch):
        def interrupt(*_args, **_kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr("critical_neurons.io.models.load_model", interrupt)
        result = run("score", "tiny_models:net", "data.npz", "--output", "scores.json")
        assert result.exit_code == 130
        assert "Interrupted." in result.stderr
        assert not Path("scores.json").exists()


def fail_for_space(_descriptor):
    raise OSError(28, "No space left on device")


def load_tiny(name):
    from critical_neurons.io.models import load_model

    return load_model(f"tiny_models:{name}")


class TestBadInputOfScore:
    def refuse(self, model="net", data="data.npz", *options):
        return refuse("score", f"tiny_models:{model}", data, "--output", "scores.json", *options)

    def with_data(self, inputs=INPUTS, labels=LABELS):
        np.savez("bad.npz", inputs=inputs, labels=labels)
        return self.refuse("net", "bad.npz")

    def test_wrong_shape(self):
        assert "(9, 5)" in self.with_data(inputs=INPUTS[:, :5])

    def test_labels_outside_the_classes(self):
        assert "labels: found 3. Accepted: 0 to 2" in self.with_data(labels=LABELS + 1)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_inputs_that_are_no_numbers(self, value):
        inputs = INPUTS.copy()
        inputs[4, 1] = value
        assert "NaN or infinite values in data points 4" in self.with_data(inputs=inputs)

    def test_empty_batch(self):
        assert "holds no data" in self.with_data(inputs=INPUTS[:0], labels=LABELS[:0])

    def test_class_that_is_too_small(self):
        assert "class 0 has 3" in self.refuse("net", "data.npz", "--per-class", 4)

    def test_weights_that_are_no_numbers(self):
        state = load_tiny("net").state_dict()
        torch.save({name: values * np.nan for name, values in state.items()}, "nan.pt")
        assert "Not finite: 0.weight" in self.refuse("net", "data.npz", "--weights", "nan.pt")

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ("nothing", "nothing to score"),
            ("one_logit", "the logistic loss takes labels of 0 and 1"),
            ("pair", "a single tensor of logits"),
            ("branching", "cannot be traced"),
            ("half", "half precision"),
            ("gelu", "cannot read GELU"),
            ("absent", "has no absent"),
        ],
    )
    def test_models_that_cannot_be_scored(self, model, message):
        assert message in self.refuse(model)

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--loss-weight", "-1", "loss_weight: found -1.0"),
            ("--input-radius", "-0.1", "input_radius: found -0.1"),
            ("--gap", "nan", "gap: found nan"),
            ("--time-limit", "0", "time_limit: found 0.0"),
            ("--threads", "0", "threads: found 0"),
            ("--objective", "printed", "'balanced', 'authors', 'paper'"),
            ("--solver", "cplex", "cplex"),
            ("--solver", "cvxpy:NOSUCH", "NOSUCH"),
            ("--ignore", "features.0", "features.0"),
            ("--mean", "a,b", "--mean: numbers with commas"),
            ("--std", "0", "standard deviations above zero"),
            ("--channels", "2", "channels: 1 (grey) or 3 (RGB)"),
            ("--per-class", "0", "at least one"),
            ("--weights", "gone.pt", "gone.pt: no such file"),
            ("--loss-weight", "five", "Invalid value for '--loss-weight'"),
            ("--loss-increase", "-0.1", "loss_increase: found -0.1"),
            ("--mean-score", "1", "mean_score: found 1.0"),
            ("--seed", "-1", "seed: found -1"),
            ("--macs", "1.5", "macs: found 1.5"),
            ("--scope", "global", "budget: found none"),
            (
                "--binary",
                "--no-integer",
                "--binary: no setting of --formulation paper. It goes with --formulation exact",
            ),
            ("--solver-option", "threads", "--solver-option: name=value, got 'threads'"),
        ],
    )
    def test_settings(self, option, value, message):
        assert message in self.refuse("net", "data.npz", option, value)

    def test_unsafe_pickle(self):
        torch.save(load_tiny("net"), "whole.pt")
        message = self.refuse("net", "data.npz", "--weights", "whole.pt")
        assert "can run code when loaded" in message
        assert "state_dict()" in message

    def test_weights_of_another_network(self):
        torch.save({"state_dict": load_tiny("other").state_dict()}, "other.pt")
        message = self.refuse("net", "data.npz", "--weights", "other.pt")
        assert "0.weight is (7, 6) in the file and (8, 6) in the model" in message

    @pytest.mark.parametrize(
        ("output", "message"),
        [("missing/scores.json", "does not exist"), (".", "is a directory"), ("data.npz/x", "not a")],
    )
    def test_unwritable_output_is_reported_before_anything_is_loaded(self, output, message):
        for option in ("--output", "--csv"):
            assert message in refuse("score", "no_such_module:net", "no_such.npz", option, output)

    def test_scores_and_table_in_one_file(self):
        Path("folder").mkdir()
        for table in ("scores.json", "folder/../scores.json"):
            message = self.refuse("net", "data.npz", "--csv", table)
            assert "scores.json: given to --output and --csv" in message

    def test_what_is_read_is_not_written_over(self):
        torch.save(load_tiny("net").state_dict(), "net.pt")
        before = {name: Path(name).read_bytes() for name in ("data.npz", "net.pt")}
        for table, reader in {"./data.npz": "DATA", "net.pt": "--weights"}.items():
            message = self.refuse("net", "data.npz", "--weights", "net.pt", "--csv", table)
            assert f"this command reads it, for {reader}" in message
        assert {name: Path(name).read_bytes() for name in before} == before

    def test_missing_arguments(self):
        assert "DATA" in refuse("score", "fc3")

    def test_error_for_machines(self):
        result = run("score", "tiny_models:net", "gone.npz", "--json")
        assert result.exit_code == 2
        error = json.loads(result.stdout)["error"]
        assert error["type"] == "InvalidFileError"
        assert "gone.npz: no such file" in error["message"]

    def test_a_failing_save_leaves_nothing(self, monkeypatch):
        monkeypatch.setattr(os, "fsync", fail_for_space)
        result = run("score", "tiny_models:net", "data.npz", "--output", "scores.json")
        assert result.exit_code == 2
        assert "No space left on device" in result.stderr
        assert files() == ["data.npz", "tiny_models.py"]


class TestPrune:
    def test_smaller_weights_load_into_the_smaller_model(self, scores):
        succeed(
            *("prune", "tiny_models:net", "--scores", scores, "--units", 0.5, "--input-shape", 6),
            *("--output", "smaller.safetensors", "--plan", "plan.json"),
        )
        plan = cn.Plan.load("plan.json")
        assert [len(layer.kept) for layer in plan.layers] == [4, 2, 3]
        smaller = cn.prune(load_tiny("net"), plan, torch.rand(2, 6))
        written = load_file("smaller.safetensors")
        assert written.keys() == smaller.state_dict().keys()
        assert all(torch.equal(values, written[name]) for name, values in smaller.state_dict().items())
        with safe_open("smaller.safetensors", "pt") as file:
            assert json.loads(file.metadata()["critical_neurons.plan"]) == plan.to_dict()

    def test_tables(self, scores):
        text = succeed(
            *("prune", "tiny_models:net", "--scores", scores, "--units", 0.5, "--data", "data.npz", "--dry-run"),
        ).stdout
        assert re.search(r"^0 +8 +4 +4 +\w+", text, re.MULTILINE)
        assert re.search(r"^parameters +119 +47 \(39%\)$", text, re.MULTILINE)
        assert re.search(r"^accuracy, calibration data +\d+\.\d\d% +\d+\.\d\d%$", text, re.MULTILINE)

    @pytest.mark.parametrize("dtype", [np.float64, np.uint8])
    def test_accuracy_on_data_of_another_type(self, scores, dtype):
        np.savez("typed.npz", inputs=(INPUTS * 200).astype(dtype), labels=LABELS)
        succeed("prune", "tiny_models:net", "--scores", scores, "--units", 0.5, "--data", "typed.npz", "--dry-run")

    def test_other_weights_of_the_same_network_are_reported(self, scores):
        torch.save({name: values + 1 for name, values in load_tiny("net").state_dict().items()}, "moved.pt")
        arguments = ("prune", "tiny_models:net", "--scores", scores, "--units", 0.5, "--input-shape", 6, "--dry-run")
        assert "with other weights" in succeed(*arguments, "--weights", "moved.pt").stderr
        assert "with other weights" not in succeed(*arguments).stderr

    def test_a_plan_that_changes_nothing_is_reported(self, scores):
        arguments = ("prune", "tiny_models:net", "--scores", scores, "--input-shape", 6, "--dry-run")
        assert "removes nothing" in succeed(*arguments, "--threshold", 0).stderr
        assert "removes nothing" not in succeed(*arguments, "--units", 0.5).stderr

    def test_dry_run_writes_nothing(self, scores):
        before = files()
        result = succeed(
            *("prune", "tiny_models:net", "--scores", scores, "--threshold", 0.5, "--input-shape", 6, "--dry-run"),
            *("--output", "smaller.safetensors", "--plan", "plan.json"),
        )
        assert "nothing written" in result.stderr
        assert files() == before

    @pytest.mark.parametrize("rule", [("--threshold", "mean"), ("--units", "0.5", "--scope", "global")])
    def test_rules_arrive(self, scores, rule):
        arguments = ("prune", "tiny_models:net", "--scores", scores, "--input-shape", 6, "--dry-run", "--json")
        result = json.loads(succeed(*arguments, *rule, "--min-units", 2, "--round-to", 2).stdout)
        kwargs = {"threshold": "mean"} if "mean" in rule else {"units": 0.5, "scope": "global"}
        expected = cn.plan(cn.Scores.load(scores), **kwargs, min_units=2, round_to=2)
        assert result["plan"] == expected.to_dict()
        assert result["parameters"]["after"] < result["parameters"]["before"] == 119
        assert result["written"] == {}

    def test_layers_to_keep_arrive(self, scores):
        arguments = ("prune", "tiny_models:net", "--scores", scores, "--input-shape", 6, "--dry-run")
        text = succeed(*arguments, "--units", 0.5, "--keep", "0").stdout
        assert re.search(r"^0 +8 +8 +0 +kept, as asked", text, re.MULTILINE)
        assert re.search(r"^2 +5 +2 +3 ", text, re.MULTILINE)
        both = json.loads(succeed(*arguments, "--units", 0.5, "--keep", "0", "--keep", "2", "--json").stdout)
        assert [len(layer["kept"]) for layer in both["plan"]["layers"]] == [8, 5, 3]

    def refuse(self, *options, model="net", shape=("--input-shape", 6)):
        return refuse("prune", f"tiny_models:{model}", *shape, *options)

    def test_scores_of_another_network(self, scores):
        options = ("--scores", scores, "--threshold", 0.5, "--output", "smaller.safetensors")
        assert "another network" in self.refuse(*options, model="other")

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ((), "threshold"),
            (("--threshold", 0.1, "--units", 0.5), "give one of threshold=, units="),
            (("--threshold", "median"), "--threshold: a number or mean"),
            (("--threshold", "nan"), "finite"),
            (("--units", 1.5), "units=1.5"),
            (("--units", 0.5, "--scope", "block"), "'layer', 'global'"),
            (("--threshold", 0.1, "--min-units", 0), "min_units=0"),
            (("--threshold", 0.1, "--keep", "conv"), "keep: no layer conv. Layers: 0, 2, 4"),
            (
                ("--params", 0.1, "--keep", "0"),
                "params cannot fall to 0.1; with the fewest units and 0 kept, as asked",
            ),
        ],
    )
    def test_rules_that_are_none(self, scores, rule, message):
        assert message in self.refuse("--scores", scores, *rule, "--dry-run")

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "critical_neurons scores", "version": 1}'])
    def test_damaged_scores(self, content):
        Path("bad.json").write_text(content)
        assert "bad.json: " in self.refuse("--scores", "bad.json", "--threshold", 0.1, "--dry-run")

    def test_nowhere_to_write(self, scores):
        assert "--save, --output or --plan" in self.refuse("--scores", scores, "--threshold", 0.1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--output", "missing/smaller.safetensors"), "does not exist"),
            (("--output", "smaller.pt"), "ends in .safetensors"),
            (("--output", "smaller.safetensors", "--plan", "."), "is a directory"),
            (("--output", "a.safetensors", "--plan", "./a.safetensors"), "given to --output and --plan"),
            (("--output", "a.safetensors", "--weights", "a.safetensors"), "reads it, for --weights"),
            (("--plan", "gone.json"), "reads it, for --scores"),
            (("--plan", "smaller/plan.json", "--save", "smaller"), "lies in the folder of --save"),
        ],
    )
    def test_unwritable_output_is_reported_before_anything_is_loaded(self, options, message):
        assert message in self.refuse("--scores", "gone.json", "--threshold", 0.1, *options, model="absent")

    def test_a_failing_write_leaves_nothing(self, scores, monkeypatch):
        monkeypatch.setattr(os, "fsync", fail_for_space)
        outputs = ("--output", "smaller.safetensors", "--plan", "plan.json")
        assert "No space left" in self.refuse("--scores", scores, "--threshold", 0.5, *outputs)


@pytest.fixture
def smaller(scores):
    succeed("prune", "tiny_models:net", "--scores", scores, "--units", 0.5, "--input-shape", 6, "--save", "smaller")
    return Path("smaller")


class TestPruneToAFolder:
    def test_it_is_loaded_again(self, smaller, scores):
        plan = cn.plan(cn.Scores.load(scores), units=0.5)
        expected = cn.prune(load_tiny("net"), plan, torch.rand(2, 6))
        loaded = cn.load(smaller, lambda: load_tiny("net"))
        with torch.no_grad():
            assert torch.equal(loaded(torch.from_numpy(INPUTS)), expected(torch.from_numpy(INPUTS)))

    def test_an_existing_folder(self, smaller, scores):
        arguments = ("prune", "tiny_models:net", "--scores", scores, "--threshold", 0.5, "--input-shape", 6)
        before = (smaller / "plan.json").read_bytes()
        assert "smaller: exists and is not empty" in refuse(*arguments, "--save", "smaller")
        assert (smaller / "plan.json").read_bytes() == before
        result = json.loads(succeed(*arguments, "--save", "smaller", "--overwrite", "--json").stdout)
        assert result["written"] == {"output": None, "plan": None, "save": "smaller"}
        assert (smaller / "plan.json").read_bytes() != before

    def test_reported_before_anything_is_loaded(self):
        message = refuse("prune", "no:model", "--scores", "gone.json", "--units", 0.5, "--save", "missing/smaller")
        assert "does not exist" in message


@pytest.fixture
def wide_data(workspace):
    """Inputs with the classes a wide network gives them: it is always right, and can do with less."""
    inputs = np.random.default_rng(1).standard_normal((300, 6)).astype(np.float32)
    with torch.no_grad():
        labels = load_tiny("wide")(torch.from_numpy(inputs)).argmax(1).numpy()
    np.savez(workspace / "train.npz", inputs=inputs[:200], labels=labels[:200])
    np.savez(workspace / "test.npz", inputs=inputs[200:], labels=labels[200:])
    return inputs, labels


@pytest.fixture
def wide_scores(wide_data):
    found = find_scores("tiny_models:wide", "train.npz", "--formulation", "linearised", "--macs", 0.5)
    Path("scores.json").write_bytes(found)


@pytest.mark.usefixtures("wide_scores")
class TestPruneAndRefit:
    ARGUMENTS = ("prune", "tiny_models:wide", "--scores", "scores.json")
    REFITTED = ("--compensate", "least_squares", "--calibration", "train.npz")

    def test_the_refitted_network_is_that_of_the_library(self, wide_data):
        succeed(*self.ARGUMENTS, "--macs", 0.3, *self.REFITTED, "--save", "smaller")
        plan, inputs = cn.plan(cn.Scores.load("scores.json"), macs=0.3), torch.from_numpy(wide_data[0])
        expected = cn.prune(load_tiny("wide"), plan, inputs[:200], compensate="least_squares")
        loaded = cn.load("smaller", lambda: load_tiny("wide"))
        with torch.no_grad():
            assert torch.equal(loaded(inputs), expected(inputs))

    def test_the_distilled_network_is_that_of_the_library(self, wide_data):
        settings = ("--compensate", "distil", "--distil-steps", 5, "--distil-rate", 1e-3, "--seed", 3)
        succeed(*self.ARGUMENTS, "--macs", 0.3, *settings, "--calibration", "train.npz", "--save", "smaller")
        plan, inputs = cn.plan(cn.Scores.load("scores.json"), macs=0.3), torch.from_numpy(wide_data[0])
        trained = cn.Distillation(steps=5, learning_rate=1e-3)
        expected = cn.prune(load_tiny("wide"), plan, inputs[:200], compensate=trained, seed=3)
        loaded = cn.load("smaller", lambda: load_tiny("wide"))
        with torch.no_grad():
            assert torch.equal(loaded(inputs), expected(inputs))

    def test_refitting_pays_on_other_data(self):
        def measure(*options):
            arguments = (*self.ARGUMENTS, "--macs", 0.3, "--data", "test.npz", "--dry-run", "--json")
            return json.loads(succeed(*arguments, *options).stdout)["accuracy"]

        plain, refitted = measure(), measure(*self.REFITTED)
        assert plain["before"] == refitted["before"] == 1.0
        assert refitted["after"] > plain["after"]
        assert plain["data"] == refitted["data"] == "test"

    def test_accuracy_on_what_was_refitted_on_is_called_calibration(self):
        arguments = (*self.ARGUMENTS, "--macs", 0.3, *self.REFITTED, "--dry-run", "--data")
        assert "accuracy, calibration data" in succeed(*arguments, "train.npz").stdout
        assert "accuracy, test data" in succeed(*arguments, "test.npz").stdout

    def test_the_look_counts_for_the_calibration_too(self, wide_data):
        np.savez("shifted.npz", inputs=wide_data[0][:200] * 2 + 1, labels=wide_data[1][:200])
        refitted = ("--compensate", "bias", "--calibration")
        succeed(*self.ARGUMENTS, "--macs", 0.3, *refitted, "train.npz", "--save", "plain")
        succeed(
            *self.ARGUMENTS, "--macs", 0.3, *refitted, "shifted.npz", "--mean", 1, "--std", 2, "--save", "shifted"
        )
        plain, shifted = (load_file(f"{folder}/model.safetensors") for folder in ("plain", "shifted"))
        assert all(torch.allclose(values, shifted[name], atol=1e-5) for name, values in plain.items())

    @pytest.mark.parametrize("refitting", [(), REFITTED])
    def test_the_most_that_can_go(self, refitting):
        options = ("--max-drop", 0.1, "--data", "test.npz", *refitting, "--save", "smaller")
        result = succeed(*self.ARGUMENTS, *options, "--json")
        found = json.loads(result.stdout)
        assert found["accuracy"]["before"] - found["accuracy"]["after"] <= 0.1 + 1e-9
        assert found["accuracy"]["data"] == "calibration"
        drop = found["plan"]["provenance"]["drop"]
        assert (drop["before"], drop["after"]) == (found["accuracy"]["before"], found["accuracy"]["after"])
        assert found["parameters"]["after"] < found["parameters"]["before"]
        assert "The plan was chosen by the accuracy on --data" in result.stderr
        text = succeed(*self.ARGUMENTS, *options, "--overwrite").stdout
        assert "accuracy, calibration data" in text
        assert "Rule: at most 0.1 lost" in text

    def test_an_interrupted_search_leaves_the_best_so_far(self, monkeypatch):
        judged = []

        def judge(model, **data):
            judged.append(model)
            if len(judged) == 4:
                raise KeyboardInterrupt
            return measure_accuracy(model, **data)

        monkeypatch.setattr("critical_neurons.removal.metrics.measure_accuracy", judge)
        options = ("--max-drop", 0.99, "--data", "test.npz", "--save", "smaller")
        assert "interrupted" in succeed(*self.ARGUMENTS, *options).stdout
        assert cn.load("smaller", lambda: load_tiny("wide"))[0].out_features < 40

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--macs", 0.5, "--compensate", "bias"), "--compensate bias: say on what inputs, with --calibration"),
            (("--macs", 0.5, "--calibration", "train.npz"), "nothing is refitted"),
            (("--macs", 0.5, "--compensate", "retrain"), "'none', 'bias', 'least_squares', 'distil'"),
            (("--macs", 0.5, "--distil-steps", 9), "Add --compensate distil"),
            (("--max-drop", 0.1), "--max-drop: say on what the accuracy is judged, with --data"),
            (("--max-drop", 0.1, "--macs", 0.5, "--data", "test.npz"), "max_drop= finds the share kept itself"),
            (("--max-drop", 2, "--data", "test.npz"), "max_drop=2.0"),
            (("--macs", 0.5, "--compensate", "bias", "--calibration", "gone.npz"), "gone.npz: no such file"),
            (("--macs", 0.5, "--compensate", "bias", "--calibration", "few.npz"), "calibration: found 7 inputs"),
        ],
    )
    def test_refusals(self, options, message):
        np.savez("few.npz", inputs=INPUTS[:7], labels=LABELS[:7])
        assert message in refuse(*self.ARGUMENTS, *options, "--input-shape", 6, "--save", "smaller")


@pytest.mark.usefixtures("wide_data")
class TestCompress:
    ARGUMENTS = ("compress", "tiny_models:wide", "train.npz", "--save", "smaller")
    QUICK = (*ARGUMENTS, "--no-onnx", "--effort", "quick")

    def test_the_whole_way(self, wide_data):
        options = ("--macs", 0.5, "--test-data", "test.npz", "--output", "smaller.onnx", "--output", "smaller.pt2")
        result = succeed(*self.ARGUMENTS, *options, "--effort", "quick")
        assert re.search(r"^0 +40 +\d+ +\d+ +at most 0.5 of the macs kept", result.stdout, re.MULTILINE)
        assert re.search(r"^accuracy, test data +100.00% +\d+\.\d\d% ", result.stdout, re.MULTILINE)
        assert re.search(r"^multiply-adds +1,100 +\d+ +(50\.0|4\d\.\d)%$", result.stdout, re.MULTILINE)
        assert "onnxruntime, batch of 64" in result.stdout
        stages = [
            "200 inputs of shape 6",
            "Searching",
            "Planning",
            "Removing and refitting",
            "Comparing",
            "Exporting",
        ]
        assert [result.stderr.index(text) for text in stages] == sorted(result.stderr.index(text) for text in stages)
        assert "Written: smaller, smaller.onnx, smaller.pt2" in result.stderr
        inputs = torch.from_numpy(wide_data[0])
        with torch.no_grad():
            expected = cn.load("smaller", lambda: load_tiny("wide"))(inputs)
            assert torch.allclose(open_onnx(Path("smaller.onnx"))(inputs), expected, atol=1e-5)
            assert torch.allclose(torch.export.load("smaller.pt2").module()(inputs), expected, atol=1e-5)

    @pytest.mark.usefixtures("short_descent")
    def test_it_does_what_the_library_does(self, wide_data):
        options = (
            "--max-drop",
            0.05,
            "--keep",
            "0",
            "--min-units",
            2,
            "--round-to",
            2,
            "--seed",
            3,
        )
        result = json.loads(succeed(*self.QUICK, *options, "--compensate", "bias", "--json").stdout)
        inputs, labels = (torch.from_numpy(values[:200]) for values in wide_data)
        expected = cn.compress(
            *(load_tiny("wide"), inputs, labels),
            max_drop=0.05,
            keep=["0"],
            min_units=2,
            round_to=2,
            seed=3,
            compensate="bias",
            effort="quick",
            onnx=False,
        )
        assert result["plan"] == expected.plan.to_dict()
        assert result["scores"]["scores"] == expected.scores.to_dict()["scores"]
        comparison = cn.Comparison.from_dict(result["comparison"])
        assert comparison.data == "calibration"
        assert comparison.after.accuracy == expected.comparison.after.accuracy
        assert result["written"] == {"save": "smaller", "output": [], "report": None}
        loaded = cn.load("smaller", lambda: load_tiny("wide"))
        with torch.no_grad():
            assert torch.equal(loaded(inputs), expected.model(inputs))

    @pytest.mark.parametrize("share", [("--params", 0.6), ("--units", 0.6), ("--macs", 0.6)])
    def test_shares_and_settings_of_scoring_arrive(self, share):
        options = ("--formulation", "exact", "--time-limit", 1, "--threads", 1, "--ignore", "2", "--per-class", 6)
        result = json.loads(succeed(*self.QUICK, *share, *options, "--json").stdout)
        settings = result["scores"]["settings"]
        assert result["scores"]["budget"] == {share[0].removeprefix("--"): 0.6}
        assert settings["formulation"]["name"] == "exact"
        assert (settings["solver"]["time_limit"], settings["solver"]["threads"]) == (1.0, 1)
        assert settings["ignore"] == ["2"]
        assert np.bincount(settings["labels"]).tolist() == [6, 6, 6]
        assert f"of the {share[0].removeprefix('--')} kept" in result["plan"]["rule"]

    def test_the_settings_of_the_paper(self):
        result = json.loads(succeed(*self.QUICK, "--units", 0.5, "--paper", "--json").stdout)
        settings = result["scores"]["settings"]
        assert settings["formulation"] == PAPER.to_dict()
        assert sorted(settings["labels"]) == [0, 1, 2]

    def test_spans(self):
        result = json.loads(
            succeed(
                *("compress", "tiny_models:hybrid", "train.npz", "--start", "1", "--stop", "1", "--units", 0.5),
                *("--save", "smaller", "--no-onnx", "--json"),
            ).stdout
        )
        assert result["plan"]["span"] == {"start": "1", "stop": "1"}
        assert len(result["plan"]["layers"][0]["kept"]) == 4

    def test_accuracy_without_test_data_is_called_calibration(self):
        result = succeed(*self.QUICK, "--units", 0.5)
        assert "accuracy, calibration data" in result.stdout
        assert "No test data" in result.stderr
        mixed = succeed(*self.QUICK, "--units", 0.5, "--overwrite", "--test-data", "train.npz")
        assert "accuracy, calibration data" in mixed.stdout
        assert "No test data" not in mixed.stderr

    def test_splits_of_a_data_set(self):
        datasets = pytest.importorskip("datasets")
        pixels = np.random.default_rng(0).integers(0, 256, (150, 2, 3), dtype=np.uint8)

        def make(rows, labels):
            features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
            return datasets.Dataset.from_dict({"image": list(rows), "label": labels}, features=features)

        parts = {"train": make(pixels[:120], [0] * 110 + [1] * 10), "test": make(pixels[120:], [0, 1] * 15)}
        datasets.DatasetDict(parts).save_to_disk("images")
        arguments = ("compress", "tiny_models:flat", "images", "--units", 0.5, "--no-onnx", "--save", "smaller")
        result = succeed(*arguments, "--test-split", "test", "--json")
        assert "110 inputs of shape 1x2x3: 100 of class 0, 10 of class 1" in result.stderr
        comparison = json.loads(result.stdout)["comparison"]
        assert (comparison["inputs"], comparison["data"]) == (30, "test")
        assert "per_class: 11 of every class" in refuse(*arguments, "--overwrite", "--per-class", 11)

    def test_an_interrupt_writes_nothing(self, monkeypatch):
        def interrupt(*_args, **_kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr("critical_neurons.api.compare.measure_activations", interrupt)
        before = files()
        result = run(*self.QUICK, "--units", 0.5)
        assert result.exit_code == 130
        assert "Interrupted." in result.stderr
        assert files() == before

    def test_a_failing_export_writes_nothing(self):
        arguments = ("compress", "tiny_models:fixed", "train.npz", "--start", "0", "--stop", "0", "--units", 0.5)
        outputs = ("--save", "smaller", "--output", "smaller.pt2", "--no-onnx")
        before = files()
        result = run(*arguments, *outputs)
        assert result.exit_code == 2
        assert "torch.export failed" in result.stderr
        assert files() == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--macs", 0.5, "--save", "missing/smaller"), "does not exist"),
            (("--macs", 0.5, "--save", "data.npz"), "is a file"),
            (("--macs", 0.5, "--save", "."), "holds other files"),
            (("--macs", 0.5, "--output", "missing/smaller.onnx"), "does not exist"),
            (("--macs", 0.5, "--output", "smaller.h5"), "smaller.h5: its ending says the format"),
            (("--macs", 0.5, "--output", "smaller/model.onnx"), "lies in the folder of --save"),
            (("--macs", 0.5, "--output", "smaller"), "lies in the folder of --save"),
            (("--macs", 0.5, "--output", "a.pt2", "--output", "./a.pt2"), "given to --output twice"),
            ((), "Give one of --macs, --params, --units, --latency and --max-drop"),
            (("--macs", 0.5, "--max-drop", 0.1), "Give one of --macs"),
            (("--macs", 0.5, "--time-limit", 9, "--threads", 1), "--time-limit, --threads: only for a program"),
        ],
    )
    def test_reported_before_anything_is_loaded(self, options, message):
        save = () if "--save" in options else ("--save", "smaller")
        assert message in refuse("compress", "no_such_module:net", "no_such.npz", *save, *options)

    def test_a_missing_extra_is_reported_before_anything_is_loaded(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        arguments = ("compress", "no_such_module:net", "no_such.npz", "--units", 0.5, "--save", "smaller")
        assert "critical_neurons[onnx]" in refuse(*arguments, "--output", "smaller.onnx")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--macs", 1e-6), "the budget cannot be met"),
            (("--macs", 1e-6, "--formulation", "linearised"), "macs cannot fall to"),
            (("--macs", 0), "macs"),
            (("--max-drop", 1.5), "max_drop=1.5"),
            (("--units", 0.5, "--keep", "conv"), "keep: no layer conv"),
            (("--units", 0.5, "--compensate", "all"), "'none', 'bias', 'least_squares'"),
            (("--units", 0.5, "--test-data", "gone.npz"), "gone.npz: no such file"),
            (("--units", 0.5, "--test-split", "test"), "--test-split: train.npz is a file"),
            (("--units", 0.5, "--per-class", 150), "per_class: 150 of every class asked for"),
            (
                ("--units", 0.5, "--formulation", "linearised", "--time-limit", 1e-9),
                "time limit: it was over before the program was ready",
            ),
        ],
    )
    def test_refusals(self, options, message):
        assert message in refuse(*self.QUICK, *options)

    def test_a_folder_to_save_to_is_asked_for(self):
        assert "--save" in refuse("compress", "tiny_models:wide", "train.npz", "--units", 0.5)

    def test_an_existing_folder(self):
        succeed(*self.QUICK, "--units", 0.5)
        before = Path("smaller/plan.json").read_bytes()
        assert "exists and is not empty" in refuse(*self.QUICK, "--units", 0.7)
        assert Path("smaller/plan.json").read_bytes() == before
        succeed(*self.QUICK, "--units", 0.7, "--overwrite")
        assert Path("smaller/plan.json").read_bytes() != before


class TestEvaluate:
    QUICK = ("--batch-sizes", "1", "--repeats", 2, "--no-onnx")

    def test_table(self, smaller):
        np.savez("fresh.npz", inputs=INPUTS + 2, labels=LABELS)
        text = succeed("evaluate", "tiny_models:net", smaller, "--data", "fresh.npz", *self.QUICK).stdout
        assert re.search(r"^accuracy, test data +\d+\.\d\d% +\d+\.\d\d% +[+-]\d+\.\d\d points$", text, re.MULTILINE)
        assert re.search(r"^parameters +119 +47 +39\.5%$", text, re.MULTILINE)
        assert re.search(r"^torch, batch of 1 +\S+ ms +\S+ ms +\S+x as fast$", text, re.MULTILINE)
        assert "onnxruntime" not in text

    def test_json_and_a_file_with_everything(self, smaller):
        np.savez("calibration.npz", inputs=INPUTS + 1, labels=LABELS)
        np.savez("fresh.npz", inputs=INPUTS + 2, labels=LABELS)
        result = succeed(
            *("evaluate", "tiny_models:net", smaller, "--data", "fresh.npz", "--calibration", "calibration.npz"),
            *("--batch-sizes", "1,5", "--repeats", 3, "--threads", 2, "--output", "comparison.json", "--json"),
        )
        assert cn.Comparison.load("comparison.json") == cn.Comparison.from_dict(json.loads(result.stdout))
        comparison = cn.Comparison.load("comparison.json")
        assert comparison.int8_data == "test"
        assert comparison.threads == 2
        assert [each.batch_size for each in comparison.after.latencies] == [1, 5, 1, 5]
        assert comparison.after.int8_accuracy is not None
        assert "Measuring ONNX and int8" in result.stderr

    def test_data_that_was_seen_is_called_so(self, smaller):
        scored = ("evaluate", "tiny_models:net", smaller, "--data", "data.npz", *self.QUICK)
        assert "accuracy, calibration data" in succeed(*scored).stdout
        np.savez("fresh.npz", inputs=INPUTS + 2, labels=LABELS)
        fresh = ("evaluate", "tiny_models:net", smaller, "--data", "fresh.npz", *self.QUICK)
        assert "accuracy, test data" in succeed(*fresh).stdout
        assert "accuracy, calibration data" in succeed(*fresh, "--seen").stdout
        assert "accuracy, calibration data" in succeed(*fresh, "--calibration", "fresh.npz").stdout

    def test_other_weights_are_reported(self, smaller):
        torch.save({name: values + 1 for name, values in load_tiny("net").state_dict().items()}, "moved.pt")
        arguments = ("evaluate", "tiny_models:net", smaller, "--data", "data.npz", *self.QUICK)
        assert "made from other weights" in succeed(*arguments, "--weights", "moved.pt").stderr
        assert "made from other weights" not in succeed(*arguments).stderr

    def test_refusals(self, smaller):
        assert "--data" in refuse("evaluate", "tiny_models:net", smaller)
        assert "another network" in refuse("evaluate", "tiny_models:other", smaller, "--data", "data.npz")
        assert "gone: no model.safetensors" in refuse("evaluate", "tiny_models:net", "gone", "--data", "data.npz")
        arguments = ("evaluate", "tiny_models:net", smaller, "--data", "data.npz")
        assert "--batch-sizes: whole numbers above zero" in refuse(*arguments, "--batch-sizes", "0")
        assert "repeats: found 0" in refuse(*arguments, "--repeats", 0)
        assert "does not exist" in refuse(*arguments, "--output", "missing/comparison.json")
        before = (smaller / "plan.json").read_bytes()
        assert "reads it, for FOLDER" in refuse(*arguments, "--output", smaller / "plan.json")
        assert (smaller / "plan.json").read_bytes() == before


class TestExport:
    def test_files_are_written_and_run(self, smaller):
        result = succeed(
            *("export", "tiny_models:net", smaller, "--input-shape", 6),
            *("--output", "smaller.onnx", "--output", "smaller.pt2"),
        )
        rows = torch.from_numpy(INPUTS)
        with torch.no_grad():
            expected = cn.load(smaller, lambda: load_tiny("net"))(rows)
            assert torch.allclose(torch.export.load("smaller.pt2").module()(rows), expected, atol=1e-5)
        assert result.stdout == ""
        assert (
            len(re.findall(r"^Written: smaller\.\w+, [\d,]+ bytes; outputs differ", result.stderr, re.MULTILINE)) == 2
        )
        assert "smaller.onnx" in files()

    def test_json(self, smaller):
        arguments = ("export", "tiny_models:net", smaller, "--data", "data.npz", "--output", "smaller.pt2", "--json")
        (written,) = json.loads(succeed(*arguments).stdout)
        assert written["path"] == "smaller.pt2"
        assert written["bytes"] == Path("smaller.pt2").stat().st_size
        assert written["difference"] < 1e-5

    def test_refusals(self, smaller):
        arguments = ("export", "tiny_models:net", smaller, "--input-shape", 6)
        assert "--output" in refuse(*arguments)
        assert "smaller.h5: its ending says the format" in refuse(*arguments, "--output", "smaller.h5")
        assert "does not exist" in refuse(*arguments, "--output", "missing/smaller.onnx")
        twice = ("--output", "smaller.pt2", "--output", "./smaller.pt2")
        assert "given to --output twice" in refuse(*arguments, *twice)
        assert "another network" in refuse("export", "tiny_models:other", smaller, "--output", "smaller.pt2")
        assert "with --input-shape" in refuse("export", "tiny_models:net", smaller, "--output", "smaller.pt2")


def tiny_convolution():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


class TestSpans:
    SPAN = ("--start", "1", "--stop", "1")

    def test_the_error_names_the_options(self):
        assert "start= and stop=" in refuse("score", "tiny_models:hybrid", "data.npz")

    def test_inspect(self):
        text = succeed("inspect", "tiny_models:hybrid", "--input-shape", "6", *self.SPAN).stdout
        assert "13 units in 2 of 3 layers can be removed" in text

    def test_score_and_prune(self):
        succeed("score", "tiny_models:hybrid", "data.npz", *self.SPAN, "--output", "scores.json")
        assert json.loads(Path("scores.json").read_text())["span"] == {"start": "1", "stop": "1"}
        rule = ("--scores", "scores.json", "--units", 0.5, "--data", "data.npz", "--output", "smaller.safetensors")
        succeed("prune", "tiny_models:hybrid", *rule, "--plan", "plan.json")
        assert load_file("smaller.safetensors")["1.0.weight"].shape == (4, 6)
        assert json.loads(Path("plan.json").read_text())["span"] == {"start": "1", "stop": "1"}

    def test_unknown_names(self):
        assert "start: 'body' is no module or call" in refuse(
            "score", "tiny_models:hybrid", "data.npz", "--start", "body"
        )


class TestDemo:
    @pytest.fixture(autouse=True)
    def _short(self, request, monkeypatch):
        if request.function.__name__ != "test_promises_of_the_real_one":
            monkeypatch.setattr("critical_neurons.cli.digits.small_network", tiny_convolution)
            monkeypatch.setattr("critical_neurons.cli.digits.EPOCHS", 3)
            monkeypatch.setattr("critical_neurons.cli.digits.RANDOM_DRAWS", 3)

    def test_everything_is_written(self, workspace):
        folder = workspace / "my demo"
        result = succeed("demo", "--units", 0.5, "--save", "my demo")
        assert re.search(r"^0 +4 +2 +2 ", result.stdout, re.MULTILINE)
        assert re.search(r"^accuracy, test data +\d\d\.\d\d% +\d\d\.\d\d% ", result.stdout, re.MULTILINE)
        assert re.search(r"^refitted( +\d+\.\d%){4}$", result.stdout, re.MULTILINE)
        assert re.search(r"^Refitted: .*; better than \d of 3 random removals\.$", result.stdout, re.MULTILINE)
        assert "Training a small network" in result.stderr
        assert "Written: my demo" in result.stderr
        suggested = shlex.split(re.search("^Next: (.*)$", result.stderr, re.MULTILINE)[1])
        assert {"my demo/training.npz", "my demo/original.safetensors", "my demo/test.npz"} < {*suggested}
        assert {path.name for path in folder.iterdir() if path.is_file()} == {
            "original.safetensors",
            "training.npz",
            "test.npz",
            "smaller.onnx",
            "comparison.json",
            "report.html",
        }

    @pytest.mark.slow
    def test_again_it_is_the_same(self, workspace):
        folder = workspace / "my demo"
        result = succeed("demo", "--units", 0.5, "--save", "my demo")
        content = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        again = json.loads(succeed("demo", "--units", 0.5, "--save", "my demo", "--json").stdout)
        assert all((folder / name).read_bytes() == content[name] for name in ("original.safetensors", "test.npz"))
        assert again["images"] == {"training": 1198, "test": 599}
        after = again["comparison"]["after"]["accuracy"]
        assert again["read_back"] == {"smaller": after, "smaller.onnx": after}
        assert again["refitted"]["searched"] == after
        numbers = again["refitted"]["random"]
        shown = [after, sum(numbers) / 3, min(numbers), max(numbers)]
        assert re.search("^refitted +" + " +".join(f"{each:.1%}" for each in shown), result.stdout, re.MULTILINE)
        loaded = cn.load(folder / "smaller", tiny_convolution)
        with np.load(folder / "test.npz") as test:
            measured = measure_accuracy(loaded, torch.from_numpy(test["inputs"]), torch.from_numpy(test["labels"]))
        assert measured == after

    @pytest.mark.slow
    def test_promises_of_the_real_one(self):
        result = json.loads(succeed("demo", "--json").stdout)
        before, after = (result["comparison"][when] for when in ("before", "after"))
        assert before["accuracy"] > 0.98
        assert after["accuracy"] > 0.9
        assert after["macs"] < 0.05 * before["macs"]
        assert result["refitted"]["searched"] > result["without_refitting"]["searched"]
        assert result["seconds"]["all"] < 60

    @pytest.mark.parametrize(
        ("searched", "verdict"),
        [
            (0.95, "ahead of chance, +15.0 points; better than 2 of 2 random removals"),
            (0.85, "a tie, +5.0 points; better than 1 of 2 random removals"),
            (0.70, "a tie, -10.0 points; better than 0 of 2 random removals"),
            (0.60, "behind chance, -20.0 points; better than 0 of 2 random removals"),
        ],
    )
    def test_a_tie_is_called_so(self, searched, verdict):
        assert judge(Removal(searched, (0.70, 0.90))) == verdict

    @pytest.mark.parametrize("module", ["sklearn.datasets", "onnxruntime"])
    def test_missing_extra(self, monkeypatch, module):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr("critical_neurons.cli.digits.train_small_network", None)
        assert "pip install 'critical_neurons[" in refuse("demo")

    def test_bad_settings_before_training(self, workspace, monkeypatch):
        monkeypatch.setattr("critical_neurons.cli.digits.train_small_network", None)
        assert "units: found 0.0" in refuse("demo", "--units", 0)
        assert "does not exist" in refuse("demo", "--save", "missing/demo")
        assert "holds other files" in refuse("demo", "--save", ".")
        (workspace / "mine" / "smaller").mkdir(parents=True)
        (workspace / "mine" / "smaller" / "thesis.tex").touch()
        assert "smaller: holds other files (thesis.tex)" in refuse("demo", "--save", "mine")


class TestProgress:
    STEP = cn.Step(seconds=299.9, objective=-1234.5678, bound=-2345.6789, rows=36966, cuts=6000)

    def test_a_step_fits_a_terminal_behind_its_spinner(self):
        text = str(self.STEP)
        assert len(text) <= 78
        for part in ("299.9 s", "incumbent -1234.57", "bound -2345.68", "gap 90.0%", "rows 36966", "cuts 6000"):
            assert part in text

    def test_a_step_without_bound(self):
        text = str(cn.Step(seconds=0.1, objective=None, bound=None, rows=0, cuts=0))
        assert "incumbent none  bound none  gap unknown" in text

    def test_a_log_file_gets_a_line_now_and_then(self, monkeypatch, capsys):
        monkeypatch.setattr("critical_neurons.cli.terminal.SECONDS_BETWEEN_LINES", 0.05)
        with show_progress() as progress:
            progress(self.STEP)
            time.sleep(0.06)
            progress(self.STEP)
            progress(self.STEP)
        captured = capsys.readouterr()
        assert captured.err.count("incumbent") == 1
        assert captured.out == ""

    def test_a_large_batch_is_counted_by_class(self):
        inputs, labels = torch.zeros(60, 1, 8, 8), torch.tensor([0, 1] * 30)
        assert describe_batch(inputs, labels) == "60 inputs of shape 1x8x8: 30 of class 0, 30 of class 1"
        assert (
            describe_batch({"a": inputs, "b": labels}, None)
            == "60 inputs of shape 1x8x8 and one number, without labels"
        )


class TestInstalledCommand:
    """The real entry point, as a user starts it."""

    def start(self, *arguments, **variables):
        surroundings = os.environ | variables
        return subprocess.run(
            [installed_command(), *arguments], capture_output=True, text=True, timeout=60, env=surroundings
        )

    def test_mistakes(self):
        result = self.start("evaluate", "tiny_models:net", "smaller", "--data", "data.npz", "--batch-sizes", "0")
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr == "Error: --batch-sizes: whole numbers above zero, such as 1,64; got '0'.\n"

    def test_models_in_the_current_directory_and_letters_that_the_output_cannot_hold(self):
        Path("greek.py").write_text(
            "from torch import nn\n\n"
            "def net():\n"
            "    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU())\n"
            "    model.add_module('λ', nn.Linear(5, 3))\n"
            "    return model\n",
            encoding="utf-8",
        )
        result = self.start("inspect", "greek:net", "--input-shape", "6", PYTHONIOENCODING="ascii")
        assert result.returncode == 0, result.stderr
        assert re.search(r"^\? +Linear +3 ", result.stdout, re.MULTILINE)
        assert "5 units in 1 of 2 layers" in result.stdout
        assert result.stderr == ""


class TestPlansOfFiles:
    @pytest.fixture
    def plan(self, scores):
        succeed(
            "prune",
            "tiny_models:net",
            "--scores",
            "scores.json",
            "--input-shape",
            6,
            "--units",
            0.5,
            "--plan",
            "plan.json",
        )
        return Path("plan.json")

    def carry_out(self, *arguments):
        return ("prune", "tiny_models:net", "--carry-out", "plan.json", "--input-shape", 6, *arguments)

    def test_a_plan_is_carried_out(self, plan):
        succeed(*self.carry_out("--output", "smaller.safetensors"))
        assert load_file("smaller.safetensors")["0.weight"].shape == (4, 6)

    def test_an_edited_plan_is_refused_unless_it_is_trusted(self, plan):
        content = json.loads(plan.read_text())
        kept = content["layers"][0]["kept"]
        content["layers"][0]["kept"] = sorted({*range(8)} - {*kept})
        plan.write_text(json.dumps(content))
        assert "changed" in refuse(*self.carry_out("--output", "smaller.safetensors"))
        succeed(*self.carry_out("--output", "smaller.safetensors", "--trust-edited"))
        assert load_file("smaller.safetensors")["0.weight"].shape == (8 - len(kept), 6)

    def test_a_layer_is_not_emptied_by_hand(self, plan):
        content = json.loads(plan.read_text())
        content["layers"][0]["kept"] = []
        plan.write_text(json.dumps(content))
        refuse(*self.carry_out("--output", "smaller.safetensors", "--trust-edited"))

    def test_one_of_scores_and_a_plan(self, plan):
        assert "--carry-out" in refuse("prune", "tiny_models:net", "--output", "smaller.safetensors")
        assert "--units" in refuse(*self.carry_out("--units", 0.5, "--output", "smaller.safetensors"))
        assert "--trust-edited" in refuse("prune", "tiny_models:net", "--scores", "scores.json", "--trust-edited")


class TestLoudness:
    def test_quiet_leaves_results_and_errors(self, scores):
        call = (
            "prune",
            "tiny_models:net",
            "--scores",
            "scores.json",
            "--input-shape",
            6,
            "--units",
            0.5,
            "--dry-run",
        )
        assert "Dry run" in succeed(*call).stderr
        assert succeed(*call, "--quiet").stderr == ""
        assert succeed(*call, "-q").stdout == succeed(*call).stdout
        assert "nowhere.json" in refuse(
            "prune", "tiny_models:net", "--scores", "nowhere.json", "--units", 0.5, "--dry-run", "--quiet"
        )

    def test_verbose_tells_the_time(self, scores):
        found = succeed(
            *(
                "prune",
                "tiny_models:net",
                "--scores",
                "scores.json",
                "--input-shape",
                6,
                "--units",
                0.5,
                "--dry-run",
                "--verbose",
            ),
            *("--compensate", "least_squares", "--calibration", "data.npz"),
        )
        assert re.search(r"^\d+\.\d s  refitting: 2 of 2", found.stderr, re.MULTILINE)
        assert "--quiet" in refuse("inspect", "tiny_models:net", "--input-shape", 6, "--quiet", "--verbose")

    def test_shells_complete(self):
        assert "--install-completion" in succeed("--help").stdout

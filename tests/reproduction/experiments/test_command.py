"""The command reproduce, on data sets of a few images."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer import Typer
from typer.testing import CliRunner

from critical_neurons_reproduction.command import reproduce
from critical_neurons_reproduction.experiments import TABLES, list_cells
from tests.clusters import ROOT, Cluster

app = Typer()
app.command()(reproduce)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """From an empty directory that is home, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hugging_face")

    def reproduce(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)])

    return reproduce


QUICK_CELL = ("lambda", "--profile", "quick", "--seeds", "1", "--only", "lambda-5/balanced")


def test_a_quick_cell_is_run_once_and_never_counts(run, blocks, tmp_path):
    first = run(*QUICK_CELL, "--data", blocks)
    assert first.exit_code == 0, first.output
    assert "1 of 2: fashion/lenet5/seed-0" in first.stderr
    assert "2 of 2: lambda fashion/lenet5/lambda-5/balanced/seed-0" in first.stderr
    assert "Accuracy and share by λ" in first.stdout
    (line,) = (tmp_path / "results" / "lambda.jsonl").read_text().splitlines()
    result = json.loads(line)["result"]
    assert 0 <= result["removals"][0]["accuracy"] <= 1

    again = run(*QUICK_CELL, "--data", blocks, "--json")
    assert again.exit_code == 0
    assert " of " not in again.stderr
    assert json.loads(again.stdout)["cells"][0]["cell"] == "fashion/lenet5/lambda-5/balanced/seed-0"

    states = json.loads(run("status", "--json").stdout)
    assert {state["state"] for state in states} == {"missing"}


def test_a_shortened_cell_is_rendered_and_says_so(run, blocks, tmp_path):
    cut = ("--epochs", "1", "--images", "60")
    done = run("snip", "--seeds", "1", "--only", "ours/balanced", *cut, "--data", blocks, "--jobs", "2")
    assert done.exit_code == 0, done.output
    assert "1 of 30 epochs, 60 training images" in (tmp_path / "results" / "tables" / "snip.md").read_text()
    states = json.loads(run("status", "--seeds", "1", "--json", "--only", "ours/balanced").stdout)
    (mine,) = [state for state in states if state["table"] == "snip"]
    assert mine == {
        "table": "snip",
        "cell": "fashion/lenet5/ours/balanced/seed-0",
        "state": "shortened",
        "schedule": "1 of 30 epochs, 60 training images",
    }
    page = run("page", "--output", tmp_path / "page.md")
    assert page.exit_code == 0
    assert "1 of 30 epochs" in (tmp_path / "page.md").read_text()
    written = json.loads(run("page", "--output", tmp_path / "page.md", "--json").stdout)["written"]
    assert {str(tmp_path / "page.md"), str(tmp_path / "results" / "tables" / "snip.md")} <= {*written}


@pytest.mark.slow
def test_tables_show_all_that_is_stored(run, blocks, tmp_path):
    """Whatever part of them was run last."""
    cut = ("--seeds", "1", "--epochs", "1", "--images", "60", "--data", blocks)
    for part in ("batch-05", "batch-10"):
        assert run("batches", "--only", f"fashion/fc3/{part}", *cut).exit_code == 0
    text = (tmp_path / "results" / "tables" / "batches-fashion-fc3.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| balanced | 5 |", "| balanced | 10 |"))]
    assert len(rows) == 2
    assert all("(1 of 3 seeds)" in row for row in rows)


def test_status_lists_every_cell(run):
    states = json.loads(run("status", "--json").stdout)
    assert len(states) == sum(len(list_cells(table, seeds=range(3))) for table in TABLES)
    assert states[0] == {
        "table": "table-1",
        "cell": "mnist/lenet5/idp/balanced/seed-0",
        "state": "missing",
        "schedule": None,
    }
    text = run("status").stdout
    assert "table-1-appendix" in text
    assert "Missing: table-1 mnist/lenet5/idp/balanced/seed-0" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table-9",), "table-9: no such table or figure. Accepted: table-1, table-1-appendix"),
        (("table-2", "--only", "fashion/lenet6"), "--only fashion/lenet6: no such cell. Accepted: parts of a name"),
        (("lambda", "--jobs", "0"), "jobs: found 0. Accepted: a whole number"),
        (("lambda", "--seeds", "0"), "--seeds: found 0"),
        (("lambda", "--epochs", "0"), "--epochs: found 0"),
        (("lambda", "--profile", "quick", "--epochs", "3"), "--epochs and --images: --profile quick sets them"),
        (
            ("lambda", "--data", "nowhere"),
            "--data nowhere: no such folder. Accepted: a folder with mnist",
        ),
    ],
)
def test_mistakes_are_reported_in_a_sentence(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_folder_without_the_data_set(run, tmp_path):
    (tmp_path / "empty").mkdir()
    result = run("lambda", "--data", "empty")
    assert result.exit_code == 2
    assert "--data empty: no folder fashion_mnist in it" in result.stderr
    assert "hf download zalando-datasets/fashion_mnist" in result.stderr


def test_a_folder_that_is_no_data_set(run, tmp_path):
    (tmp_path / "data" / "fashion_mnist").mkdir(parents=True)
    (tmp_path / "data" / "fashion_mnist" / "notes.txt").write_text("nothing here")
    result = run(*QUICK_CELL, "--data", "data")
    assert result.exit_code != 0
    assert "Accepted: a folder that Hugging Face datasets reads" in result.stderr


def test_torn_lines_are_named_and_kept(run, blocks, tmp_path):
    path = tmp_path / "results" / "lambda.jsonl"
    path.parent.mkdir()
    path.write_text('{"format": "critical_neurons cell", "vers')
    result = run(*QUICK_CELL, "--data", blocks)
    assert result.exit_code == 0, result.output
    assert "Skipped: results/lambda.jsonl, line 1: not a complete line of JSON." in result.stderr
    first, second = path.read_text().splitlines()
    assert first == '{"format": "critical_neurons cell", "vers'
    assert json.loads(second)["cell"]["name"] == "fashion/lenet5/lambda-5/balanced/seed-0"


def test_a_checkpoint_of_another_network_is_left_alone(run, blocks, tmp_path):
    assert run(*QUICK_CELL, "--data", blocks).exit_code == 0
    (checkpoint,) = tmp_path.glob("runs/**/checkpoint.pt")
    (tmp_path / "results" / "lambda.jsonl").unlink()
    other = b"not a checkpoint"
    checkpoint.write_bytes(other)
    result = run(*QUICK_CELL, "--data", blocks)
    assert result.exit_code == 1
    assert "Failed: fashion/lenet5/seed-0:" in result.stderr
    assert "Remove it to start over" in result.stderr
    assert checkpoint.read_bytes() == other


TWO_CELLS = (*QUICK_CELL, "--only", "lambda-0.25/balanced")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT there")
@pytest.mark.parametrize("what", ["Ctrl-C", "the scheduler is killed"])
def test_what_a_cluster_has_finished_is_kept(run, blocks, tmp_path, what):
    """And not run again: by the same command, or on this machine."""
    arguments = ("reproduce", *TWO_CELLS, "--data", str(blocks), "--json")
    code = "from critical_neurons.cli import main; main()"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("src", "reproduction/src", ".")),
    }
    with Cluster(tmp_path, workers=1) as cluster:
        there = ("--backend", "dask", "--scheduler", cluster.address)
        command = [sys.executable, "-c", code, *arguments, *there]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if line.startswith("2 of 3: lambda"):
                    break
            if what == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            else:
                cluster.scheduler.kill()
            _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if what == "Ctrl-C" else 2), errors
    assert "Finished cells are kept: run the same command again to resume." in errors
    assert ("the scheduler was lost" in errors) == (what != "Ctrl-C")
    assert "Traceback" not in errors
    (line,) = (tmp_path / "results" / "lambda.jsonl").read_text().splitlines()
    again = run(*TWO_CELLS, "--data", blocks)
    assert again.exit_code == 0, again.output
    assert "2 of 2: lambda" in again.stderr
    first, second = (tmp_path / "results" / "lambda.jsonl").read_text().splitlines()
    assert first == line
    assert json.loads(second)["key"] != json.loads(first)["key"]


@pytest.mark.parametrize(
    "options", [("--backend", "dask"), ("--scheduler", "tcp://host:1"), ("--backend", "local", "--scheduler", "x")]
)
def test_a_scheduler_goes_with_dask(run, options):
    result = run("lambda", *options)
    assert result.exit_code == 2
    assert "--scheduler: the address of a Dask scheduler goes with --backend dask" in result.stderr


def test_a_page_that_cannot_be_written_leaves_no_tables(run, tmp_path):
    refused = run("page", "--output", "missing/page.md")
    assert refused.exit_code == 2
    assert "missing/page.md: the directory" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_finds_it():
    """By its entry point, and without importing what takes seconds."""
    code = (
        "import sys\nfrom critical_neurons.cli import main\nsys.argv[1:] = ['reproduce', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('HEAVY', *{'torch', 'numpy', 'scipy', 'highspy', 'datasets'} & set(sys.modules))"
    )
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "critical-neurons reproduce" in written.partition("Example")[2]
    assert written.splitlines()[-1] == "HEAVY"

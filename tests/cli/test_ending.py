"""However a run is cut short, it ends with one line at most and an exit code that says why."""

import os
import subprocess
import sys

import pytest

BEGIN = "import os, signal, sys, time\nfrom critical_neurons.cli import ending\n"
KILL = "os.kill(os.getpid(), signal.SIG{}); time.sleep(5)"
SIGNALS = {"INT": (130, "Interrupted.\n"), "TERM": (143, "Terminated.\n")}
SLOW_IMPORT = (
    "import os, signal, time\ntry:\n    {}\nexcept BaseException:\n    raise ImportError('of something else')\n"
)


def run(code, shell="{}", **kwargs):
    command = shell.format('"$0" -c "$1"')
    return subprocess.run(
        ["sh", "-c", command, sys.executable, BEGIN + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **kwargs,
    )


@pytest.mark.parametrize("signal", SIGNALS)
def test_signals_before_a_command(signal):
    done = run(f"def work(): {KILL.format(signal)}\nending.run_to_an_end(work)")
    assert (done.returncode, done.stderr) == SIGNALS[signal]


@pytest.mark.parametrize("signal", SIGNALS)
def test_signals_in_a_command_undo_what_was_begun(signal):
    done = run(
        f"def work():\n    ending.commands.append('work')\n    try: {KILL.format(signal)}\n"
        "    finally: print('undone')\nending.run_to_an_end(work)"
    )
    assert (done.returncode, done.stderr, done.stdout) == (*SIGNALS[signal], "undone\n")


@pytest.mark.parametrize("signal", SIGNALS)
def test_signals_while_modules_are_imported(signal, tmp_path):
    (tmp_path / "slow_to_import.py").write_text(SLOW_IMPORT.format(KILL.format(signal)))
    done = run(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "def work():\n    ending.commands.append('work')\n    import slow_to_import\nending.run_to_an_end(work)"
    )
    assert (done.returncode, done.stderr) == SIGNALS[signal]


def test_progress_is_taken_away(tmp_path):
    (tmp_path / "slow_to_import.py").write_text(SLOW_IMPORT.format(KILL.format("INT")))
    done = run(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "def work():\n    ending.commands.append('work')\n    ending.in_place.append(None)\n"
        "    import slow_to_import\nending.run_to_an_end(work)"
    )
    assert done.returncode == 130
    assert done.stderr.endswith("\x1b[2K\x1b[?25hInterrupted.\n")


AT_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIG{signal})
sys.meta_path.insert(0, Interrupt())
"""
IMPORTED = [
    "critical_neurons.core",
    "critical_neurons.core.hooks",
    "critical_neurons.cli",
    "critical_neurons.cli.ending",
]


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("name", IMPORTED)
def test_signals_from_the_first_line_of_the_package_on(signal, name, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(name=name, signal=signal))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path[1:]]))
    command = [sys.executable, "-m", "critical_neurons", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == SIGNALS[signal]


def test_a_library_changes_no_handlers():
    code = "import signal; before = signal.getsignal(signal.SIGINT); import critical_neurons as cn; cn.Plan\n"
    done = run(f"{code}assert before is signal.getsignal(signal.SIGINT) is signal.default_int_handler")
    assert (done.returncode, done.stderr) == (0, "")


PRINT = "ending.run_to_an_end(lambda: print('much' * 100_000))"


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{} > /dev/full", 74, "Error: standard output: No space left on device.\n"),
        ("{} >&-", 74, "Error: standard output: Bad file descriptor.\n"),
        ("{{ {}; echo $? >&2; }} | true", 0, "141\n"),
    ],
)
def test_outputs_that_take_no_more(shell, code, said):
    done = run(PRINT, shell)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("shell", ["{} 2> /dev/full", "{} 2>&-"])
def test_nobody_listens_to_errors(shell):
    done = run("ending.run_to_an_end(lambda: (print('no', file=sys.stderr), print('yes'), sys.exit(2)))", shell)
    assert (done.returncode, done.stdout) == (2, "yes\n")


def test_files_do_not_take_the_place_of_a_closed_output(tmp_path):
    path = tmp_path / "precious"
    run(f"def work():\n    file = open({str(path)!r}, 'w')\n    print('much')\nending.run_to_an_end(work)", "{} >&-")
    assert path.read_text() == ""


def test_the_working_directory_is_gone(tmp_path):
    (tmp_path / "gone").mkdir()
    done = run("ending.run_to_an_end(lambda: print('yes'))", "rmdir ../gone; {}", cwd=tmp_path / "gone")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: the working directory")

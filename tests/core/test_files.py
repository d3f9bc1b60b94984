import os
import signal
import stat
import subprocess
import sys

import pytest

from critical_neurons.core import files
from critical_neurons.core.files import check_folder, check_writable, write_atomically, write_folder
from critical_neurons.errors import OutputError


def test_content_arrives_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "out.json"
    write_atomically(path, b"one")
    write_atomically(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["out.json"]


def test_checking_leaves_no_trace(tmp_path):
    old = tmp_path / "old.json"
    old.write_bytes(b"old")
    check_writable(old)
    check_writable(tmp_path / "new.json")
    assert os.listdir(tmp_path) == ["old.json"]
    assert old.read_bytes() == b"old"


def test_a_relative_path_without_directory_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomically("out.json", b"x")
    assert (tmp_path / "out.json").read_bytes() == b"x"


@pytest.mark.parametrize("act", [check_writable, lambda path: write_atomically(path, b"x")])
class TestRefusals:
    def test_directory(self, act, tmp_path):
        with pytest.raises(OutputError, match="is a directory"):
            act(tmp_path)

    def test_missing_parent(self, act, tmp_path):
        with pytest.raises(OutputError, match=r"missing does not exist\. Create it first"):
            act(tmp_path / "missing" / "out.json")
        assert not (tmp_path / "missing").exists()

    def test_parent_is_a_file(self, act, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="file is not a directory"):
            act(tmp_path / "file" / "out.json")

    def test_special_file(self, act, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OutputError, match="not a regular file"):
            act(tmp_path / "pipe")

    def test_name_too_long(self, act, tmp_path):
        with pytest.raises(OutputError, match="cannot be written"):
            act(tmp_path / ("x" * 300))

    def test_directory_that_refuses_new_files(self, act, tmp_path, monkeypatch):
        """Permissions do not bind root, who may run these tests; the refusal of the system is played."""

        def refuse(*_args, **_kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("pathlib.Path.touch", refuse)
        with pytest.raises(OutputError, match=r"out\.json: cannot be written \(Permission denied\)"):
            act(tmp_path / "out.json")


def test_a_write_that_fails_keeps_the_old_file_and_removes_the_draft(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_an_interrupted_write_keeps_the_old_file_and_removes_the_draft(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_writing_to_a_link_writes_what_it_points_to(tmp_path):
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_atomically(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"


def test_an_existing_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_check_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")
    seen = []

    def refuse(draft):
        seen.append(draft.read_bytes())
        raise ValueError("not good enough")

    with pytest.raises(ValueError, match="not good enough"):
        write_atomically(path, b"new", refuse)
    assert seen == [b"new"]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.bin"]


CONTENT = {"a.json": b"a", "b.bin": b"b"}
OTHER = {"a.json": b"other", "b.bin": b"b"}

KILLED = """
import os, shutil, signal
from pathlib import Path
from critical_neurons.core.files import write_folder
act = {step}
def act_and_die(*given, **named):
    act(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
{step} = act_and_die
write_folder({path!r}, {other!r}, overwrite=True)
"""


def read_folder(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


class TestFolder:
    def test_content_arrives_and_nothing_else_is_left(self, tmp_path):
        write_folder(tmp_path / "out", CONTENT)
        assert read_folder(tmp_path / "out") == CONTENT
        assert os.listdir(tmp_path) == ["out"]

    def test_an_empty_folder_is_taken_and_a_slash_allowed(self, tmp_path):
        (tmp_path / "out").mkdir()
        write_folder(f"{tmp_path}/out/", CONTENT)
        assert read_folder(tmp_path / "out") == CONTENT

    def test_an_existing_folder_is_replaced_on_request_alone(self, tmp_path):
        path = tmp_path / "out"
        write_folder(path, CONTENT)
        with pytest.raises(OutputError, match=r"out: exists and is not empty.*overwrite=True"):
            write_folder(path, OTHER)
        assert read_folder(path) == CONTENT
        path.chmod(0o750)
        write_folder(path, OTHER, overwrite=True)
        assert read_folder(path) == OTHER
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
        assert os.listdir(tmp_path) == ["out"]

    def test_other_files_are_never_removed(self, tmp_path):
        path = tmp_path / "out"
        write_folder(path, CONTENT)
        (path / "thesis.tex").write_text("years of work")
        with pytest.raises(OutputError, match=r"holds other files \(thesis\.tex\)"):
            write_folder(path, OTHER, overwrite=True)
        assert read_folder(path) == {**CONTENT, "thesis.tex": b"years of work"}

    def test_a_link_to_a_folder_stays_a_link(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        write_folder(tmp_path / "link", CONTENT)
        assert (tmp_path / "link").is_symlink()
        assert read_folder(tmp_path / "real") == CONTENT

    @pytest.mark.skipif(sys.platform != "linux", reason="no exchange of folders in one step")
    @pytest.mark.parametrize("step", ["Path.rename", "shutil.rmtree"])
    def test_a_kill_at_any_step_leaves_a_whole_folder(self, step, tmp_path):
        path = tmp_path / "out"
        write_folder(path, CONTENT)
        code = KILLED.format(step=step, path=str(path), other=OTHER)
        killed = subprocess.run([sys.executable, "-c", code], check=False)
        assert killed.returncode == -signal.SIGKILL or step == "Path.rename"  # which is not needed
        assert read_folder(path) == OTHER

    def test_without_an_exchange_the_old_folder_is_moved_away_first(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
        write_folder(tmp_path / "out", CONTENT)
        write_folder(tmp_path / "out", OTHER, overwrite=True)
        assert read_folder(tmp_path / "out") == OTHER
        assert os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize(
        "act", [lambda p: check_folder(p, CONTENT, overwrite=True), lambda p: write_folder(p, {})]
    )
    def test_refusals(self, act, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="file: is a file"):
            act(tmp_path / "file")
        with pytest.raises(OutputError, match=r"missing does not exist\. Create it first"):
            act(tmp_path / "missing" / "out")
        assert os.listdir(tmp_path) == ["file"]

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    @pytest.mark.parametrize("failing", ["fsync", "rename"])
    def test_a_failure_keeps_the_old_folder_and_leaves_nothing(self, failing, error, tmp_path, monkeypatch):
        """Full in the middle of a file; or refused when the new folder takes the place of the old one."""
        path = tmp_path / "out"
        write_folder(path, CONTENT)
        calls, rename = [], os.rename

        def fail(*args, **kwargs):
            calls.append(args)
            if len(calls) == 2:
                raise error
            if failing == "rename":
                rename(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            patch.setattr(files, "_exchange", lambda one, other: False)
            expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
            with pytest.raises(expected):
                write_folder(path, OTHER, overwrite=True)
        assert len(calls) >= 2
        assert read_folder(path) == CONTENT
        assert os.listdir(tmp_path) == ["out"]

    def test_a_failure_without_an_old_folder_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match=r"out: cannot be written \(No space left on device\)"):
            write_folder(tmp_path / "out", CONTENT)
        assert os.listdir(tmp_path) == []


def test_a_folder_that_another_run_has_filled_meanwhile_stays(tmp_path, monkeypatch):
    folder = tmp_path / "out"

    monkeypatch.setattr(files, "check_folder", lambda path, names, *, overwrite: None)
    write_folder(folder, {"a": b"first"})
    with pytest.raises(OutputError, match="not empty"):
        write_folder(folder, {"a": b"second"})
    assert (folder / "a").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
